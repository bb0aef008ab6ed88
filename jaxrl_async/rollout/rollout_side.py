"""The rollout side: the coordinator and its replicas, driven by one thread.

`RolloutSide` is the round of that thread and what other threads ask of it,
wherever the replicas are. `worker.RolloutWorker` adds how the replica in this
process takes part in the round, and `fleet.Fleet` how replicas in other
processes do.
"""

import abc
from collections.abc import Callable, Iterator
import contextlib
import threading
import time

import jax

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.devices import memory_error
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import messages


class RolloutSide(abc.ABC):
  """The coordinator and its replicas, driven by one thread.

  Threads: `run` belongs to that thread. While it runs, the coordinator belongs
  to it too, and so does a replica in this process. Other threads may call the
  rest, but `groups` and `cut` only inside `paused`, or after `abandon`.

  Attributes:
    coordinator: the coordinator.
  """

  def __init__(
    self,
    coordinator: coordinator_lib.Coordinator,
    seconds: Callable[[], float] | None = None,
  ):
    """Create a rollout side; a thread of the caller has to call `run`.

    `seconds` is the clock of the time for which a pause is waited.
    """
    self.coordinator = coordinator
    self._gate = Gate(seconds)
    self._is_abandoned = False

  # -- the thread that drives it --------------------------------------------

  def run(self) -> None:
    """Generate until it is stopped or the buffer is closed.

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
      self._end(has_failed)
      self._gate.end()

  def round(self) -> bool:
    """Take what has happened, finish groups, and let replicas go on.

    Returns:
      Whether something was generated in this process.

    Raises:
      BufferClosed: the buffer is closed.
    """
    self._hear()
    self.coordinator.collect_scores()
    for name, work in self.coordinator.collect_answers().items():
      self._take(name, work)
    for name, work in self.coordinator.overdue().items():
      self._take(name, work)
    return self._go_on()

  @abc.abstractmethod
  def _hear(self) -> None:
    """Take weights, and what replicas have said."""

  @abc.abstractmethod
  def _take(self, name: str, work: messages.Work) -> None:
    """Give work to the replica of this name, if there still is one."""

  @abc.abstractmethod
  def _go_on(self) -> bool:
    """Hand out new work; return whether this process has generated."""

  def _end(self, has_failed: bool) -> None:
    """End what belongs to the thread."""
    del has_failed

  # -- other threads --------------------------------------------------------

  def status(self) -> str:
    """Return what it is doing, for the stall report."""
    parts = [self._gate.status(), *self._states(), self.coordinator.status()]
    return f"rollout worker: {', '.join(parts)}"

  def _states(self) -> list[str]:
    """Return what each replica is doing, if that is not the thread itself."""
    return []

  @abc.abstractmethod
  def moving(self) -> object:
    """Return a value that changes when something moves.

    Something was generated or adopted, or an episode has answered.
    """

  def stop(self) -> None:
    """End `run` before its next round."""
    self._gate.stop()

  def paused(self, timeout_s: float) -> contextlib.AbstractContextManager[None]:
    """Hold the thread between two rounds while the context is open.

    A replica in this process stands still then. Others go on with what they
    have.

    Raises:
      TimeoutError: the thread did not stop in time.
    """
    return self._gate.paused(timeout_s, self.status)

  def abandon(self) -> None:
    """Give the thread up, which could not be paused: the run ends.

    From now on `groups` and `generated_tokens` are about what was reported
    last, and need no pause. They must not be relied on if the thread goes on.
    """
    self._is_abandoned = True
    self._gate.stop()

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups being generated or scored, by index."""
    return self.coordinator.groups()

  def cut(self, version: int) -> None:
    """Make all trajectories go on from their tokens alone.

    All caches are made again, under this version of the weights or a newer one,
    as they are when a run continues from a checkpoint.
    """
    if not self._is_abandoned:
      self._recall()
      self.coordinator.cut(version)

  @abc.abstractmethod
  def _recall(self) -> None:
    """Have all replicas forget their groups."""

  @abc.abstractmethod
  def totals(self) -> dict[str, int | float]:
    """Return counters since the start: `SchedulerStats`, and two of seconds.

    In `wait_s` there was nothing to generate. In `adopt_s` nothing was decoded
    because weights were adopted.
    """

  @property
  @abc.abstractmethod
  def num_ready(self) -> int:
    """The number of replicas that generate."""

  def metrics(self) -> dict[str, float]:
    """Return how many replicas generate, and the tokens that were refused."""
    return self.coordinator.metrics(num_replicas=self.num_ready)

  @property
  def generated_tokens(self) -> int:
    """The tokens generated for groups since the start, as far as is known."""
    return self.coordinator.recorded_tokens


class Gate:
  """Lets other threads pause and stop the thread that passes it.

  Threads: `passes`, `show` and `end` belong to the thread that is held. Any
  other thread may call the rest.
  """

  def __init__(self, seconds: Callable[[], float] | None = None):
    """Create an open gate; `seconds` is the clock of the wait for a pause."""
    self._seconds = seconds
    self._condition = threading.Condition()
    self._num_pausers = 0
    self._is_parked = False
    self._is_stopping = False
    self._has_ended = False
    self._status = "not started", time.perf_counter()

  # -- the thread that is held ----------------------------------------------

  def passes(self) -> bool:
    """Wait while the thread is to pause; return False if it is to stop."""
    with self._condition:
      while self._num_pausers and not self._is_stopping:
        self._is_parked = True
        self.show("paused")
        self._condition.notify_all()
        self._condition.wait()
      self._is_parked = False
      return not self._is_stopping

  def show(self, status: str) -> None:
    """Keep what the thread does from now on, for `status`."""
    if status != self._status[0]:
      self._status = status, time.perf_counter()

  def end(self) -> None:
    """Tell that the thread does not come back."""
    with self._condition:
      self._has_ended = True
      self.show("ended")
      self._condition.notify_all()

  # -- other threads --------------------------------------------------------

  def status(self) -> str:
    """Return what the thread does, and since when."""
    text, since_s = self._status
    return f"{text} since {time.perf_counter() - since_s:.1f} s"

  def stop(self) -> None:
    """Let the next call of `passes` return False."""
    with self._condition:
      self._is_stopping = True
      self._condition.notify_all()

  @contextlib.contextmanager
  def paused(
    self, timeout_s: float, status: Callable[[], str]
  ) -> Iterator[None]:
    """Hold the thread at the gate while the context is open.

    Raises:
      TimeoutError: the thread did not come in time.
    """
    with self._condition:
      self._num_pausers += 1
    try:
      with self._condition:
        deadline = supervisor_lib.Deadline(timeout_s, self._seconds)
        while not (self._is_parked or self._has_ended):
          if (wait_s := deadline.next_wait_s()) == 0:
            raise TimeoutError(f"no pause in {timeout_s} s; {status()}")
          self._condition.wait(wait_s)
      yield
    finally:
      with self._condition:
        self._num_pausers -= 1
        self._condition.notify_all()
