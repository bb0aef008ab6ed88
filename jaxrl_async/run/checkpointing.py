"""Checkpoints of a run, which are written while it trains on.

The trainer stands still while a checkpoint is copied into the host's memory. A
thread writes it to the disk meanwhile and computes its digests. One checkpoint
is written at a time. One that becomes due before the last one is written is
taken after the first step after that.

A disk that is full or gone does not end the run at once: the checkpoint is
tried again, after waits that become longer. Earlier checkpoints stay as they
are. A disk that does not respond holds a write up, perhaps for ever, which ends
the run after as many `run.stall_timeout_s` as there may be failures in a row.
"""

from collections.abc import Callable
from concurrent import futures
import time

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.storage import disk
from jaxrl_async.storage import outstanding as outstanding_lib

_RUNNING, _FINISHED = "running", "finished"
FIRST_WAIT_S = 5.0
_LONGEST_WAIT_S = 300.0
_LOOK_S = 0.5
# A checkpoint is expected to take as long as the last one did, times this.
_MARGIN = 1.2


class Checkpointing:
  """Decides when checkpoints are taken, and has them written by a thread.

  Attributes:
    num_failures: attempts that have failed since the start of the process.

  Threads: belongs to the main thread, which waits while `rescue` uses another
  one. The thread that writes a checkpoint shares nothing but its result.
  """

  def __init__(
    self,
    save: Callable[[int], Callable[[], None]],
    section: sections.RunSection,
    stop: supervisor_lib.StopRequest,
    note: Callable[[str], None],
  ):
    """Begin without a checkpoint.

    Args:
      save: copies the run after a number of steps, and returns what writes the
        copy. Both raise a StorageError if the disk fails.
      section: says how often, and how many failures in a row end the run.
      stop: ends the waits between attempts.
      note: is called with messages for the user.
    """
    self._save = save
    self._section = section
    self._stop = stop
    self._note = note
    self._writing: futures.Future[float] | None = None
    self._age_s = self._looked_s = 0.0  # of what is being written
    self._step = -1  # of the last attempt
    self._taken_step = -1  # of the last copy
    self._is_due = False
    self._failure: disk.StorageError | None = None
    self._max_failures = section.max_checkpoint_failures
    self._most_s = section.max_checkpoint_failures * section.stall_timeout_s
    self._num_in_a_row = 0
    self._wait_s = FIRST_WAIT_S
    self._retry_at_s = 0.0
    self._stood_still_s = 0.0
    self._copy_s = 0.0
    self._write_s = 0.0
    self.num_failures = 0

  def is_due(self, step: int) -> bool:
    """Return whether to take a checkpoint after this step.

    Raises:
      StorageError: too many attempts in a row have failed.
    """
    self._look()
    if step % self._section.checkpoint_every == 0:
      if self._writing is not None:
        self._note(
          f"the checkpoint of step {step} waits until that of step"
          f" {self._step} is written"
        )
      self._is_due = True
    return (
      self._is_due
      and self._writing is None
      and time.monotonic() >= self._retry_at_s
    )

  def take(self, step: int) -> None:
    """Take a checkpoint, which is written while the run goes on.

    If another one is being written, this waits for it. A failure is passed to
    `note`, and the checkpoint becomes due again.

    Raises:
      StorageError: too many attempts in a row have failed.
    """
    start_s = time.perf_counter()
    self._wait()
    self._step = step
    copy_start_s = time.perf_counter()
    try:
      self._write(self._save(step))
      self._is_due, self._taken_step = False, step
    except disk.StorageError as error:
      self._fail(error)
    finally:
      now_s = time.perf_counter()
      self._copy_s = now_s - copy_start_s
      self._stood_still_s += now_s - start_s

  def take_first(self) -> None:
    """Take the checkpoint of step 0. A failure ends the run at once.

    Raises:
      StorageError: it could not be written.
    """
    self._max_failures = 1
    self.take_now(0)
    self._max_failures = self._section.max_checkpoint_failures

  def take_now(self, step: int) -> None:
    """Take a checkpoint, and wait until it is on the disk.

    A stop request ends the attempts after one that fails.

    Raises:
      StorageError: it could not be written.
    """
    self.take(step)
    self._wait()
    while self._failure is not None:
      if self._stop.is_set:
        raise self._failure
      self._stop.wait(max(0.0, self._retry_at_s - time.monotonic()))
      self.take(step)
      self._wait()

  def take_before_stop(self, step: int) -> int:
    """Take a checkpoint before the process ends, if there is time for it.

    What is being written already is awaited. Another one is begun behind it
    only if it is expected to be written before the process is killed.

    Returns:
      The step of the newest checkpoint.

    Raises:
      StorageError: it could not be written.
    """
    was_writing = self._writing is not None
    self._wait()
    is_whole = self._failure is None and self._taken_step >= 0
    if is_whole and self._taken_step == step:
      return step
    expected_s = _MARGIN * (self._copy_s + self._write_s)
    if is_whole and was_writing and self._stop.left_s < expected_s:
      self._note(
        f"there is no time for a checkpoint of step {step}: that of step"
        f" {self._taken_step} took {self._copy_s + self._write_s:.1f} s, and"
        f" {max(0.0, self._stop.left_s):.1f} s are left"
        " (run.preemption_grace_s)"
      )
      return self._taken_step
    self.take_now(step)
    return step

  def rescue(self, step: int, timeout_s: float) -> None:
    """Take a last checkpoint if possible, before a failure ends the run.

    Other threads may be in any state. What copies the run refuses it if its
    tokens do not add up, or raises whatever else is wrong with it. Then the
    checkpoint before stays the newest.

    Args:
      step: the number of completed train steps.
      timeout_s: seconds that it may take to copy the run.
    """

    def take() -> None:
      self._wait()
      if self._failure is None and self._taken_step == step:
        return
      self.take(step)

    thread = supervisor_lib.start_thread(
      "last checkpoint",
      take,
      lambda error: self._note(
        f"no checkpoint of step {step} could be taken: {error}"
      ),
    )
    supervisor_lib.Deadline(timeout_s).join(thread)

  def _write(self, write: Callable[[], None]) -> None:
    writing = self._writing = futures.Future()

    def run():
      start_s = time.perf_counter()
      write()
      writing.set_result(time.perf_counter() - start_s)

    # The thread is a daemon, so that a disk that does not respond cannot keep
    # the process from ending.
    supervisor_lib.start_thread("checkpoint", run, writing.set_exception)
    self._age_s, self._looked_s = 0.0, time.monotonic()

  def _wait(self) -> None:
    """Wait until what was taken last is written or has failed."""
    while self._writing is not None:
      futures.wait([self._writing], _LOOK_S)
      self._look()

  def metrics(self) -> dict[str, float]:
    """Return the metrics since the call before."""
    stood_still_s, self._stood_still_s = self._stood_still_s, 0.0
    return {
      "checkpoint/stood_still_s": stood_still_s,
      "checkpoint/write_s": self._write_s,
      "checkpoint/failures": self.num_failures,
    }

  def close(self, timeout_s: float) -> None:
    """Wait until nothing is being written.

    Raises:
      TimeoutError: something still is after `timeout_s` seconds.
      StorageError: the last checkpoint could not be written.
    """
    if self._writing is None:
      return
    # Whoever waited for what takes too long has waited long enough.
    is_late = self._age_s > self._most_s
    deadline = supervisor_lib.Deadline(0.0 if is_late else timeout_s)
    while not futures.wait([self._writing], deadline.next_wait_s()).done:
      if deadline.next_wait_s() == 0:
        raise TimeoutError(
          f"the checkpoint of step {self._step} was not written in"
          f" {timeout_s:g} s"
        )
    writing, self._writing = self._writing, None
    writing.result()

  def _look(self) -> None:
    """Take the result of the thread, if it has ended."""
    if self._writing is None:
      return
    if not self._writing.done():
      self._check_age()
      return
    writing, self._writing = self._writing, None
    try:
      self._write_s = writing.result()
    except disk.StorageError as error:
      self._fail(error)
      return
    if self._failure is not None:
      self._note(f"the checkpoint of step {self._step} is written")
    self._failure, self._num_in_a_row = None, 0
    self._wait_s, self._retry_at_s = FIRST_WAIT_S, 0.0

  def _check_age(self) -> None:
    """Raise a StorageError if what is being written takes too long."""
    now_s = time.monotonic()
    # At most a part of it counts at once: the process may have been stopped.
    timeout_s = self._section.stall_timeout_s
    self._age_s += min(now_s - self._looked_s, timeout_s)
    self._looked_s = now_s
    if self._age_s > self._most_s:
      raise disk.StorageError(
        f"the checkpoint of step {self._step} is not written after"
        f" {self._most_s:g} s (run.max_checkpoint_failures times"
        " run.stall_timeout_s); check that its disk works. The same command"
        " continues from the newest checkpoint"
      )

  def _fail(self, error: disk.StorageError) -> None:
    """Count a failure, and try again later."""
    self._failure = error
    self.num_failures += 1
    self._num_in_a_row += 1
    most = self._max_failures
    if most == 1:
      raise error
    if self._num_in_a_row >= most:
      raise disk.StorageError(
        f"{error}. This was attempt {most} in a row that failed"
        " (run.max_checkpoint_failures)"
      ) from error
    self._is_due = True
    self._retry_at_s = time.monotonic() + self._wait_s
    self._note(
      f"WARNING: the checkpoint of step {self._step} could not be written"
      f" ({error.__cause__ or error}), attempt {self._num_in_a_row} of {most}"
      " (run.max_checkpoint_failures). The run goes on; the next attempt is due"
      f" after {self._wait_s:g} s"
    )
    self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)


