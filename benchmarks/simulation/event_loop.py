"""A clock that jumps from event to event, and processes that take turns on it.

Everything runs in one thread, so that a run is a function of its seed. A
process stands for a thread or a process of the real system. In a turn it does
what that would do until it has to wait.

A wait of the real code is a `Condition` here. It returns at once, and the
process that called it is woken by the next `notify_all`. The timeout of a wait
is ignored: a wait that would only end by its timeout shows as a deadlock. A
process of which the real one polls has a period of its own.
"""

from collections.abc import Callable
import heapq
import itertools
import random
import threading
from typing import Any

_MOST_JITTER_S = 0.01


class Loop:
  """The clock and the events that are still to come.

  Attributes:
    now: seconds since the start.
    num_events: events that have happened.
    rng: decides every random time.
  """

  def __init__(self, rng: random.Random):
    """Create a loop at time 0."""
    self.now = 0.0
    self.num_events = 0
    self.rng = rng
    self._heap: list[tuple[float, int, Callable[..., object], tuple]] = []
    self._order = itertools.count()
    self._current: Process | None = None

  def seconds(self) -> float:
    """Return the time, as a clock of the real code does."""
    return self.now

  def after(
    self, delay_s: float, call: Callable[..., object], *arguments: Any
  ) -> None:
    """Call a function after a delay; events of one time keep their order."""
    entry = self.now + delay_s, next(self._order), call, arguments
    heapq.heappush(self._heap, entry)

  def step(self) -> bool:
    """Let the next event happen; return False if there is none."""
    if not self._heap:
      return False
    self.now, _, call, arguments = heapq.heappop(self._heap)
    self.num_events += 1
    call(*arguments)
    return True

  def condition(self) -> "Condition":
    """Return what the real code takes for a `threading.Condition`."""
    return Condition(self)

  def jitter_s(self) -> float:
    """Return how long the operating system takes to run what was woken."""
    return _MOST_JITTER_S * self.rng.random()


class Process:
  """Something that takes turns: it works, or it waits."""

  def __init__(
    self,
    loop: Loop,
    turn: Callable[[], float | None],
    *,
    poll_s: float | None = None,
    is_looping: bool = False,
  ):
    """Create a process, whose first turn needs a `wake`.

    Args:
      loop: on which it takes its turns.
      turn: does what there is to do. It returns the seconds that this took, in
        which nothing wakes the process, or None if the process waits now.
      poll_s: how long it waits at most; None is for ever.
      is_looping: whether a turn in which it neither worked nor waited for a
        condition is followed by another one, as in a loop of the real code.
    """
    self._loop = loop
    self._turn = turn
    self._poll_s = poll_s
    self._is_looping = is_looping
    self._due_s: float | None = None
    self._alarm = 0  # the number of the alarm that counts
    self._is_running = self._is_working = self._is_woken = False
    self._has_ended = False
    self._conditions: list[Condition] = []  # for which it waits

  def wake(self) -> None:
    """Give the process a turn soon, unless it works or has ended."""
    if self._is_running:
      self._is_woken = True
    elif not (self._is_working or self._has_ended):
      self._set_alarm(self._loop.jitter_s())

  def end(self) -> None:
    """Give the process no further turn."""
    self._has_ended = True

  def wait_for(self, condition: "Condition") -> None:
    """Be woken by the next notification, unless there is a turn before."""
    self._conditions.append(condition)

  def _set_alarm(self, delay_s: float) -> None:
    due_s = self._loop.now + delay_s
    if self._has_ended or (self._due_s is not None and self._due_s <= due_s):
      return
    self._due_s = due_s
    self._alarm += 1
    self._loop.after(delay_s, self._ring, self._alarm)

  def _ring(self, alarm: int) -> None:
    if alarm != self._alarm or self._has_ended:
      return
    self._due_s = None
    for condition in self._conditions:
      condition.leave(self)
    self._conditions.clear()
    self._is_running, self._is_woken = True, False
    before, self._loop._current = self._loop._current, self
    try:
      worked_s = self._turn()
    finally:
      self._loop._current = before
      self._is_running = False
    self._is_working = worked_s is not None
    is_again = self._is_looping and not self._conditions
    if worked_s is not None:
      self._set_alarm(worked_s)
    elif self._is_woken or is_again:
      self._set_alarm(self._loop.jitter_s())
    elif self._poll_s is not None:
      self._set_alarm(self._poll_s)


class Condition(threading.Condition):
  """A condition whose waits return at once, as the module's docstring says."""

  def __init__(self, loop: Loop):
    """Create a condition that nobody waits for."""
    self._loop = loop
    self._waiting: list[Process] = []
    self._watching: list[Process] = []

  def __enter__(self) -> bool:
    """Do nothing: there is one thread."""
    return True

  def __exit__(self, *error: object) -> None:
    """Do nothing."""

  def watch(self, process: Process) -> None:
    """Wake a process at every notification, in place of frequent polls."""
    self._watching.append(process)

  def has(self, process: Process) -> bool:
    """Return whether a process waits, and was not notified."""
    return process in self._waiting

  def leave(self, process: Process) -> None:
    """Do not wake a process any more."""
    if process in self._waiting:
      self._waiting.remove(process)

  def wait(self, timeout: float | None = None) -> bool:
    """Have the current process woken by the next notification."""
    del timeout
    process = self._loop._current
    if process is not None and process not in self._waiting:
      self._waiting.append(process)
      process.wait_for(self)
    return False

  def wait_for(
    self, predicate: Callable[[], Any], timeout: float | None = None
  ) -> Any:
    """Return what the predicate returns; if it is falsy, also do as `wait`."""
    found = predicate()
    if not found:
      self.wait(timeout)
    return found

  def notify(self, n: int = 1) -> None:
    """Wake all of them, which the real one may do as well."""
    del n
    self.notify_all()

  def notify_all(self) -> None:
    """Wake the processes that wait."""
    waiting, self._waiting = self._waiting, []
    for process in (*waiting, *self._watching):
      process.wake()
