"""The rollout side whose replica is in this process, and in this thread.

The thread that drives the coordinator drives the replica too. Between two
decode calls it runs the coordinator's episodes, collects scores and adopts
newer weights, so that a completion can continue under a new policy version.
When there is nothing to decode, the thread waits for admission (training is
behind) or for weights. The buffer and the weight channel wake it.
"""

from collections.abc import Callable
import dataclasses
import time

from jaxrl_async import types
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import rollout_side

_IDLE_S = 0.005


class RolloutWorker(rollout_side.RolloutSide):
  """Drives a coordinator and a replica that calls it directly.

  Threads: see `RolloutSide`. The replica belongs to the thread that calls
  `run`.
  """

  def __init__(
    self,
    coordinator: coordinator_lib.Coordinator,
    replica: replica_lib.Replica,
    seconds: Callable[[], float] | None = None,
  ):
    """Create a worker for a coordinator and its only replica."""
    super().__init__(coordinator, seconds)
    self.replica = replica
    self._wait_s = 0.0

  # -- other threads --------------------------------------------------------

  def moving(self) -> object:
    """Return a value that changes when something moves; see `RolloutSide`."""
    answered = self.replica.scheduler.stats.evaluation_tokens
    written = self.replica.group_tokens, answered
    return *written, self.coordinator.num_answers, self.replica.version

  def totals(self) -> dict[str, int | float]:
    """Return the counters that `RolloutSide.totals` names."""
    return {
      **dataclasses.asdict(self.replica.scheduler.stats),
      "wait_s": self._wait_s,
      "adopt_s": self.replica.adopt_s,
    }

  @property
  def generated_tokens(self) -> int:
    """The tokens generated for groups since the start."""
    if self._is_abandoned:
      return super().generated_tokens
    written = self.replica.scheduler.stats.generated_tokens
    return written - self.replica.served_tokens

  @property
  def num_ready(self) -> int:
    """The number of replicas that generate."""
    return 1

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups, with all that was generated; see `RolloutSide`."""
    if not self._is_abandoned:
      self.replica.report_all()
    return super().groups()

  def _recall(self) -> None:
    self.replica.give_back()

  # -- the worker's thread --------------------------------------------------

  def _hear(self) -> None:
    if self.replica.may_adopt():
      self._gate.show("adopting")
      self.replica.adopt()

  def _take(self, name: str, work: messages.Work) -> None:
    del name
    self.replica.take(work)

  def _go_on(self) -> bool:
    self.replica.feed()
    if self.replica.can_step:
      self._gate.show("decoding")
      self.replica.step()
      return True
    self._wait()
    return False

  def _end(self, has_failed: bool) -> None:
    self.replica.close(has_failed=has_failed)

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
    coordinator = self.coordinator
    awaits_others = coordinator.is_scoring or coordinator.awaits_answers
    # Nothing wakes this thread when a score, an answer of an episode or a
    # request arrives, so that the wait has to be short if one may come.
    is_short = awaits_others or self.replica.serves_clients
    timeout_s = _IDLE_S if is_short else 10 * _IDLE_S
    if version < newest:
      self._gate.show(f"waiting for weights of version {newest}")
      self.replica.wait_for_weights(timeout_s)
    elif self.coordinator.questions.are_alone:
      # The buffer may admit groups, and none is handed out.
      self._gate.show("waiting for the end of an evaluation")
      self.replica.wait_for_weights(timeout_s)
    elif coordinator.awaits_answers:
      # The buffer may admit groups for which episodes leave no room.
      self._gate.show("waiting for episodes to answer")
      self.replica.wait_for_weights(timeout_s)
    else:
      self._gate.show("waiting for admission or scores")
      self.coordinator.wait_for_admission(version, newest, timeout_s)
    if not awaits_others:
      self._wait_s += time.perf_counter() - start_s
