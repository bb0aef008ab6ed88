"""Whether the thread that generates goes on, or stands still.

Threads of the transport answer whatever becomes of the thread that generates.
So a replica says itself for how long that one has not come round. A program
that never ends, on a device or among several hosts, is noticed by this.

Compiling a program takes minutes for a large model, and is no standing still.
JAX tells when it begins to trace, lower or compile, and when that has ended.
"""

from collections.abc import Callable
import threading
import time
from typing import Any

import jax

_COMPILE_EVENTS = "/jax/core/compile/"


class Pulse:
  """When a thread has shown last that it goes on; a context manager.

  Inside of the with statement, the time in which it compiles does not count.

  Threads: `beat` belongs to the thread that is watched. Any thread may call the
  rest.

  Attributes:
    compile_s: seconds in which the thread has compiled.
  """

  def __init__(self, seconds: Callable[[], float] = time.monotonic):
    """Begin with a beat of this thread.

    Args:
      seconds: a clock.
    """
    self._seconds = seconds
    self._num_compiling = 0  # they are nested
    self._compiling_since_s = 0.0
    self.compile_s = 0.0
    self.beat()

  def beat(self) -> None:
    """Show that the thread goes on."""
    self._thread = threading.get_ident()
    self._beat_s = self._seconds()

  def excuse(self) -> None:
    """Show that the thread waits for another one, which goes on."""
    self._beat_s = self._seconds()

  @property
  def is_compiling(self) -> bool:
    """Whether the thread compiles."""
    return self._num_compiling > 0

  @property
  def still_s(self) -> float:
    """Seconds since the last beat, or since the thread has compiled."""
    if self.is_compiling:
      return 0.0
    return self._seconds() - self._beat_s

  def _on_begin(self, event: str, value: float, **_: Any) -> None:
    del value
    if self._is_about_compiling(event):
      if not self._num_compiling:
        self._compiling_since_s = self._seconds()
      self._num_compiling += 1

  def _on_end(self, event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    if self._is_about_compiling(event) and self._num_compiling:
      self.excuse()
      self._num_compiling -= 1
      if not self._num_compiling:
        self.compile_s += self._seconds() - self._compiling_since_s

  def _is_about_compiling(self, event: str) -> bool:
    # JAX calls listeners in the thread that compiles.
    is_watched = threading.get_ident() == self._thread
    return is_watched and event.startswith(_COMPILE_EVENTS)

  def __enter__(self) -> "Pulse":
    jax.monitoring.register_scalar_listener(self._on_begin)
    jax.monitoring.register_event_duration_secs_listener(self._on_end)
    return self

  def __exit__(self, *_: Any) -> None:
    jax.monitoring.unregister_scalar_listener(self._on_begin)
    jax.monitoring.unregister_event_duration_listener(self._on_end)
