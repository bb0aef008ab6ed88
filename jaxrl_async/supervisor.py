"""Threads that fail loudly, and a polite answer to Ctrl-C.

The first failure of any thread is kept with the thread's name; `on_failure`
then closes what others wait for, so that everybody comes home.
"""

from collections.abc import Callable
import contextlib
import signal
import threading
import time

from jaxrl_async import config


class ThreadFailed(RuntimeError):
  """A thread of the run failed; `__cause__` is what it raised."""


def start_thread(
  name: str,
  target: Callable[[], None],
  on_failure: Callable[[BaseException], None],
) -> threading.Thread:
  """Runs `target` in a thread, which passes what it raises to `on_failure`."""

  def guarded():
    try:
      target()
    except BaseException as error:
      on_failure(error)

  thread = threading.Thread(target=guarded, name=name, daemon=True)
  thread.start()
  return thread


class Supervisor:
  """Starts threads, keeps the first failure, joins with a deadline.

  Threads: `spawn`, `check` and `join` belong to the main thread; the lock
  guards the first failure, which any thread may report.
  """

  def __init__(self, on_failure: Callable[[BaseException], None]):
    self._on_failure = on_failure
    self._lock = threading.Lock()
    self._failure: tuple[str, BaseException] | None = None
    self._threads: list[threading.Thread] = []

  def spawn(self, name: str, target: Callable[[], None]) -> None:
    """Runs `target` in a thread of that name."""

    def keep_the_first(error):
      with self._lock:
        is_first = self._failure is None
        if is_first:
          self._failure = (name, error)
      if is_first:
        self._on_failure(error)

    self._threads.append(start_thread(name, target, keep_the_first))

  def check(self) -> None:
    """Raises the first failure, if there was one.

    Raises:
      ThreadFailed: names the thread.
      ConfigError: as the thread raised it.
    """
    with self._lock:
      failure = self._failure
    if failure is not None:
      name, error = failure
      if isinstance(error, config.ConfigError):
        raise error  # says by itself what to change
      raise ThreadFailed(f"{name} failed: {error}") from error

  def join(self, timeout_s: float) -> list[str]:
    """Waits for all threads together; returns who did not come home."""
    deadline = time.monotonic() + timeout_s
    for thread in self._threads:
      thread.join(max(0.0, deadline - time.monotonic()))
    return [t.name for t in self._threads if t.is_alive()]


class StopRequest:
  """Ctrl-C (or SIGTERM) once: finish the step and checkpoint; twice: now."""

  def __init__(self):
    self._event = threading.Event()

  @property
  def is_set(self) -> bool:
    """Somebody asked the run to end."""
    return self._event.is_set()

  def set(self) -> None:
    """Asks the run to end after the current step."""
    self._event.set()

  def wait(self, timeout_s: float) -> None:
    """Waits until somebody has."""
    self._event.wait(timeout_s)

  @contextlib.contextmanager
  def on_signals(
    self,
    note: Callable[[str], None],
    what_follows: str = "finishing the step, then a checkpoint; once more ends"
    " it now",
  ):
    """Answers SIGINT and SIGTERM, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return

    def answer(number, frame):
      del frame
      if self.is_set:
        raise KeyboardInterrupt
      self.set()
      note(f"{signal.Signals(number).name}: {what_follows}")

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, answer) for number in numbers}
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)


class StallWatch:
  """Notices when nothing has moved for too long."""

  def __init__(self, timeout_s: float):
    self._timeout_s = timeout_s
    self._last: object = None
    self._since_s = time.monotonic()

  def is_stalled(self, progress: object) -> bool:
    """Whether `progress` has had the same value for the whole timeout."""
    now = time.monotonic()
    if progress != self._last:
      self._last, self._since_s = progress, now
    return now - self._since_s > self._timeout_s
