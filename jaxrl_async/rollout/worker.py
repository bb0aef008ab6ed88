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

import jax

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.devices import memory_error
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import client_requests
from jaxrl_async.rollout import coordinator as coordinator_lib
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
  seconds: Callable[[], float],
) -> "RolloutWorker":
  """Return a worker whose only replica is in the coordinator's process."""
  replica = replica_lib.Replica(
    "replica 0",
    coordinator,
    scheduler,
    channel=channel,
    tokenizer=tokenizer,
    requests=requests,
  )
  return RolloutWorker(coordinator, replica, seconds)


class RolloutWorker:
  """Drives a replica and its coordinator.

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
    seconds: Callable[[], float] | None = None,
  ):
    """Create a worker; a thread of the caller has to call `run`.

    Args:
      coordinator: of the run.
      replica: the only one.
      seconds: the clock of the time for which a pause is waited.
    """
    self.coordinator = coordinator
    self.replica = replica
    self.wait_for_admission_s = 0.0
    self._gate = gate_lib.Gate(seconds)
    self._is_abandoned = False

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
    return written - self.replica.served_tokens

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

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups being generated or scored, by index.

    Call it only while the worker is paused.
    """
    if not self._is_abandoned:
      self.replica.report_all()
    return self.coordinator.groups()

  def cut(self, version: int) -> None:
    """Give all groups back; see `RolloutSide.cut`."""
    if not self._is_abandoned:
      self.replica.give_back()
      self.coordinator.cut(version)

  # -- the worker's thread --------------------------------------------------

  def run(self) -> None:
    """Generate until the worker is stopped or the buffer is closed.

    Raises:
      EngineFailed: a program of the engine failed. The groups are those that
        were reported last.
    """
    has_failed = True
    try:
      while self._gate.passes():
        self.round()
      has_failed = False
    except buffer_lib.BufferClosed:
      has_failed = False
    except jax.errors.JaxRuntimeError as error:
      self._is_abandoned = True
      if memory_error.explained(error):
        raise  # it would need as much memory again
      raise supervisor_lib.EngineFailed(
        f"the engine failed ({type(error).__name__}: {error})"
      ) from error
    finally:
      self.replica.close(has_failed=has_failed)
      self._gate.end()

  def round(self) -> bool:
    """Adopt, finish groups and ask for others, and make one step or wait.

    Returns:
      Whether it made a step.

    Raises:
      BufferClosed: the buffer is closed.
    """
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
