"""What a run writes down: a line a step, and at the end its summary.

`RunRecord` is what it remembers about itself across restarts; `Recorder` reads
the parts of a running one.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import pathlib
from typing import Any, NamedTuple

from jaxrl_async import ledger as ledger_lib
from jaxrl_async import metrics
from jaxrl_async import progress as progress_lib
from jaxrl_async import series
from jaxrl_async import summary
from jaxrl_async import timeline
from jaxrl_async import trainer as trainer_lib
from jaxrl_async.rewards import service
from jaxrl_async.rollout import worker as worker_lib


class BadUpdatesError(RuntimeError):
  """Too many updates in a row were not finite; names step and groups."""


def _add_counts(total: list[int], more: list[int]) -> list[int]:
  size = max(len(total), len(more))
  padded = [counts + [0] * (size - len(counts)) for counts in (total, more)]
  return [a + b for a, b in zip(*padded, strict=True)]


@dataclasses.dataclass(kw_only=True)
class RunRecord:
  """What the summary needs, in the same memory however long the run is.

  JSON, so that a checkpoint carries it.

  Attributes:
    wall_s: of earlier starts of this run, up to their last checkpoint.
    warm_start_s: of the warm start.
    first_step_s: from the start of the RL stage to its first finished step.
    rl_s: wall-clock of the RL stage without evaluation, of earlier starts.
    busy_s: time inside device programs in the RL stage, of earlier starts.
    generated_tokens: training tokens, of earlier starts.
    evaluations: (time, version, sampled accuracy, greedy accuracy or None).
    rewards: (time, mean reward) of each train step.
    mismatch_kl: of each evaluation's completions, and of each train step that
      had tokens of the current version.
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
  evaluations: series.Series = dataclasses.field(default_factory=series.Series)
  rewards: series.Series = dataclasses.field(default_factory=series.Series)
  mismatch_kl: series.Mean = dataclasses.field(default_factory=series.Mean)
  staleness_counts: list[int] = dataclasses.field(default_factory=list)
  versions_counts: list[int] = dataclasses.field(default_factory=list)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "RunRecord":
    """The record of a checkpoint, also of one that has lists of all steps."""
    values = dict(values)
    # Of the older kind; the picture has no use for windows of earlier starts.
    values.pop("windows", None)
    kls = series.Mean(**values.pop("mismatch_kl", {}))
    for name in ("mismatch_kls", "evaluation_kls"):
      for value in values.pop(name, ()):
        kls.add(value)
    for name in {"evaluations", "rewards"} & values.keys():
      values[name] = series.Series.from_json(values[name])
    return cls(mismatch_kl=kls, **values)

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
      self.mismatch_kl.add(float(values["offpolicy/mismatch_kl"]))

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

  def history(
    self,
    *,
    max_staleness: int,
    lanes: dict[str, timeline.Timeline],
    evaluating: timeline.Timeline,
  ) -> summary.History:
    """What the picture shows."""
    return summary.History(
      max_staleness=max_staleness,
      evaluations=[(e[0], e[2]) for e in self.evaluations.points()],
      rewards=self.rewards.points(),
      staleness_counts=self.staleness_counts,
      versions_counts=self.versions_counts,
      lanes=lanes,
      evaluating=evaluating,
      step_ends_s=[time_s for time_s, _ in self.rewards.recent],
      num_steps=self.rewards.num_points,
      is_resumed=self.wall_s > 0.0,
    )


class RlTimes(NamedTuple):
  """Seconds of the RL stage without evaluation, and busy ones of each slice.

  Attributes:
    now_s: since the start of the run.
    rl_s: earlier starts included; so `busy_s`.
  """

  now_s: float
  rl_s: float
  busy_s: dict[str, float]


