"""The result of a run: `summary.json`, a function of the lines of its metrics.

It can be made at any time: of a run that has ended, that has died, or that
still runs.
"""

from collections.abc import Sequence
import dataclasses
import json
import math
import os
import pathlib
from typing import Any, NamedTuple

from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.storage import disk

SAMPLED, GREEDY = "eval/held_out/avg@", "eval/greedy/avg@1"
# The slices, each of which has a clock.
SLICES = ("rollout", "train")
# The metrics of the train steps that the picture shows.
SIGNALS = (
  "reward/mean",
  "policy/entropy",
  "offpolicy/behavior_kl",
  "policy/approx_kl",
  "completion/tokens_mean",
  "completion/tokens_max",
)


class Evaluated(NamedTuple):
  """An evaluation of a version.

  Attributes:
    at_s: seconds since the start of the run, when it began.
    step: the version.
    accuracy: share of right answers to the held-out questions, sampled.
    greedy: the same of greedy answers; None without these.
  """

  at_s: float
  step: int
  accuracy: float
  greedy: float | None


@dataclasses.dataclass(kw_only=True)
class Record:
  """What the lines of metrics say; times are seconds since the run's start.

  Attributes:
    num_steps: completed train steps.
    last: the last value of each name that a line had.
    evaluations: in their order.
    step_ends_s: when each train step was done.
    signals: the values of `SIGNALS` of each train step; None if it is missing
      or not finite.
    staleness_counts: trained tokens by staleness, from 0.
    versions_counts: trained trajectories by number of versions, from 0.
    mismatch_kl: of the completions of each evaluation in a pause, and of each
      train step that had tokens of the current version.
    first_step_s: from the start of the RL stage to its first finished step.
    pauses: beginning and length of what is no part of the RL stage.
    timelines: what each slice did.
  """

  num_steps: int = 0
  last: dict[str, Any] = dataclasses.field(default_factory=dict)
  evaluations: list[Evaluated] = dataclasses.field(default_factory=list)
  step_ends_s: list[float] = dataclasses.field(default_factory=list)
  signals: dict[str, list[float | None]] = dataclasses.field(
    default_factory=lambda: {name: [] for name in SIGNALS}
  )
  staleness_counts: list[int] = dataclasses.field(default_factory=list)
  versions_counts: list[int] = dataclasses.field(default_factory=list)
  mismatch_kl: list[float | None] = dataclasses.field(default_factory=list)
  first_step_s: float = 0.0
  pauses: list[tuple[float, float]] = dataclasses.field(default_factory=list)
  timelines: dict[str, list[timeline_lib.Packed]] = dataclasses.field(
    default_factory=lambda: {name: [] for name in SLICES}
  )

  def add(self, line: dict[str, Any]) -> None:
    """Add a line."""
    now_s, rl_s = line["run/wall_s"], line["run/rl_s"]
    before_s = self.last.get("run/wall_s", line["run/warm_start_s"])
    pause_s = now_s - before_s - (rl_s - self.last.get("run/rl_s", 0.0))
    if pause_s > 1e-3:  # and no rounding
      self.pauses.append((before_s, pause_s))
    for name, value in line.get(metrics_lib.TIMELINES, {}).items():
      self.timelines[name].append(timeline_lib.Packed(*value))
    if "reward/mean" in line:
      self._add_step(line)
    for name, value in line.items():
      if name.startswith(SAMPLED):
        self.evaluations.append(
          Evaluated(
            line.get("eval/begun_s", now_s),
            line["step"],
            value,
            line.get(GREEDY),
          )
        )
      elif name in ("offpolicy/mismatch_kl", "eval/mismatch_kl"):
        self.mismatch_kl.append(value)
    self.num_steps = max(self.num_steps, line["step"])
    self.last |= line

  def _add_step(self, line: dict[str, Any]) -> None:
    self.step_ends_s.append(line["run/wall_s"])
    self.first_step_s = self.first_step_s or line["run/rl_s"]
    for name, values in self.signals.items():
      value = line.get(name)
      values.append(None if value is None else float(value))
    _count(self.staleness_counts, line["staleness/histogram"])
    _count(self.versions_counts, line["staleness/versions_histogram"])


def read(workdir: pathlib.Path) -> Record:
  """Return what the lines of metrics in a workdir say.

  Raises:
    FileNotFoundError: there are none.
  """
  record = Record()
  for line in metrics_lib.lines(workdir):
    record.add(line)
  return record


def _count(total: list[int], more: Sequence[int]) -> None:
  total += [0] * (len(more) - len(total))
  for i, count in enumerate(more):
    total[i] += count


def mean_of_counts(counts: Sequence[int]) -> float:
  """Return the mean of numbers, of which counts[i] equal i; 0 without any."""
  total = sum(i * count for i, count in enumerate(counts))
  return total / max(sum(counts), 1)


def of(record: Record) -> dict[str, Any]:
  """Return the fields of `summary.json`.

  A field that no line tells yet is None, or 0 if it counts something.
  """
  last, evaluations = record.last, record.evaluations
  first = evaluations[0] if evaluations else None
  latest = evaluations[-1] if evaluations else None
  rl_s = last.get("run/rl_s", 0.0)
  staleness = [i for i, n in enumerate(record.staleness_counts) if n]
  kls = [x for x in record.mismatch_kl if x is not None]
  return {
    "eval_before": first and first.accuracy,
    "eval_after": latest and latest.accuracy,
    "eval_before_greedy": first and first.greedy,
    "eval_after_greedy": latest and latest.greedy,
    "wall_s": last.get("run/wall_s", 0.0),
    "warm_start_s": last.get("run/warm_start_s", 0.0),
    "rl_s": rl_s,
    "first_step_s": record.first_step_s,
    "train_steps": record.num_steps,
    "staleness_mean": mean_of_counts(record.staleness_counts),
    "staleness_max": max(staleness, default=0),
    "versions_per_trajectory_mean": mean_of_counts(record.versions_counts),
    "mismatch_kl_mean": math.fsum(kls) / len(kls) if kls else 0.0,
    "mismatch_kl_max": max(kls, default=0.0),
    "mismatch_kl_not_finite": len(record.mismatch_kl) - len(kls),
    "tokens": {
      name: last.get(f"ledger/{name}_tokens", 0)
      for name in ("generated", "trained", "filtered", "failed", "in_flight")
    },
    **{
      f"{name}_busy_frac": last[f"run/{name}_busy_s"] / rl_s if rl_s else 0.0
      for name in SLICES
    },
    "prompts_too_long": int(last.get("data/prompts_too_long", 0)),
    "num_programs": last.get("run/num_programs", 0),
    "num_compilations": last.get("run/num_compilations", 0),
  }


def write(workdir: str | os.PathLike[str], record: Record) -> str:
  """Write `summary.json`, and return the same object on one line.

  Raises:
    StorageError: the file could not be written.
  """
  values = of(record)
  disk.replace_text(
    pathlib.Path(workdir) / "summary.json", json.dumps(values, indent=2) + "\n"
  )
  return json.dumps(values)
