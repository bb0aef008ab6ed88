"""The rollout worker: the thread that drives one replica.

If the coordinator and the replica share a process, this thread drives both.
Between two decode calls it runs the coordinator's episodes, collects scores and
adopts newer weights, so that a completion can continue under a new policy
version. When there is nothing to decode, the thread waits for admission
(training is behind) or for weights. The buffer and the weight channel wake it.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import time
from typing import Any

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.devices import memory_error
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import client_requests
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import engine_calls
from jaxrl_async.rollout import gate as gate_lib
from jaxrl_async.rollout import held_version
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

_IDLE_S = 0.005


def in_one_process(
  coordinator: coordinator_lib.Coordinator,
  *,
  scheduler: scheduler_lib.Scheduler,
  channel: weight_transfer.WeightChannel,
  tokenizer: tokenizer_lib.Tokenizer,
  requests: client_requests.ClientRequests | None,
  note: Callable[[str], None],
  seconds: Callable[[], float],
) -> "RolloutWorker":
  """Return a worker whose only replica is in the coordinator's process."""
  replica = replica_lib.Replica(
    _name(0),
    coordinator,
    scheduler,
    channel=channel,
    tokenizer=tokenizer,
    requests=requests,
  )
  return RolloutWorker(coordinator, replica, note, seconds)


def _name(number: int) -> str:
  return f"replica {number}"


