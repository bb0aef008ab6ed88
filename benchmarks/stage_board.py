"""What a run is doing, in a file that another process reads.

A run marks when it enters and leaves each of its stages. The marks are in
memory that both processes map, so they stay as they were when the run is
killed, and reading them takes no time of the run.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import mmap
import pathlib
import struct
import threading
from typing import Any

# In the order in which the file holds them.
STAGES = (
  "warm start",
  "restore",
  "checkpoint",
  "publish",
  "adopt",
  "reward",
  "evaluation",
  "train step",
)
_RECORD = struct.Struct("qq")  # how deep inside, and how often entered


class Board:
  """The marks of one run.

  Threads: any thread of the run may mark. A lock makes each mark one change.
  The other process only reads.
  """

  def __init__(self, path: pathlib.Path):
    """Map a file, which is created without marks if it is missing."""
    size = _RECORD.size * len(STAGES)
    if not path.exists():
      path.write_bytes(bytes(size))
    with open(path, "r+b") as file:
      self._memory = mmap.mmap(file.fileno(), size)
    self._lock = threading.Lock()

  def clear(self) -> None:
    """Forget all marks, before another process begins to mark."""
    self._memory[:] = bytes(len(self._memory))

  def enter(self, stage: str) -> None:
    """Mark that a stage has begun."""
    self._change(stage, 1, 1)

  def leave(self, stage: str) -> None:
    """Mark that a stage has ended."""
    self._change(stage, -1, 0)

  @contextlib.contextmanager
  def inside(self, stage: str) -> Iterator[None]:
    """Mark a stage for as long as the block runs."""
    self.enter(stage)
    try:
      yield
    finally:
      self.leave(stage)

  def marking(self, stage: str, function: Callable[..., Any]) -> Any:
    """Return the function, which marks the stage while it runs."""

    @functools.wraps(function)
    def marked(*arguments: Any, **named: Any) -> Any:
      with self.inside(stage):
        return function(*arguments, **named)

    return marked

  def active(self) -> list[str]:
    """Return the stages that were entered and not left."""
    return [stage for stage in STAGES if self._read(stage)[0] > 0]

  def num_entered(self, stage: str) -> int:
    """Return how often a stage was entered."""
    return self._read(stage)[1]

  def _read(self, stage: str) -> tuple[int, int]:
    depth, entered = _RECORD.unpack_from(
      self._memory, STAGES.index(stage) * _RECORD.size
    )
    return depth, entered

  def _change(self, stage: str, depth: int, entered: int) -> None:
    with self._lock:
      was = self._read(stage)
      _RECORD.pack_into(
        self._memory,
        STAGES.index(stage) * _RECORD.size,
        was[0] + depth,
        was[1] + entered,
      )
