"""What a run remembers about itself across restarts, for its summary."""

import dataclasses
from typing import Any

from jaxrl_async import metrics
from jaxrl_async import summary


def _add_counts(total: list[int], more: list[int]) -> list[int]:
  size = max(len(total), len(more))
  padded = [counts + [0] * (size - len(counts)) for counts in (total, more)]
  return [a + b for a, b in zip(*padded, strict=True)]


@dataclasses.dataclass(kw_only=True)
class RunRecord:
  """Grows with the run; JSON, so that a checkpoint carries it.

  Attributes:
    wall_s: of earlier starts of this run, up to their last checkpoint.
    warm_start_s: of the warm start.
    first_step_s: from the start of the RL stage to its first finished step.
    rl_s: wall-clock of the RL stage without evaluation, of earlier starts.
    busy_s: time inside device programs in the RL stage, of earlier starts.
    generated_tokens: training tokens, of earlier starts.
    evaluations: (time, version, sampled accuracy, greedy accuracy or None).
    evaluation_kls: mismatch of each evaluation's completions.
    rewards: (time, mean reward) of each train step.
    mismatch_kls: of each train step that had tokens of the current version.
    staleness_counts: trained tokens by staleness.
    versions_counts: trained trajectories by number of versions.
    windows: of evaluations, in which neither slice is counted.
  """

  wall_s: float = 0.0
  warm_start_s: float = 0.0
  first_step_s: float = 0.0
  rl_s: float = 0.0
  busy_s: dict[str, float] = dataclasses.field(
    default_factory=lambda: {"rollout": 0.0, "train": 0.0}
  )
  generated_tokens: int = 0
  evaluations: list[tuple[float, int, float, float | None]] = (
    dataclasses.field(default_factory=list)
  )
  evaluation_kls: list[float] = dataclasses.field(default_factory=list)
  rewards: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  mismatch_kls: list[float] = dataclasses.field(default_factory=list)
  staleness_counts: list[int] = dataclasses.field(default_factory=list)
  versions_counts: list[int] = dataclasses.field(default_factory=list)
  windows: list[tuple[float, float]] = dataclasses.field(default_factory=list)

  def add_step(self, now_s: float, values: dict[str, Any]) -> None:
    """Takes what the summary needs from a train step's metrics."""
    self.rewards.append((now_s, float(values["reward/mean"])))
    self.staleness_counts = _add_counts(
      self.staleness_counts, values["staleness/histogram"]
    )
    self.versions_counts = _add_counts(
      self.versions_counts, values["staleness/versions_histogram"]
    )
    if "offpolicy/mismatch_kl" in values:
      self.mismatch_kls.append(float(values["offpolicy/mismatch_kl"]))

  @property
  def staleness_mean(self) -> float:
    """Over all trained tokens."""
    count = sum(self.staleness_counts)
    total = sum(i * n for i, n in enumerate(self.staleness_counts))
    return total / count if count else 0.0

  @property
  def staleness_max(self) -> int:
    """Of any trained token."""
    return max((i for i, n in enumerate(self.staleness_counts) if n), default=0)

  @property
  def versions_per_trajectory_mean(self) -> float:
    """Over all trained trajectories."""
    count = sum(self.versions_counts)
    total = sum(i * n for i, n in enumerate(self.versions_counts))
    return total / count if count else 0.0

  @property
  def mismatch_kl_mean(self) -> float:
    """Over steps and evaluations alike."""
    values = self.mismatch_kls + self.evaluation_kls
    return sum(values) / len(values) if values else 0.0

  def history(
    self,
    *,
    max_staleness: int,
    intervals: dict[str, list[metrics.Interval]],
  ) -> summary.History:
    """What the picture shows."""
    return summary.History(
      max_staleness=max_staleness,
      evaluations=[(e[0], e[2]) for e in self.evaluations],
      rewards=self.rewards,
      staleness_counts=self.staleness_counts,
      versions_counts=self.versions_counts,
      intervals=intervals,
      evaluation_windows=self.windows,
      step_ends_s=[time_s for time_s, _ in self.rewards],
    )