class RolloutWorker:
  """Drives a replica and its coordinator.

  An engine that fails or hangs begins anew, under the name of another replica,
  once in each policy version. If it hangs, another thread calls `run`.

  Threads: `run` belongs to the worker's thread. While it runs, the coordinator
  and the replica belong to that thread too. Other threads may call `paused`,
  `stop` and `status`. Inside `paused` the worker stands between two decode
  calls, and the caller may use the coordinator and the replica.

  Attributes:
    wait_for_admission_s: seconds in which there was nothing to generate and
      nothing to score.
  """

  def __init__(
    self,
    coordinator: coordinator_lib.Coordinator,
    replica: replica_lib.Replica,
    note: Callable[[str], None],
    seconds: Callable[[], float] | None = None,
  ):
    """Create a worker; a thread of the caller has to call `run`.

    Args:
      coordinator: of the run.
      replica: the only one, named by the number 0.
      note: is called with a line when its engine has failed.
      seconds: the clock of the time for which a pause is waited.
    """
    self.coordinator = coordinator
    self.replica = replica
    self.wait_for_admission_s = 0.0
    self._note = note
    self._num_restarts = 0
    self._restarted_version = -1  # of the last failure of the engine
    self._lost_tokens = 0
    self._gate = gate_lib.Gate(seconds)
    self._is_abandoned = False
    self._is_taken_over = False  # by a thread that begins anew

  # -- other threads --------------------------------------------------------

  def status(self) -> str:
    """Return what the worker is doing, for the stall report."""
    return f"rollout worker: {self._gate.status()}, {self.coordinator.status()}"

  def moving(self) -> object:
    """Return a value that changes when something is generated or adopted."""
    return self.replica.group_tokens, self.replica.version

  def stop(self) -> None:
    """End `run` before the next decode call."""
    self._gate.stop()

  def paused(self, timeout_s: float) -> contextlib.AbstractContextManager[None]:
    """Hold the worker between two decode calls while the context is open.

    Args:
      timeout_s: how long to wait for the worker to stop, in seconds.

    Raises:
      TimeoutError: the worker did not stop in time.
    """
    return self._gate.paused(timeout_s, self.status)

  def totals(self) -> dict[str, int | float]:
    """Return the counters that `RolloutSide.totals` names."""
    return {
      **dataclasses.asdict(self.replica.scheduler.stats),
      "wait_s": self.wait_for_admission_s,
      "adopt_s": self.replica.adopt_s,
    }

  def metrics(self) -> dict[str, float]:
    """Return metrics of the replica; it is the only one."""
    return self.coordinator.metrics(num_replicas=1)

  @property
  def generated_tokens(self) -> int:
    """The tokens generated for groups since the start."""
    if self._is_abandoned:
      return self.coordinator.recorded_tokens
    written = self.replica.scheduler.stats.generated_tokens
    return written - self.replica.served_tokens - self._lost_tokens

  def answers(
    self,
    prompts: Sequence[types.Prompt],
    settings: answers_lib.AnswerSettings,
    version: int,
    timeout_s: float,
  ) -> Iterator[list[answers_lib.Written]]:
    """Answer questions; see `RolloutSide.answers`."""
    for _ in self.replica.adopting(version, timeout_s):
      yield []  # so that the caller can look whether it shall go on
    yield from self.replica.answers(prompts, settings)

  def hold(self, version: int) -> held_version.HeldVersion:
    """Hold a version for an evaluation; see `RolloutSide.hold`."""
    return self.replica.hold(version)

  def abandon(self) -> None:
    """Give the thread up; see `RolloutSide.abandon`."""
    self._is_abandoned = True
    self._gate.stop()

  def take_over(self) -> bool:
    """Give a thread up that hangs in the engine; see `RolloutSide`."""
    if self._has_failed_before() or not self.replica.give_up_thread():
      return False
    self.coordinator.busy.abandon()
    self._is_taken_over = True
    return True

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups being generated or scored, by index.

    Call it only while the worker is paused.
    """
    if not self._is_abandoned:
      self.replica.report_all()
    return self.coordinator.groups()

  def cut(self, version: int) -> None:
    """Give all groups back; see `RolloutSide.cut`."""
    self.replica.give_back()
    self.coordinator.cut(version)

  # -- the worker's thread --------------------------------------------------

  def run(self) -> None:
    """Generate until the worker is stopped or the buffer is closed."""
    with contextlib.ExitStack() as stack:
      stack.push(self._end)
      if self._is_taken_over:
        self._is_taken_over = False
        self._restart()
      while self._gate.passes():
        self.round()

  def _end(self, kind: Any, error: BaseException | None, where: Any) -> bool:
    """End what the thread had; return whether the error was no failure."""
    del kind, where
    if isinstance(error, engine_calls.GivenUp):
      return True  # another thread has it now
    is_closed = isinstance(error, buffer_lib.BufferClosed)
    self.replica.close(has_failed=error is not None and not is_closed)
    self._gate.end()
    return is_closed

  def round(self) -> bool:
    """Adopt, finish groups and ask for others, and make one step or wait.

    Returns:
      Whether it made a step.

    Raises:
      BufferClosed: the buffer is closed.
      EngineFailed: the engine failed for the second time in a policy version.
    """
    try:
      return self._round()
    except engine_calls.EngineFailed as error:
      # It would need as much memory again.
      if memory_error.explained(error) or self._has_failed_before():
        raise
      self._note(
        f"WARNING: the engine failed and begins anew ({_first_line(error)})"
      )
    # The error is gone, and with it what it has kept of the engine's memory.
    self._restart()
    return True

  def _has_failed_before(self) -> bool:
    """Whether the engine failed already since it has adopted its weights."""
    is_same = self._restarted_version == self.replica.version
    return self._num_restarts > 0 and is_same

  def _restart(self) -> None:
    """Let the engine begin anew; other replicas would take its groups over."""
    self._gate.show("beginning anew")
    self._num_restarts += 1
    self._restarted_version = self.replica.version
    self.replica.restart(_name(self._num_restarts))
    # What the coordinator does not know of was lost.
    self._lost_tokens = 0
    self._lost_tokens = self.generated_tokens - self.coordinator.recorded_tokens

  def _round(self) -> bool:
    if self.replica.may_adopt():
      self._gate.show("adopting")
      self.replica.adopt()
    self.coordinator.collect_scores()
    for work in self.coordinator.overdue().values():
      self.replica.take(work)
    self.replica.feed()
    # Groups and the questions of a held version have every other call.
    has_answered = self.replica.answer_beside(self.coordinator.busy)
    if self.replica.can_step:
      self._gate.show("decoding")
      self.replica.step()
      return True
    if not has_answered:
      self._wait()
    return has_answered

  def _wait(self) -> None:
    """Wait for a question, weights, admission or scores.

    It is called when there is nothing to decode.
    """
    start_s = time.perf_counter()
    version = self.replica.version
    newest = self.coordinator.policy_version
    if version >= 0 and not self.coordinator.has_prompt():
      self._gate.show("waiting for a question")
      self.coordinator.has_prompt(timeout_s=_IDLE_S)
      return
    is_scoring = self.coordinator.is_scoring
    # Nothing wakes this thread when a score or a request arrives, so that the
    # wait has to be short if either may come.
    is_short = is_scoring or self.replica.serves_clients
    timeout_s = _IDLE_S if is_short else 10 * _IDLE_S
    if version < newest:
      self._gate.show(f"waiting for weights of version {newest}")
      self.replica.wait_for_weights(timeout_s)
    else:
      self._gate.show("waiting for admission or scores")
      self.coordinator.wait_for_admission(version, newest, timeout_s)
    if not is_scoring:
      self.wait_for_admission_s += time.perf_counter() - start_s


def _first_line(error: BaseException) -> str:
  return str(error).partition("\n")[0]
