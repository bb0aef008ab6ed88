"""The recorder, which writes down each step of a run and finally the summary.

A `run_record.RunRecord` holds what a run remembers about itself across
restarts. The `Recorder` updates it from the parts of the running program.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import pathlib
import time
from typing import Any, NamedTuple

from jaxrl_async.coordination import ledger as ledger_lib
from jaxrl_async.coordination import run_schedule
from jaxrl_async.coordination import staleness_control
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import run_record
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.reporting import summary as summary_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.training import step_metrics


class BadUpdatesError(supervisor_lib.RunError):
  """Too many updates in a row were not finite.

  The message names the step and its groups.
  """


class RlTimes(NamedTuple):
  """Times of the run in seconds, including those of its earlier starts.

  Attributes:
    now_s: since the start of the run.
    rl_s: duration of the RL stage without evaluations.
    busy_s: part of `rl_s` during which each slice was busy, by slice.
  """

  now_s: float
  rl_s: float
  busy_s: dict[str, float]


class Recorder:
  """Fetches the metrics of each step and writes them to all outputs.

  Threads: the methods belong to the main thread. `begin` writes in a separate
  thread, so that the device does not wait for it. From a call of `begin` until
  `wait` returns True, besides `wait`, `status` and `close` only `totals` and
  `end_rl` may be called, because these read nothing that the writing thread
  changes. Only plain counters are read from the rollout side, which goes on.
  """

  def __init__(
    self,
    record: run_record.RunRecord,
    *,
    workdir: pathlib.Path,
    writer: metrics_lib.MetricsWriter,
    ledger: ledger_lib.Ledger,
    rollout: rollout_side.RolloutSide,
    rewards: service_lib.RewardService,
    busy: dict[str, metrics_lib.BusyClock],
    progress: progress_lib.Progress,
    side_outputs: side_outputs_lib.SideOutputs,
    sampler: sampler_lib.Sampler,
    schedule: run_schedule.Schedule,
    max_bad_updates: int,
    solved_score: float,
    staleness: staleness_control.StalenessControl | None = None,
    scheduled: Mapping[str, Callable[[int], Any]] | None = None,
  ):
    """Prepare recording.

    Args:
      record: of the run; it is updated with each step.
      workdir: of the run.
      writer: writes the metrics.
      ledger: gets the trained groups.
      rollout: its counters are read.
      rewards: its metrics are read.
      busy: the clocks of the two slices, "train" and "rollout".
      progress: shows each step.
      side_outputs: guards outputs whose failure must not end the run.
      sampler: writes some completions of each step.
      schedule: records what timing has decided.
      max_bad_updates: so many skipped updates in a row end the run.
      solved_score: a completion with at least this score counts as solved.
      scheduled: returns each field with a schedule, of completed train steps.
      staleness: decides from the metrics of each step, if the bound may move.
    """
    self.record = record
    self._max_bad_updates = max_bad_updates
    self._solved_score = solved_score
    self._staleness = staleness
    self._scheduled = scheduled or {}
    self._bad_updates = 0
    self._writing: futures.Future[None] | None = None
    self._failure: BaseException | None = None
    self._status = "", 0.0
    self._workdir = workdir
    self._writer = writer
    self._ledger = ledger
    self._rollout = rollout
    self._rewards = rewards
    self._busy = busy
    self._progress = progress
    self._side_outputs = side_outputs
    self._sampler = sampler
    self._schedule = schedule
    self.clock = busy["train"]
    self._evaluating = timeline_lib.Timeline()
    # Each evaluation moves this forward by its duration, so it does not count.
    self._rl_start: metrics_lib.Reading | None = None
    self._rl_end: RlTimes | None = None
    self._last: dict[str, int | float] = {}

  def start_rl(self) -> None:
    """Start the clocks and counters of the RL stage."""
    self._rl_start = metrics_lib.read(self._busy)
    self._last = self.totals()

  def end_rl(self) -> None:
    """Stop the clocks of the RL stage after the last train step.

    The final evaluation and closing therefore do not count.
    """
    self._rl_end = self._rl_times()

  @contextlib.contextmanager
  def evaluating(self) -> Iterator[None]:
    """Exclude the time inside the block from `rl_s` and `busy_s`."""
    before = metrics_lib.read(self._busy)
    try:
      yield
    finally:
      after = metrics_lib.read(self._busy)
      self._evaluating.add(
        timeline_lib.Interval(before.now_s, after.now_s, "evaluation")
      )
      start = self._rl_start
      if start is not None:
        self._rl_start = metrics_lib.Reading(
          start.now_s + after.now_s - before.now_s,
          {
            name: busy_s + after.busy_s[name] - before.busy_s[name]
            for name, busy_s in start.busy_s.items()
          },
        )

  def begin(
    self,
    pending: step_metrics.Pending,
    totals: dict[str, int | float],
    more: Mapping[str, int | float],
    *,
    is_evaluated: bool,
  ) -> None:
    """Begin to write a step down in a separate thread.

    The previous step must be written already, which `wait` tells.

    Args:
      pending: the step.
      totals: the result of `totals` when the step was done.
      more: further metrics of the step.
      is_evaluated: whether an evaluation follows. Its metrics belong to the
        step, so the line of metrics is held back until they are known.
    """
    assert self._writing is None
    writing = self._writing = futures.Future()

    def write():
      self._step(pending, totals, more, is_evaluated)
      writing.set_result(None)

    # The thread is a daemon, so that a disk that does not respond cannot keep
    # the process from ending.
    supervisor_lib.start_thread("recorder", write, writing.set_exception)
    self._status = f"writing step {pending.step + 1} down", time.perf_counter()

  def wait(self, timeout_s: float) -> bool:
    """Wait until the step that was begun is written.

    A step that was written only in part can be in no checkpoint, so all later
    calls raise the same failure.

    Returns:
      False if it is not written after `timeout_s` seconds.

    Raises:
      BadUpdatesError: too many updates in a row were skipped.
      StorageError: the metrics or the ledger could not be written.
    """
    if self._failure is not None:
      raise self._failure
    if self._writing is None:
      return True
    if not futures.wait([self._writing], timeout_s).done:
      return False
    writing, self._writing = self._writing, None
    error = writing.exception()
    if not isinstance(error, BadUpdatesError):  # it follows a whole step
      self._failure = error
    writing.result()
    return True

  def status(self) -> str:
    """Return for the stall report what the recorder is doing."""
    if self._writing is None:
      return "recorder: everything is written"
    text, since_s = self._status
    return f"recorder: {text} since {time.perf_counter() - since_s:.1f} s"

  def close(self, timeout_s: float) -> None:
    """Wait until the writing thread is done, even if it has failed.

    Raises:
      TimeoutError: the thread is not done after `timeout_s` seconds.
    """
    if self._writing is None:
      return
    deadline = supervisor_lib.Deadline(timeout_s)
    while not futures.wait([self._writing], deadline.next_wait_s()).done:
      if deadline.next_wait_s() == 0:
        raise TimeoutError(f"{self.status()}; closed after {timeout_s:g} s")

  def _step(
    self,
    pending: step_metrics.Pending,
    totals: dict[str, int | float],
    more: Mapping[str, int | float],
    is_evaluated: bool,
  ) -> None:
    values, is_bad = pending.metrics()
    self._ledger.add_trained(
      pending.groups, step=pending.step, skipped_update=any(is_bad)
    )
    self._schedule.add_step(pending.step, pending.groups, pending.sums)
    self._sampler.write_step(pending.step + 1, pending.groups)
    delta = {name: totals[name] - self._last[name] for name in totals}
    self._last = totals
    step_s = max(delta["rl_s"], 1e-9)
    trained = sum(g.num_completion_tokens for g in pending.groups)
    values |= step_metrics.pass_at_k(pending.groups, self._solved_score)
    values |= _rollout_metrics(delta, step_s)
    values |= self._rewards.metrics()
    values |= self._rollout.coordinator.stream.metrics()
    values |= self._rollout.metrics()
    values |= more
    values |= {
      f"schedule/{field}": float(schedule(pending.step))
      for field, schedule in self._scheduled.items()
    }
    values |= {
      "time/step_s": step_s,
      "train/tokens_per_s": trained / step_s,
      "train/busy_frac": min(delta["train_busy_s"] / step_s, 1.0),
      "run/failed_side_outputs": self._side_outputs.num_failures,
    }
    ledger = self._ledger.totals()
    ended = (
      ledger.trained_tokens + ledger.filtered_tokens + ledger.failed_tokens
    )
    # The rollout side goes on counting. Its counter is read only once, so that
    # the values below agree, and after the ledger, so that no difference is
    # negative.
    generated = self._generated_tokens()
    values |= {
      "ledger/generated_tokens": generated,
      "ledger/trained_tokens": ledger.trained_tokens,
      "ledger/filtered_tokens": ledger.filtered_tokens,
      "ledger/failed_tokens": ledger.failed_tokens,
      "ledger/in_flight_tokens": generated - ended,
    }
    if self._staleness is not None:
      values |= self._staleness.observe(pending.step + 1, values)
    self.record.add_step(totals["now_s"], values)
    if not self.record.first_step_s:
      self.record.first_step_s = totals["rl_s"]
    write = self._writer.hold if is_evaluated else self._writer.write
    write(pending.step + 1, values)
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
    self, pending: step_metrics.Pending, is_bad: list[bool]
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
    """Return how many generated tokens have met each fate, or are in flight.

    Args:
      in_flight: the completion tokens of the outstanding groups, counted while
        the rollout side is paused.

    Raises:
      RuntimeError: the numbers do not add up to the generated tokens.
    """
    ledger = self._ledger.totals()
    tokens = {
      "generated": self._generated_tokens(),
      "trained": ledger.trained_tokens,
      "filtered": ledger.filtered_tokens,
      "failed": ledger.failed_tokens,
      "in_flight": in_flight,
    }
    ledger_lib.check_balance(**tokens)
    return tokens

  def schedule_bytes(self) -> int:
    """Return the length of the schedule, all of which is on the disk."""
    return self._schedule.num_bytes()

  def state(self) -> dict[str, Any]:
    """Return the current record as a checkpoint stores it."""
    times = self._rl_times()
    record = dataclasses.replace(
      self.record,
      wall_s=times.now_s,
      rl_s=times.rl_s,
      busy_s=times.busy_s,
      generated_tokens=self._generated_tokens(),
    )
    return dataclasses.asdict(record)

  def finish(
    self,
    *,
    step: int,
    tokens: dict[str, int],
    max_staleness: int,
    extra: dict[str, Any],
  ) -> str:
    """Write summary.json and summary.png.

    Args:
      step: completed train steps.
      tokens: the result of `tokens`.
      max_staleness: the largest bound that any start of the run has had.
      extra: further fields of the summary.

    Returns:
      The summary on one line.
    """
    record = self.record
    times = self._rl_end or self._rl_times()
    with self._side_outputs.attempt("summary.png"):
      summary_lib.draw(
        self._workdir / "summary.png",
        record.history(
          max_staleness=max_staleness,
          lanes={n: clock.timeline() for n, clock in self._busy.items()},
          evaluating=self._evaluating,
        ),
      )
    first, last = record.evaluations.first, record.evaluations.last
    return summary_lib.write(
      self._workdir,
      summary_lib.Summary(
        eval_before=first[2],
        eval_after=last[2],
        wall_s=self.clock.now(),
        warm_start_s=record.warm_start_s,
        train_steps=step,
        staleness_mean=record.staleness_mean,
        staleness_max=record.staleness_max,
        mismatch_kl_mean=record.mismatch_kl.mean,
        tokens=summary_lib.Tokens(**tokens),
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
          "prompts_too_long": self._rollout.coordinator.stream.num_too_long,
          "peak_memory_bytes": metrics_lib.peak_memory_bytes(),
          **extra,
        },
      ),
      max_staleness=max_staleness,
      note=self._progress.note,
    )

  def _generated_tokens(self) -> int:
    return self.record.generated_tokens + self._rollout.generated_tokens

  def _rl_times(self) -> RlTimes:
    """Return the times up to now."""
    record, start = self.record, self._rl_start
    now = metrics_lib.read(self._busy)
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
    """Return the current counters and clocks.

    The metrics of a step are computed from differences between these.
    """
    times = self._rl_times()
    return {
      **self._rollout.totals(),
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
    "rollout/decode_steps": delta["decode_steps"],
    "rollout/slot_occupancy": occupancy,
    "rollout/prefill_frac": prefill / max(all_tokens, 1),
    "rollout/recompute_tokens": delta["recompute_tokens"],
    "rollout/interruptions": delta["interruptions"],
    "rollout/preemptions": delta["preemptions"],
    "rollout/wait_for_admission_s": delta["wait_s"],
    "rollout/busy_frac": min(delta["rollout_busy_s"] / step_s, 1.0),
    "time/adopt_s": delta["adopt_s"],
    # Both are averages over the replicas.
    "time/adoption_s": delta["adopt_s"] / (delta["adoptions"] or 1),
  }
