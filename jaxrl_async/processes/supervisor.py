"""Supervision: failures of threads, waits with deadlines, and stop signals.

The first failure of any thread is kept together with the thread's name.
`on_failure` then closes the queues that other threads wait for, so that all of
them end.
"""

from collections.abc import Callable
import contextlib
import functools
from multiprocessing import util
import os
import signal
import threading
import time
from typing import Any, NoReturn

from jaxrl_async.config import sections
from jaxrl_async.storage import disk

_LOOK_S = 1.0

# Exit status of a process that goes on where it was if it is started again.
START_AGAIN = 75


class ThreadFailed(RuntimeError):
  """A thread of the run failed; `__cause__` is the exception that it raised."""


def start_thread(
  name: str,
  target: Callable[[], None],
  on_failure: Callable[[BaseException], None],
) -> threading.Thread:
  """Run `target` in a daemon thread.

  `on_failure` is called in that thread with what `target` raised, whatever its
  class.
  """

  def guarded():
    try:
      target()
    except BaseException as error:
      on_failure(error)

  thread = threading.Thread(target=guarded, name=name, daemon=True)
  thread.start()
  return thread


class Supervisor:
  """Starts threads, keeps the first failure, and joins with a deadline.

  Threads: `spawn`, `check` and `join` belong to the main thread. The lock
  guards the first failure, which any thread may report.
  """

  def __init__(self, on_failure: Callable[[BaseException], None]):
    self._on_failure = on_failure
    self._lock = threading.Lock()
    self._failure: tuple[str, BaseException] | None = None
    self._threads: list[threading.Thread] = []

  def spawn(self, name: str, target: Callable[[], None]) -> None:
    """Run `target` in a thread of that name."""

    def keep_the_first(error: BaseException) -> None:
      with self._lock:
        is_first = self._failure is None
        if is_first:
          self._failure = (name, error)
      if is_first:
        self._on_failure(error)

    self._threads.append(start_thread(name, target, keep_the_first))

  def has_spawned(self, name: str) -> bool:
    """Whether a thread of that name was started, whatever became of it."""
    return any(thread.name == name for thread in self._threads)

  def check(self) -> None:
    """Raise the first failure, if there was one.

    Raises:
      ThreadFailed: it names the thread.
      ConfigError, StorageError, RunError: unchanged, as the thread raised it.
    """
    with self._lock:
      failure = self._failure
    if failure is not None:
      name, error = failure
      if isinstance(error, (sections.ConfigError, disk.StorageError, RunError)):
        raise error  # the message already says what to change
      raise ThreadFailed(f"{name} failed: {error}") from error

  def join(self, timeout_s: float) -> list[str]:
    """Wait for all threads, and return the names of those still running."""
    deadline = Deadline(timeout_s)
    for thread in self._threads:
      deadline.join(thread)
    return [t.name for t in self._threads if t.is_alive()]


class Deadline:
  """A number of seconds during which this process runs, for polling waits.

  Clocks advance while a process is stopped (Ctrl-Z, SIGSTOP). The time that
  counts between two looks is therefore bounded.
  """

  def __init__(
    self, timeout_s: float, seconds: Callable[[], float] | None = None
  ):
    self._seconds = seconds or time.monotonic
    self._left_s = timeout_s
    self._looked_s = self._seconds()

  def next_wait_s(self) -> float:
    """Return how long to wait before looking again; 0 once the time is over."""
    now_s = self._seconds()
    self._left_s -= min(now_s - self._looked_s, 2 * _LOOK_S)
    self._looked_s = now_s
    return min(max(self._left_s, 0.0), _LOOK_S)

  def join(self, thread: threading.Thread) -> None:
    """Wait for a thread until it ends or the time is over."""
    while thread.is_alive() and (wait_s := self.next_wait_s()) > 0:
      thread.join(wait_s)


class Interrupted(RuntimeError):
  """The run was asked to end; the message says how to continue it."""


def end_now(code: int) -> NoReturn:
  """End this process without shutting down the interpreter.

  A shutdown would wait for threads that hang. The semaphores of process pools,
  about which Python would warn, and the directory of their sockets, which would
  stay, are removed all the same.
  """
  _within(_LOOK_S, util._run_finalizers)  # pyright: ignore[reportAttributeAccessIssue]
  os._exit(code)