class Recorder:
  """Fetches a step's metrics and writes them everywhere they belong.

  Threads: its methods belong to the main thread; `begin` writes in a thread of
  its own, so that the device need not wait for it. Between `begin` and `wait`
  only `totals` and `end_rl` may be called, which read nothing that it changes.
  What is read of the worker are plain counters.
  """

  def __init__(
    self,
    record: RunRecord,
    *,
    workdir: pathlib.Path,
    writer: metrics.MetricsWriter,
    ledger: ledger_lib.Ledger,
    worker: worker_lib.RolloutWorker,
    rewards: service.RewardService,
    busy: dict[str, metrics.BusyClock],
    progress: progress_lib.Progress,
    max_bad_updates: int,
  ):
    self.record = record
    self._max_bad_updates = max_bad_updates
    self._bad_updates = 0
    self._thread = futures.ThreadPoolExecutor(1, "recorder")
    self._writing: futures.Future[None] | None = None
    self._workdir = workdir
    self._writer = writer
    self._ledger = ledger
    self._worker = worker
    self._rewards = rewards
    self._busy = busy
    self._progress = progress
    self._clock = busy["train"]
    self._evaluating = timeline.Timeline()
    # Moved forward by each evaluation, as if that had taken no time.
    self._rl_start: metrics.Reading | None = None
    self._rl_end: RlTimes | None = None
    self._last: dict[str, int | float] = {}

  def start_rl(self) -> None:
    """The RL stage begins: everything from here on counts."""
    self._rl_start = metrics.read(self._busy)
    self._last = self.totals()

  def end_rl(self) -> None:
    """The last train step is done; evaluating and closing do not count."""
    self._rl_end = self._rl_times()

  @contextlib.contextmanager
  def evaluating(self) -> Iterator[None]:
    """What happens inside counts for neither slice, nor as RL stage."""
    before = metrics.read(self._busy)
    try:
      yield
    finally:
      after = metrics.read(self._busy)
      self._evaluating.add(
        timeline.Interval(before.now_s, after.now_s, "evaluation")
      )
      start = self._rl_start
      if start is not None:
        self._rl_start = metrics.Reading(
          start.now_s + after.now_s - before.now_s,
          {
            name: busy_s + after.busy_s[name] - before.busy_s[name]
            for name, busy_s in start.busy_s.items()
          },
        )

  def begin(
    self,
    pending: trainer_lib.Pending,
    totals: dict[str, int | float],
    evaluated: Mapping[str, int | float],
  ) -> None:
    """Begins to write a step down, once the one before it is written.

    Args:
      pending: the step.
      totals: of `totals`, taken when the step was done.
      evaluated: metrics of the caller: of an evaluation after the step, say.

    Raises:
      BadUpdatesError: as `wait`.
    """
    self.wait()
    self._writing = self._thread.submit(self._step, pending, totals, evaluated)

  def wait(self) -> None:
    """Waits until what was begun is written.

    Raises:
      BadUpdatesError: too many updates in a row were skipped.
    """
    writing, self._writing = self._writing, None
    if writing is not None:
      writing.result()

  def check(self) -> None:
    """Raises what ended the writing of a step, if it has ended so."""
    if self._writing is not None and self._writing.done():
      self.wait()

  def close(self, timeout_s: float) -> None:
    """Ends the thread, after what was begun.

    Raises:
      TimeoutError: that took too long.
    """
    self._thread.shutdown(wait=False)
    if self._writing is not None:
      self._writing.exception(timeout_s)

  def _step(
    self,
    pending: trainer_lib.Pending,
    totals: dict[str, int | float],
    evaluated: Mapping[str, int | float],
  ) -> None:
    values, is_bad = pending.metrics()
    for group in pending.groups:
      self._ledger.add_trained(
        group, step=pending.step, skipped_update=any(is_bad)
      )
    delta = {name: totals[name] - self._last[name] for name in totals}
    self._last = totals
    step_s = max(delta["rl_s"], 1e-9)
    trained = sum(g.num_completion_tokens for g in pending.groups)
    values |= _rollout_metrics(delta, step_s)
    values |= self._rewards.metrics()
    values |= evaluated
    values |= {
      "time/step_s": step_s,
      "train/tokens_per_s": trained / step_s,
      "train/busy_frac": min(delta["train_busy_s"] / step_s, 1.0),
    }
    ledger = self._ledger.state()
    ended = (
      ledger.trained_tokens + ledger.filtered_tokens + ledger.failed_tokens
    )
    # Once, and after the ledger: the worker goes on counting.
    generated = self._generated_tokens()
    values |= {
      "ledger/generated_tokens": generated,
      "ledger/trained_tokens": ledger.trained_tokens,
      "ledger/filtered_tokens": ledger.filtered_tokens,
      "ledger/failed_tokens": ledger.failed_tokens,
      "ledger/in_flight_tokens": generated - ended,
    }
    self.record.add_step(totals["now_s"], values)
    if not self.record.first_step_s:
      self.record.first_step_s = totals["rl_s"]
    self._writer.write(pending.step + 1, values)
    self._progress.step(
      progress_lib.StepReport(
        step=pending.step + 1,
        reward=values["reward/mean"],
        staleness_mean=values["staleness/mean"],
        staleness_max=values["staleness/max"],
        tokens_per_s=values["rollout/tokens_per_s"],
        rollout_busy_frac=values["rollout/busy_frac"],
        train_busy_frac=values["train/busy_frac"],
      )
    )
    self._check_updates(pending, is_bad)

  def _check_updates(
    self, pending: trainer_lib.Pending, is_bad: list[bool]
  ) -> None:
    for bad in is_bad:
      self._bad_updates = self._bad_updates + 1 if bad else 0
      if self._bad_updates >= self._max_bad_updates:
        indices = [group.index for group in pending.groups]
        raise BadUpdatesError(
          f"step {pending.step}: {self._bad_updates} updates in a row had a"
          f" loss or gradient that is not finite (train.max_bad_updates);"
          f" groups {indices}"
        )

  def tokens(self, in_flight: int) -> dict[str, int]:
    """Where the generated tokens are.

    Args:
      in_flight: counted over the outstanding groups, while the worker pauses.

    Raises:
      RuntimeError: they do not balance.
    """
    ledger = self._ledger.state()
    tokens = {
      "generated": self._generated_tokens(),
      "trained": ledger.trained_tokens,
      "filtered": ledger.filtered_tokens,
      "failed": ledger.failed_tokens,
      "in_flight": in_flight,
    }
    ledger_lib.check_balance(**tokens)
    return tokens

  def state(self) -> dict[str, Any]:
    """The record as of now, for a checkpoint."""
    times = self._rl_times()
    return dataclasses.asdict(
      dataclasses.replace(
        self.record,
        wall_s=times.now_s,
        rl_s=times.rl_s,
        busy_s=times.busy_s,
        generated_tokens=self._generated_tokens(),
      )
    )

  def finish(
    self,
    *,
    step: int,
    tokens: dict[str, int],
    max_staleness: int,
    extra: dict[str, Any],
  ) -> str:
    """Writes summary.json and summary.png; gives the summary's line."""
    record = self.record
    times = self._rl_end or self._rl_times()
    summary.draw(
      self._workdir / "summary.png",
      record.history(
        max_staleness=max_staleness,
        lanes={n: clock.timeline() for n, clock in self._busy.items()},
        evaluating=self._evaluating,
      ),
    )
    first, last = record.evaluations.first, record.evaluations.last
    return summary.write(
      self._workdir,
      summary.Summary(
        eval_before=first[2],
        eval_after=last[2],
        wall_s=self._clock.now(),
        warm_start_s=record.warm_start_s,
        train_steps=step,
        staleness_mean=record.staleness_mean,
        staleness_max=record.staleness_max,
        mismatch_kl_mean=record.mismatch_kl.mean,
        tokens=summary.Tokens(**tokens),
        rollout_busy_frac=times.busy_s["rollout"] / times.rl_s,
        train_busy_frac=times.busy_s["train"] / times.rl_s,
        versions_per_trajectory_mean=record.versions_per_trajectory_mean,
        extra={
          "eval_before_greedy": first[3],
          "eval_after_greedy": last[3],
          "mismatch_kl_max": record.mismatch_kl.maximum,
          "mismatch_kl_not_finite": record.mismatch_kl.num_not_finite,
          "rl_s": times.rl_s,
          "first_step_s": record.first_step_s,
          "prompts_too_long": self._worker.stream.num_too_long,
          "peak_memory_bytes": metrics.peak_memory_bytes(),
          **extra,
        },
      ),
      max_staleness=max_staleness,
    )

  def _generated_tokens(self) -> int:
    written = self._worker.scheduler.stats.generated_tokens
    training = written - self._worker.served_tokens
    return self.record.generated_tokens + training

  def _rl_times(self) -> RlTimes:
    """Of the RL stage up to now, without evaluation."""
    record, start = self.record, self._rl_start
    now = metrics.read(self._busy)
    if start is None:
      return RlTimes(now.now_s, record.rl_s, dict(record.busy_s))
    return RlTimes(
      now.now_s,
      record.rl_s + now.now_s - start.now_s,
      {
        name: record.busy_s[name] + busy_s - start.busy_s[name]
        for name, busy_s in now.busy_s.items()
      },
    )

  def totals(self) -> dict[str, int | float]:
    """Counters and clocks as of now, of which a step takes differences."""
    times = self._rl_times()
    return {
      **dataclasses.asdict(self._worker.scheduler.stats),
      "wait_s": self._worker.wait_for_admission_s,
      "adopt_s": self._worker.adopt_s,
      "now_s": times.now_s,
      "rl_s": times.rl_s,
      **{f"{name}_busy_s": value for name, value in times.busy_s.items()},
    }


def _rollout_metrics(
  delta: dict[str, int | float], step_s: float
) -> dict[str, int | float]:
  slot_steps = delta["waiting_slot_steps"]
  prefill = delta["prefill_tokens"]
  occupancy = delta["busy_slot_steps"] / slot_steps if slot_steps else 1.0
  all_tokens = prefill + delta["generated_tokens"]
  return {
    "rollout/tokens_per_s": delta["generated_tokens"] / step_s,
    "rollout/slot_occupancy": occupancy,
    "rollout/prefill_frac": prefill / max(all_tokens, 1),
    "rollout/recompute_tokens": delta["recompute_tokens"],
    "rollout/interruptions": delta["interruptions"],
    "rollout/preemptions": delta["preemptions"],
    "rollout/wait_for_admission_s": delta["wait_s"],
    "rollout/busy_frac": min(delta["rollout_busy_s"] / step_s, 1.0),
    "time/adopt_s": delta["adopt_s"],
  }
