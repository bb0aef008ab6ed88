"""A gate at which a thread can be held or ended between two of its rounds."""

from collections.abc import Callable, Iterator
import contextlib
import threading
import time

from jaxrl_async.processes import supervisor as supervisor_lib


class Gate:
  """Lets other threads pause and stop the thread that passes it.

  Threads: `passes`, `show` and `end` belong to the thread that is held. Any
  other thread may call the rest.
  """

  def __init__(self, seconds: Callable[[], float] | None = None):
    """Create an open gate.

    Args:
      seconds: the clock of the time for which a pause is waited.
    """
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

  def reopen(self) -> None:
    """Undo `stop`, for a thread that starts anew."""
    with self._condition:
      self._is_stopping = self._has_ended = False

  @contextlib.contextmanager
  def paused(
    self, timeout_s: float, status: Callable[[], str]
  ) -> Iterator[None]:
    """Hold the thread at the gate while the context is open.

    Args:
      timeout_s: how long to wait for the thread to come, in seconds.
      status: describes the thread, for the error message.

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
