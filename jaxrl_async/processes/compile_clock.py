"""A clock for waits, which stands still while this process compiles a program.

Compiling a program takes minutes for a large model. A thread that compiles does
not hang, so a wait that is to end with a stall or a timeout must not count this
time. JAX tells when it begins to trace, lower or compile, and when that has
ended.
"""

from collections.abc import Callable
import threading
import time
from typing import Any

import jax

_COMPILE_EVENTS = "/jax/core/compile/"


class CompileClock:
  """Seconds in which no thread compiled anything; a context manager.

  It hears of compilations inside of the with statement only.

  Threads: any thread may read it.
  """

  def __init__(self, seconds: Callable[[], float] = time.monotonic):
    """Create a clock.

    Args:
      seconds: the clock that does not stand still.
    """
    self._seconds = seconds
    self._lock = threading.Lock()
    self._num_compiling = 0  # threads, and what is nested in a thread
    self._since_s = 0.0
    self._compile_s = 0.0

  def __call__(self) -> float:
    """Return the time."""
    with self._lock:
      now_s = self._since_s if self._num_compiling else self._seconds()
      return now_s - self._compile_s

  @property
  def is_compiling(self) -> bool:
    """Whether a thread compiles."""
    return self._num_compiling > 0

  def _on_begin(self, event: str, value: float, **_: Any) -> None:
    del value
    if event.startswith(_COMPILE_EVENTS):
      with self._lock:
        if not self._num_compiling:
          self._since_s = self._seconds()
        self._num_compiling += 1

  def _on_end(self, event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    with self._lock:
      # What had begun before this clock was entered may end inside.
      if event.startswith(_COMPILE_EVENTS) and self._num_compiling:
        self._num_compiling -= 1
        if not self._num_compiling:
          self._compile_s += self._seconds() - self._since_s

  def __enter__(self) -> "CompileClock":
    jax.monitoring.register_scalar_listener(self._on_begin)
    jax.monitoring.register_event_duration_secs_listener(self._on_end)
    return self

  def __exit__(self, *_: Any) -> None:
    jax.monitoring.unregister_scalar_listener(self._on_begin)
    jax.monitoring.unregister_event_duration_listener(self._on_end)
