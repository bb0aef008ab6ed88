"""The recorder, which writes down each step of a run.

Every line of metrics has the totals of the run so far besides its own values.
The summary is made from the lines alone, and a checkpoint holds the totals, so
that a later start of the run goes on counting.
"""

from collections.abc import Iterator, Mapping
from concurrent import futures
import contextlib
import dataclasses
import pathlib
import time
from typing import Any

from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.buffer import staleness_control
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import timing_record
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import picture
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.reporting import summary as summary_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.training import step_metrics

# Of the RL stage without evaluations in a pause, over all starts of the run.
_RL_TOTALS = ("run/rl_s", "run/rollout_busy_s", "run/train_busy_s")


class BadUpdatesError(supervisor_lib.RunError):
  """Too many updates in a row were not finite.

  The message names the step and its groups.
  """


@dataclasses.dataclass
class Recorder:
  """Fetches the metrics of each step and writes them to all outputs.

  Threads: the methods belong to the main thread. `begin` writes in a separate
  thread, so that the device does not wait for it. From a call of `begin` until
  `wait` returns True, besides `wait`, `status` and `close` only `totals` and
  `end_rl` may be called, because these read nothing that the writing thread
  changes. Only plain counters are read from the rollout side, which goes on.

  Attributes:
    before: totals of earlier starts of the run, as `state` has returned them,
      and `run/warm_start_s` and `run/max_staleness`.
    ledger: gets the trained groups.
    busy: the clocks of the two slices, "train" and "rollout".
    compilations: of this start.
    side_outputs: guards outputs whose failure must not end the run.
    sampler: writes some completions of each step.
    timing: records what timing has decided.
    max_bad_updates: so many skipped updates in a row end the run.
    solved_score: a completion with at least this score counts as solved.
    staleness: decides from the metrics of each step; None if the bound is
      fixed.
  """

  before: Mapping[str, int | float]
  _: dataclasses.KW_ONLY
  workdir: pathlib.Path
  writer: metrics_lib.MetricsWriter
  ledger: ledger_lib.Ledger
  rollout: rollout_side.RolloutSide
  rewards: service_lib.RewardService
  busy: dict[str, metrics_lib.BusyClock]
  compilations: metrics_lib.CompilationCounter
  progress: progress_lib.Progress
  side_outputs: side_outputs_lib.SideOutputs
  sampler: sampler_lib.Sampler
  timing: timing_record.TimingRecord
  max_bad_updates: int
  solved_score: float
  staleness: staleness_control.StalenessControl | None = None

  def __post_init__(self):
    """Prepare recording; the RL stage stands still."""
    self._bad_updates = 0
    self._writing: futures.Future[None] | None = None
    self._failure: BaseException | None = None
    self._status = "", 0.0
    # Totals of the RL stage up to a reading of the clocks, after which it goes
    # on. Without a reading it stands still. One assignment replaces both,
    # because the writing thread reads them.
    self._rl: tuple[dict[str, float], metrics_lib.Reading | None] = (
      {name: self.before.get(name, 0.0) for name in _RL_TOTALS},
      None,
    )
    self._last: dict[str, int | float] = {}
    self.writer.totals = self._line_totals

  def start_rl(self) -> None:
    """Start the clocks and counters of the RL stage."""
    for clock in self.busy.values():
      clock.cut_timeline()
    self._rl = self._rl[0], metrics_lib.read(self.busy)
    self._last = self.totals()

  def end_rl(self) -> None:
    """Stop the clocks of the RL stage.

    What follows the last train step therefore does not count.
    """
    self._rl = self._rl_totals(metrics_lib.read(self.busy)), None

  @contextlib.contextmanager
  def evaluating(self) -> Iterator[None]:
    """Leave the block out of the clocks and counters of the RL stage."""
    goes_on = self._rl[1] is not None
    self.end_rl()
    before = self.totals()
    try:
      yield
    finally:
      if goes_on:
        for name, value in self.totals().items():
          self._last[name] += value - before[name]
        self._rl = self._rl[0], metrics_lib.read(self.busy)

  def begin(
    self,
    pending: step_metrics.Pending,
    totals: dict[str, int | float],
    more: Mapping[str, int | float],
  ) -> None:
    """Begin to write a step down in a separate thread.

    The previous step must be written already, which `wait` tells.

    Args:
      pending: the step.
      totals: the result of `totals` when the step was done.
      more: further metrics of the step.
    """
    assert self._writing is None
    writing = self._writing = futures.Future()

    def write():
      self._step(pending, totals, more)
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
  ) -> None:
    values, is_bad = pending.metrics()
    self.ledger.add_trained(
      pending.groups, step=pending.step, skipped_update=any(is_bad)
    )
    self.timing.add_step(pending.step, pending.groups, pending.sums)
    self.sampler.write_step(pending.step + 1, pending.groups)
    delta = {name: totals[name] - self._last[name] for name in totals}
    self._last = totals
    step_s = max(delta["run/rl_s"], 1e-9)
    trained = sum(
      t.num_completion_tokens for g in pending.groups for t in g.trajectories
    )
    values |= step_metrics.pass_at_k(pending.groups, self.solved_score)
    values |= _rollout_metrics(delta, step_s)
    values |= self.rewards.metrics()
    values |= self.rollout.coordinator.stream.metrics()
    values |= self.rollout.metrics()
    values |= more
    values |= {
      "time/step_s": step_s,
      "train/tokens_per_s": trained / step_s,
      "train/busy_frac": min(delta["run/train_busy_s"] / step_s, 1.0),
      "run/failed_side_outputs": self.side_outputs.num_failures,
      **{name: totals[name] for name in ("run/wall_s", *_RL_TOTALS)},
      metrics_lib.TIMELINES: self._timelines(),
    }
    if self.staleness is not None:
      values |= self.staleness.observe(pending.step + 1, values)
    self.writer.write(pending.step + 1, values)
    self.progress.step(
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
      if self._bad_updates >= self.max_bad_updates:
        indices = [group.index for group in pending.groups]
        raise BadUpdatesError(
          f"step {pending.step}: {self._bad_updates} updates in a row had a"
          f" loss or gradient that is not finite (train.max_bad_updates);"
          f" groups {indices}"
        )

  def check_tokens(self, in_flight: int) -> None:
    """Check that each generated token has met a fate, or is in flight.

    Args:
      in_flight: the completion tokens of the outstanding groups, counted while
        the rollout side is paused.

    Raises:
      RuntimeError: the numbers do not add up to the generated tokens.
    """
    ledger = self.ledger.totals()
    ledger_lib.check_balance(
      generated=self._generated_tokens(),
      trained=ledger.trained_tokens,
      filtered=ledger.filtered_tokens,
      failed=ledger.failed_tokens,
      in_flight=in_flight,
    )

  def state(self) -> dict[str, Any]:
    """Return what a checkpoint keeps of the metrics.

    Raises:
      StorageError: `metrics.jsonl` did not reach the disk.
    """
    return {**self.writer.state(), "totals": self._kept_totals()}

  def finish(self, step: int) -> str:
    """Write the totals at the end of the run, summary.json and summary.png.

    Returns:
      The summary on one line.
    """
    self.writer.write(step, {metrics_lib.TIMELINES: self._timelines()})
    record = summary_lib.read(self.workdir)
    with self.side_outputs.attempt("summary.png"):
      picture.draw(self.workdir, record)
    return summary_lib.write(self.workdir, record)

  def _timelines(self) -> dict[str, Any]:
    """Return what each slice did since the last call."""
    return {
      name: clock.cut_timeline().packed() for name, clock in self.busy.items()
    }

  def _generated_tokens(self) -> int:
    before = int(self.before.get("ledger/generated_tokens", 0))
    return before + self.rollout.generated_tokens

  def _rl_totals(self, now: metrics_lib.Reading) -> dict[str, float]:
    totals, since = self._rl
    if since is None:
      return totals
    passed = {
      "run/rl_s": now.now_s - since.now_s,
      **{
        f"run/{name}_busy_s": busy_s - since.busy_s[name]
        for name, busy_s in now.busy_s.items()
      },
    }
    return {name: total + passed[name] for name, total in totals.items()}

  def _kept_totals(self) -> dict[str, int | float]:
    """Return the totals that a later start of the run continues."""
    now = metrics_lib.read(self.busy)
    return {
      **self.before,
      "run/wall_s": now.now_s,
      **self._rl_totals(now),
      "ledger/generated_tokens": self._generated_tokens(),
    }

  def _line_totals(self) -> dict[str, int | float]:
    """Return the totals that every line of metrics has."""
    # The rollout side goes on counting. Its counter is read only once, so that
    # the values agree, and after the ledger, so that no difference is negative.
    ledger = self.ledger.totals()
    kept = self._kept_totals()
    ended = {
      "ledger/trained_tokens": ledger.trained_tokens,
      "ledger/filtered_tokens": ledger.filtered_tokens,
      "ledger/failed_tokens": ledger.failed_tokens,
    }
    in_flight = kept["ledger/generated_tokens"] - sum(ended.values())
    return {
      **kept,
      **ended,
      "ledger/in_flight_tokens": in_flight,
      "run/num_programs": self.compilations.num_programs,
      "run/num_compilations": self.compilations.num_compiled,
    }

  def totals(self) -> dict[str, int | float]:
    """Return the current counters and clocks.

    The metrics of a step are computed from differences between these.
    """
    now = metrics_lib.read(self.busy)
    return {
      **self.rollout.totals(),
      "run/wall_s": now.now_s,
      **self._rl_totals(now),
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
    "rollout/cached_tokens": delta["cached_tokens"],
    "rollout/recompute_tokens": delta["recompute_tokens"],
    "rollout/guided_tokens": delta["guided_tokens"],
    "rollout/unlearned_frac": delta["steered_tokens"]
    / max(delta["guided_tokens"], 1),
    "rollout/interruptions": delta["interruptions"],
    "rollout/preemptions": delta["preemptions"],
    "rollout/wait_for_admission_s": delta["wait_s"],
    "rollout/busy_frac": min(delta["run/rollout_busy_s"] / step_s, 1.0),
    "time/adopt_s": delta["adopt_s"],
    # Both are averages over the replicas.
    "time/adoption_s": delta["adopt_s"] / (delta["adoptions"] or 1),
  }
