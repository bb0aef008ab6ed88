"""What a run remembers about itself across restarts."""

import dataclasses
import math
from typing import Any

from jaxrl_async.reporting import series as series_lib
from jaxrl_async.reporting import summary as summary_lib
from jaxrl_async.reporting import timeline as timeline_lib


def _add_counts(total: list[int], more: list[int]) -> list[int]:
  size = max(len(total), len(more))
  padded = [counts + [0] * (size - len(counts)) for counts in (total, more)]
  return [a + b for a, b in zip(*padded, strict=True)]


def _finite(value: Any) -> float | None:
  return None if value is None or not math.isfinite(value) else float(value)


def _mean_of_counts(counts: list[int]) -> float:
  """Return the mean of numbers, of which counts[i] equal i; 0 without any."""
  total = sum(i * count for i, count in enumerate(counts))
  return total / max(sum(counts), 1)


@dataclasses.dataclass(kw_only=True)
class RunRecord:
  """The data of the summary, in memory that does not grow with the run.

  It can be stored as JSON, so that a checkpoint carries it.

  Attributes:
    wall_s: time of earlier starts of this run, up to their last checkpoint.
    warm_start_s: time of the warm start.
    first_step_s: time from the start of the RL stage to its first finished
      step.
    rl_s: time of the RL stage without evaluation, of earlier starts.
    busy_s: time inside device programs in the RL stage, of earlier starts.
    generated_tokens: written training tokens, of earlier starts.
    evaluations: (time, version, sampled accuracy, greedy accuracy or None).
    rewards: (time, mean reward) of each train step.
    signals: (time, *values) of each train step; see `summary.History`.
    mismatch_kl: of the completions of each evaluation, and of each train step
      that had tokens of the current version.
    staleness_counts: trained tokens by staleness.
    versions_counts: trained trajectories by number of versions.
  """

  wall_s: float = 0.0
  warm_start_s: float = 0.0
  first_step_s: float = 0.0
  rl_s: float = 0.0
  busy_s: dict[str, float] = dataclasses.field(
    default_factory=lambda: {"rollout": 0.0, "train": 0.0}
  )
  generated_tokens: int = 0
  evaluations: series_lib.Series = dataclasses.field(
    default_factory=series_lib.Series
  )
  rewards: series_lib.Series = dataclasses.field(
    default_factory=series_lib.Series
  )
  signals: series_lib.Series = dataclasses.field(
    default_factory=series_lib.Series
  )
  mismatch_kl: series_lib.Mean = dataclasses.field(
    default_factory=series_lib.Mean
  )
  staleness_counts: list[int] = dataclasses.field(default_factory=list)
  versions_counts: list[int] = dataclasses.field(default_factory=list)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "RunRecord":
    """Return the record of a checkpoint."""
    values = dict(values)
    for name in {"evaluations", "rewards", "signals"} & values.keys():
      values[name] = series_lib.Series.from_json(values[name])
    kls = series_lib.Mean(**values.pop("mismatch_kl", {}))
    return cls(mismatch_kl=kls, **values)

  def add_step(self, now_s: float, values: dict[str, Any]) -> None:
    """Add what the summary needs from the metrics of a train step."""
    self.rewards.append((now_s, float(values["reward/mean"])))
    signals = [_finite(values.get(name)) for name in summary_lib.SIGNALS]
    self.signals.append((now_s, *signals))
    self.staleness_counts = _add_counts(
      self.staleness_counts, values["staleness/histogram"]
    )
    self.versions_counts = _add_counts(
      self.versions_counts, values["staleness/versions_histogram"]
    )
    if "offpolicy/mismatch_kl" in values:
      self.mismatch_kl.add(float(values["offpolicy/mismatch_kl"]))

  @property
  def staleness_mean(self) -> float:
    """The mean over all trained tokens."""
    return _mean_of_counts(self.staleness_counts)

  @property
  def staleness_max(self) -> int:
    """The maximum over all trained tokens."""
    return max((i for i, n in enumerate(self.staleness_counts) if n), default=0)

  @property
  def versions_per_trajectory_mean(self) -> float:
    """The mean over all trained trajectories."""
    return _mean_of_counts(self.versions_counts)

  def history(
    self,
    *,
    max_staleness: int,
    lanes: dict[str, timeline_lib.Timeline],
    evaluating: timeline_lib.Timeline,
  ) -> summary_lib.History:
    """Return the data of the picture."""
    return summary_lib.History(
      max_staleness=max_staleness,
      evaluations=[(e[0], e[2]) for e in self.evaluations.points()],
      rewards=self.rewards.points(),
      signals=self.signals.points(),
      staleness_counts=self.staleness_counts,
      versions_counts=self.versions_counts,
      lanes=lanes,
      evaluating=evaluating,
      step_ends_s=[time_s for time_s, _ in self.rewards.recent],
      num_steps=self.rewards.num_points,
      is_resumed=self.wall_s > 0.0,
    )
