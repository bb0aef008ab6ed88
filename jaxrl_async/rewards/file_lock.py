"""A lock between processes that leaves nothing behind when they are killed.

The locks of multiprocessing are named semaphores in /dev/shm. They need room
there, and they are not removed if a whole group of processes is killed. The
lock of this module locks a file that has no name any more. The kernel unlocks
it when the process that holds it ends.
"""

import fcntl
from multiprocessing import reduction
import multiprocessing.context
import os
import tempfile
import time
from typing import Any

_POLL_S = 0.001


class FileLock:
  """A lock with the interface of `multiprocessing.RLock`.

  It can be passed to child processes.

  Threads: only one thread of each process may use it, because the kernel
  records which process holds a lock, not which thread.
  """

  def __init__(self, descriptor: int):
    """Create a lock that owns the descriptor of an open file."""
    self._descriptor = descriptor
    self._depth = 0

  def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
    """Acquire the lock, and return whether that succeeded in time."""
    end_s = None if timeout is None else time.monotonic() + timeout
    while not self._depth and not self._try():
      if not block or (end_s is not None and time.monotonic() > end_s):
        return False
      time.sleep(_POLL_S)
    self._depth += 1
    return True

  def release(self) -> None:
    """Release the lock, once for each `acquire`."""
    self._depth -= 1
    if not self._depth:
      fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

  def _try(self) -> bool:
    try:
      fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both
      return False
    return True

  def __del__(self):
    """Close the file."""
    os.close(self._descriptor)

  def __reduce__(self):
    """Pass a duplicate of the descriptor to a child process."""
    return _from_parent, (reduction.DupFd(self._descriptor),)


def _from_parent(duplicate: Any) -> FileLock:
  return FileLock(duplicate.detach())


class ForkServerContext(multiprocessing.context.ForkServerContext):
  """The fork server's context, with recursive locks that are files."""

  def RLock(self) -> Any:  # noqa: N802, the name is multiprocessing's
    """Return a new `FileLock` of an unnamed temporary file."""
    with tempfile.TemporaryFile() as file:
      return FileLock(os.dup(file.fileno()))