class StopRequest:
  """A request to end, made by signals.

  The first signal asks the run to finish its step and write a checkpoint; the
  second one ends the process at once.

  Threads: a separate thread answers signals, because the main thread may be
  inside a compilation, or waiting for a disk that does not respond, when the
  second signal arrives.
  """

  def __init__(
    self, end: Callable[[int], None] = end_now, *, grace_s: float = 0.0
  ):
    """Begin without a request.

    Args:
      end: ends the process at once, with the given exit code.
      grace_s: seconds after SIGTERM in which the process will be killed; 0 if
        it will not be.
    """
    self._event = threading.Event()
    self._end = end
    self._grace_s = grace_s
    self._killed_s = float("inf")
    self._clean_ups: list[Callable[[], None]] = []

  @property
  def is_set(self) -> bool:
    """Whether the run has been asked to end."""
    return self._event.is_set()

  @property
  def left_s(self) -> float:
    """Seconds until the process will be killed; infinite if it will not be."""
    return self._killed_s - time.monotonic()

  def check(self, text: str) -> None:
    """Raise Interrupted with the text if the run has been asked to end."""
    if self.is_set:
      raise Interrupted(text)

  def set(self) -> None:
    """Ask the run to end after the current step."""
    self._event.set()

  def wait(self, timeout_s: float) -> None:
    """Wait until the run has been asked to end, at most for the timeout."""
    self._event.wait(timeout_s)

  def before_ending_now(self, clean_up: Callable[[], None]) -> None:
    """Register a function to call before a second signal ends the process.

    The function runs beside all other threads and is given one second.
    """
    self._clean_ups.append(clean_up)

  def clean_up(self) -> None:
    """Call what `before_ending_now` registered."""
    for clean_up in self._clean_ups:
      _within(_LOOK_S, clean_up)

  @contextlib.contextmanager
  def on_signals(
    self,
    note: Callable[[str], None],
    what_follows: str = "finishing the step, then a checkpoint; a second"
    " signal ends it now",
    at_once: str = "ended at once; the newest checkpoint is whole",
  ):
    """Answer SIGINT, SIGTERM and SIGHUP while the block runs.

    This does nothing outside the main thread. A SIGHUP that was ignored before,
    as under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
      numbers.append(signal.SIGHUP)
    received, sent = os.pipe()
    os.set_blocking(sent, False)  # `set_wakeup_fd` requires it

    def answer():
      while number := os.read(received, 1):
        if number[0] in numbers:
          self._answer(signal.Signals(number[0]), note, what_follows, at_once)

    thread = threading.Thread(target=answer, name="signals", daemon=True)
    thread.start()
    wakeup_before = signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    # Python writes the byte only for signals that have a handler. The handlers
    # do nothing; the thread above answers.
    before = {n: signal.signal(n, lambda number, frame: None) for n in numbers}
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)
      signal.set_wakeup_fd(wakeup_before)
      os.close(sent)  # ends the thread
      thread.join(10 * _LOOK_S)
      os.close(received)

  def _answer(
    self,
    number: signal.Signals,
    note: Callable[[str], None],
    what_follows: str,
    at_once: str,
  ) -> None:
    """Answer a signal: ask to end at the first, end at once at the second."""
    if not self.is_set:
      if number is signal.SIGTERM and self._grace_s:
        self._killed_s = time.monotonic() + self._grace_s
      self.set()
      _within(_LOOK_S, lambda: note(f"{number.name}: {what_follows}"))
      return
    self.clean_up()
    text = f"{number.name}: {at_once}\n"
    _within(_LOOK_S, functools.partial(os.write, 2, text.encode()))
    self._end(128 + number)


def _within(timeout_s: float, function: Callable[[], Any]) -> None:
  """Call a function, and stop waiting for it after the timeout.

  A terminal that accepts no output or a disk that does not respond must not
  keep a second signal from being noticed. Exceptions of the function are
  dropped, since the process is about to end.
  """
  start_thread("signal", function, lambda error: None).join(timeout_s)


class RunError(RuntimeError):
  """A run cannot continue, for a reason that the message explains.

  Attributes:
    status: the exit status of the process.
  """

  status = 1


class EngineFailed(RunError):
  """A device program of the engine failed. A new process may succeed."""

  status = START_AGAIN


class StallError(RunError):
  """Something hangs; says in one line who waits for what.

  A thread cannot be ended from outside. So the process has to end, and the
  next one continues the run.
  """

  status = START_AGAIN


class StallWatch:
  """Detects that nothing has moved for too long while the process ran."""

  def __init__(
    self, timeout_s: float, seconds: Callable[[], float] | None = None
  ):
    self._timeout_s = timeout_s
    self._seconds = seconds
    self._last: object = None
    self.renew()
    self._start_s = time.monotonic()

  @property
  def age_s(self) -> float:
    """Seconds since the watch was created, by the clock."""
    return time.monotonic() - self._start_s

  def renew(self) -> None:
    """Begin to count anew."""
    self._deadline = Deadline(self._timeout_s, self._seconds)

  def check(self, progress: object, report: Callable[[], list[str]]) -> None:
    """Raise if `progress` has not changed for the whole timeout.

    Call this about every second, or more often. `report` returns parts of a
    line that say who waits for what.

    Raises:
      StallError: it has not changed.
    """
    if progress != self._last:
      self._last = progress
      self.renew()
    if self._deadline.next_wait_s() == 0:
      what = f"nothing moved for {self._timeout_s:g} s (run.stall_timeout_s)"
      raise StallError(f"{what}: {'; '.join(report())}")
