"""Threads that fail loudly, waits that end, and a polite answer to Ctrl-C.

The first failure of any thread is kept with the thread's name; `on_failure`
then closes what others wait for, so that everybody comes home.
"""

from collections.abc import Callable
import contextlib
import functools
import os
import signal
import threading
import time
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.storage import disk

_LOOK_S = 1.0


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

  def has_spawned(self, name: str) -> bool:
    """Whether a thread of that name was started, whatever became of it."""
    return any(thread.name == name for thread in self._threads)

  def check(self) -> None:
    """Raises the first failure, if there was one.

    Raises:
      ThreadFailed: names the thread.
      ConfigError, StorageError: as the thread raised it.
    """
    with self._lock:
      failure = self._failure
    if failure is not None:
      name, error = failure
      if isinstance(error, (sections.ConfigError, disk.StorageError)):
        raise error  # says by itself what to change
      raise ThreadFailed(f"{name} failed: {error}") from error

  def join(self, timeout_s: float) -> list[str]:
    """Waits for all threads together; returns who did not come home."""
    deadline = Deadline(timeout_s)
    for thread in self._threads:
      while thread.is_alive() and (wait_s := deadline.next_wait_s()) > 0:
        thread.join(wait_s)
    return [t.name for t in self._threads if t.is_alive()]


class Deadline:
  """So many seconds in which this process runs, for waits that look often.

  While a process is stopped (Ctrl-Z, SIGSTOP) clocks go on. So what counts
  between two looks is bounded.
  """

  def __init__(self, timeout_s: float):
    self._left_s = timeout_s
    self._looked_s = time.monotonic()

  def next_wait_s(self) -> float:
    """How long to wait before looking again; 0 when the time is over."""
    now_s = time.monotonic()
    self._left_s -= min(now_s - self._looked_s, 2 * _LOOK_S)
    self._looked_s = now_s
    return min(max(self._left_s, 0.0), _LOOK_S)


class Interrupted(RuntimeError):
  """The run was asked to end; says how to go on."""


class StopRequest:
  """A signal once: finish the step and write a checkpoint; twice: end now.

  Threads: a thread of its own answers signals. The main one may be inside of a
  compilation, or wait for a disk that does not answer, when the second comes.
  """

  def __init__(self, end: Callable[[int], None] = os._exit):
    """Args: end: ends the process with an exit code, at once."""
    self._event = threading.Event()
    self._end = end
    self._clean_ups: list[Callable[[], None]] = []

  @property
  def is_set(self) -> bool:
    """Somebody asked the run to end."""
    return self._event.is_set()

  def check(self, text: str) -> None:
    """Raises Interrupted with the text if somebody did."""
    if self.is_set:
      raise Interrupted(text)

  def set(self) -> None:
    """Asks the run to end after the current step."""
    self._event.set()

  def wait(self, timeout_s: float) -> None:
    """Waits until somebody has."""
    self._event.wait(timeout_s)

  def before_ending_now(self, clean_up: Callable[[], None]) -> None:
    """Has something done before a second signal ends the process.

    It runs beside all other threads, and has a second.
    """
    self._clean_ups.append(clean_up)

  @contextlib.contextmanager
  def on_signals(
    self,
    note: Callable[[str], None],
    what_follows: str = "finishing the step, then a checkpoint; once more ends"
    " it now",
    at_once: str = "ended at once; the newest checkpoint is whole",
  ):
    """Answers SIGINT, SIGTERM and SIGHUP, where this is the main thread.

    A hangup that was ignored before, as under nohup, stays ignored.

    Args:
      note: tells the user.
      what_follows: said at the first signal.
      at_once: said at the second.
    """
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
      numbers.append(signal.SIGHUP)
    received, sent = os.pipe()
    os.set_blocking(sent, False)  # as `set_wakeup_fd` wants it

    def answer():
      while number := os.read(received, 1):
        if number[0] in numbers:
          self._answer(signal.Signals(number[0]), note, what_follows, at_once)

    thread = threading.Thread(target=answer, name="signals", daemon=True)
    thread.start()
    wakeup_before = signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    # A handler must exist; what answers is the byte that the signal sends.
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
    if not self.is_set:
      self.set()
      _within(_LOOK_S, lambda: note(f"{number.name}: {what_follows}"))
      return
    for clean_up in self._clean_ups:
      _within(_LOOK_S, clean_up)
    text = f"{number.name}: {at_once}\n"
    _within(_LOOK_S, functools.partial(os.write, 2, text.encode()))
    self._end(128 + number)


def _within(timeout_s: float, function: Callable[[], Any]) -> None:
  """Calls a function and goes on, at the latest after the timeout.

  A terminal that takes no text and a disk that does not answer must not keep a
  second signal from being seen. What it raises is not worth a word any more.
  """
  start_thread("signal", function, lambda error: None).join(timeout_s)


class RunError(RuntimeError):
  """A run could not go on, for a reason that the message says by itself."""


class StallError(RunError):
  """Nothing moved for `run.stall_timeout_s`; says who waits for what."""


class StallWatch:
  """Notices when nothing has moved for too long while the process ran."""

  def __init__(self, timeout_s: float):
    self._timeout_s = timeout_s
    self._last: object = None
    self._deadline = Deadline(timeout_s)
    self._start_s = time.monotonic()

  @property
  def age_s(self) -> float:
    """Seconds since it was made, by the clock."""
    return time.monotonic() - self._start_s

  def check(self, progress: object, report: Callable[[], list[str]]) -> None:
    """Call it about every second, or more often.

    Args:
      progress: what changes when something moves.
      report: who waits for what.

    Raises:
      StallError: it has been the same for the whole timeout.
    """
    if progress != self._last:
      self._last, self._deadline = progress, Deadline(self._timeout_s)
    if self._deadline.next_wait_s() == 0:
      what = f"nothing moved for {self._timeout_s:g} s (run.stall_timeout_s)"
      raise StallError("\n".join([what, *report()]))
