"""The rollout worker: the thread that drives one replica.

If the coordinator and the replica share a process, this thread drives both.
Between two decode calls it runs the coordinator's episodes, collects scores and
adopts newer weights, so that a completion can continue under a new policy
version. When there is nothing to decode, the thread waits for admission
(training is behind) or for weights. The buffer and the weight channel wake it.
"""

from collections.abc import Iterator
import contextlib
import threading
import time

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import ledger as ledger_lib
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.data import prompts
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import client_requests
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

_IDLE_S = 0.005


def in_one_process(
  settings: coordinator_lib.CoordinatorSettings,
  *,
  scheduler: scheduler_lib.Scheduler,
  stream: prompts.PromptStream,
  buffer: buffer_lib.Buffer,
  channel: weight_transfer.WeightChannel,
  rewards: service_lib.RewardService,
  ledger: ledger_lib.Ledger,
  tokenizer: tokenizer_lib.Tokenizer,
  busy: metrics_lib.BusyClock,
  episode: episode_lib.Episode = episode_lib.single_turn,
  requests: client_requests.ClientRequests | None,
) -> "RolloutWorker":
  """Return a worker with a coordinator and one replica in the same process."""
  coordinator = coordinator_lib.Coordinator(
    settings,
    stream=stream,
    buffer=buffer,
    rewards=rewards,
    ledger=ledger,
    tokenizer=tokenizer,
    busy=busy,
    episode=episode,
  )
  replica = replica_lib.Replica(
    "replica 0",
    coordinator,
    scheduler,
    channel=channel,
    tokenizer=tokenizer,
    requests=requests,
  )
  return RolloutWorker(coordinator, replica)


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
  ):
    """Create a worker; a thread of the caller has to call `run`."""
    self.coordinator = coordinator
    self.replica = replica
    self.wait_for_admission_s = 0.0
    self._status = "not started", time.perf_counter()
    self._gate = threading.Condition()
    self._num_pausers = 0
    self._is_parked = False
    self._is_stopping = False
    self._has_ended = False

  # -- other threads --------------------------------------------------------

  def status(self) -> str:
    """Return what the worker is doing, for the stall report."""
    text, since_s = self._status
    return (
      f"rollout worker: {text} since {time.perf_counter() - since_s:.1f} s,"
      f" {self.coordinator.status()}"
    )

  def _show(self, status: str) -> None:
    if status != self._status[0]:
      self._status = status, time.perf_counter()

  def stop(self) -> None:
    """End `run` before the next decode call."""
    with self._gate:
      self._is_stopping = True
      self._gate.notify_all()

  @contextlib.contextmanager
  def paused(self, timeout_s: float) -> Iterator[None]:
    """Hold the worker between two decode calls while the context is open.

    Args:
      timeout_s: how long to wait for the worker to stop, in seconds.

    Raises:
      TimeoutError: the worker did not stop in time.
    """
    with self._gate:
      self._num_pausers += 1
    try:
      with self._gate:
        deadline = supervisor_lib.Deadline(timeout_s)
        while not (self._is_parked or self._has_ended):
          if (wait_s := deadline.next_wait_s()) == 0:
            raise TimeoutError(f"no pause in {timeout_s} s; {self.status()}")
          self._gate.wait(wait_s)
      yield
    finally:
      with self._gate:
        self._num_pausers -= 1
        self._gate.notify_all()

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups being generated or scored, by index.

    Call it only while the worker is paused.
    """
    self.replica.report_all()
    return self.coordinator.groups()

  # -- the worker's thread --------------------------------------------------

  def run(self) -> None:
    """Generate until the worker is stopped or the buffer is closed."""
    has_failed = True
    try:
      while self._pass_gate():
        if self.replica.has_newer_weights():
          self._show("adopting")
          self.replica.adopt()
        self.coordinator.collect_scores()
        self.replica.feed()
        if self.replica.can_step:
          self._show("decoding")
          self.replica.step()
        else:
          self._wait()
      has_failed = False
    except buffer_lib.BufferClosed:
      has_failed = False
    finally:
      self.replica.close(has_failed=has_failed)
      with self._gate:
        self._has_ended = True
        self._show("ended")
        self._gate.notify_all()

  def _pass_gate(self) -> bool:
    """Wait while the worker is paused; return False if it is to stop."""
    with self._gate:
      while self._num_pausers and not self._is_stopping:
        self._is_parked = True
        self._show("paused")
        self._gate.notify_all()
        self._gate.wait()
      self._is_parked = False
      return not self._is_stopping

  def _wait(self) -> None:
    """Wait for a question, weights, admission or scores.

    It is called when there is nothing to decode.
    """
    start_s = time.perf_counter()
    version = self.replica.version
    newest = self.coordinator.policy_version
    if version >= 0 and not self.coordinator.has_prompt():
      self._show("waiting for a question")
      self.coordinator.has_prompt(timeout_s=_IDLE_S)
      return
    is_scoring = self.coordinator.is_scoring
    # Nothing wakes this thread when a score or a request arrives, so that the
    # wait has to be short if either may come.
    is_short = is_scoring or self.replica.serves_clients
    timeout_s = _IDLE_S if is_short else 10 * _IDLE_S
    if version < newest:
      self._show(f"waiting for weights of version {newest}")
      self.replica.wait_for_weights(timeout_s)
    else:
      self._show("waiting for admission or scores")
      self.coordinator.wait_for_admission(version, newest, timeout_s)
    if not is_scoring:
      self.wait_for_admission_s += time.perf_counter() - start_s
