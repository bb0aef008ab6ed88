"""A lock between processes that leaves nothing behind when they are killed.

Those of multiprocessing are named semaphores, which lie in /dev/shm: there must
be room for them, and where a whole group of processes is killed nobody removes
them. This one locks a file that has no name any more, and the kernel unlocks it
when its process ends.
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
  """Has the interface of `multiprocessing.RLock`; given to child processes.

  Threads: one of each process may use it, since the kernel knows the process
  that holds a lock and not the thread.
  """

  def __init__(self, descriptor: int):
    """Take over the descriptor of an open file."""
    self._descriptor = descriptor
    self._depth = 0

  def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
    """Take the lock, and return whether it was free before the timeout."""
    end_s = None if timeout is None else time.monotonic() + timeout
    while not self._depth and not self._try():
      if not block or (end_s is not None and time.monotonic() > end_s):
        return False
      time.sleep(_POLL_S)
    self._depth += 1
    return True

  def release(self) -> None:
    """Give the lock back; once for each `acquire`."""
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
    os.close(self._descriptor)

  def __reduce__(self):
    return _from_parent, (reduction.DupFd(self._descriptor),)


def _from_parent(duplicate: Any) -> FileLock:
  return FileLock(duplicate.detach())


class ForkServerContext(multiprocessing.context.ForkServerContext):
  """The fork server's, whose recursive locks are files."""

  def RLock(self) -> Any:  # noqa: N802, the name is multiprocessing's
    with tempfile.TemporaryFile() as file:
      return FileLock(os.dup(file.fileno()))