# -- outstanding groups -------------------------------------------------------


def outstanding(
  buffer: buffer_lib.Buffer, rollout: rollout_side.RolloutSide
) -> list[outstanding_lib.OutstandingGroup]:
  """Return every outstanding group; the rollout side must be paused."""
  # First, because asking for groups may end one, which leaves the buffer.
  running = rollout.groups()
  state = buffer.state()
  groups = [(_RUNNING, running[a.index]) for a in state.running]
  groups += [(_FINISHED, group) for group in state.finished]
  return [
    outstanding_lib.OutstandingGroup(status=status, group=group)
    for status, group in groups
  ]


def count_tokens(groups: list[outstanding_lib.OutstandingGroup]) -> int:
  """Return the number of completion tokens in these groups."""
  return sum(g.group.num_completion_tokens for g in groups)


def running(
  groups: list[outstanding_lib.OutstandingGroup],
) -> list[types.RolloutGroup]:
  """Return the groups that were running, which continue where they stopped."""
  return [g.group for g in groups if g.status == _RUNNING]


def buffer_state(
  groups: list[outstanding_lib.OutstandingGroup],
  *,
  groups_per_step: int,
  next_step: int,
  next_index: int,
) -> buffer_lib.BufferState:
  """Return the state from which the buffer continues."""
  return buffer_lib.BufferState(
    groups_per_step=groups_per_step,
    next_step=next_step,
    next_index=next_index,
    running=[group.admission for group in running(groups)],
    finished=[g.group for g in groups if g.status == _FINISHED],
  )
