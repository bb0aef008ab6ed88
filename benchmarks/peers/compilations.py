"""Counts what XLA compiles in a process that uses JAX."""

from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
  """Counts the programs that XLA compiles from now on.

  Attributes:
    count: programs so far.
  """

  def __init__(self):
    self.count = 0
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def _listen(self, event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    self.count += event == _EVENT
