"""The directory of a run: one writer at a time, and files that stay in place.

A run writes checkpoints, `metrics.jsonl`, `ledger.jsonl` and `config.json` into
its workdir. A process that writes there must hold a `Claim`. Readers, such as a
server of the newest checkpoint, need no claim and write nothing.
"""

from collections.abc import Callable
import errno
import fcntl
import json
import os
import pathlib
import shlex
import socket
import sys
import time
from typing import IO, Any

from jaxrl_async.config import sections

LOCK = "lock"
CHECKPOINTS = "checkpoints"
FINE_TUNING = "fine_tuning"  # checkpoints of launch/sft.py
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
TIMING = "timing.jsonl"
_LONGEST_HOLDER = 500
_TAIL_BYTES = 2**16  # in which the last line of a file is looked for first

# Lock files that this process holds open.
_held: set[IO[str]] = set()


class WorkdirError(sections.ConfigError):
  """The workdir cannot be used, or no longer; the message says what to do."""


def check_in_place(path: str | os.PathLike[str], file: IO[Any]) -> None:
  """Check that a file open for writing is still the one at its path.

  Raises:
    WorkdirError: it was removed, and another one is in its place.
    OSError: it was removed, was moved and can be put back, or its file system
      does not say.
  """
  name = os.fspath(path)
  is_there = True
  try:
    if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
      return
  except (FileNotFoundError, NotADirectoryError):
    is_there = False
  if os.fstat(file.fileno()).st_nlink:
    raise FileNotFoundError(errno.ENOENT, "it was moved; put it back", name)
  if is_there:
    raise WorkdirError(
      f"workdir: {name} was replaced while the run was writing to it; put a"
      " copy of the whole workdir back and start again to continue from the"
      " newest checkpoint"
    )
  raise FileNotFoundError(errno.ENOENT, "it was removed", name)


class Claim:
  """The right to write to a workdir; a context manager.

  The claim is an exclusive `flock` on the file `lock`. The kernel releases it
  when the process ends, in whatever way. The lock belongs to this process
  alone: the file is closed in programs that the process starts and in children
  that it forks. The lock file stays behind afterwards; its existence alone
  means nothing.

  Threads: belongs to the main thread.
  """

  def __init__(self, workdir: pathlib.Path, note: Callable[[str], None]):
    """Prepare a claim.

    Args:
      workdir: the directory to claim.
      note: is called with a message if the file system has no locks.
    """
    self._path = workdir / LOCK
    self._note = note
    self._is_reached = True

  def __enter__(self) -> "Claim":
    """Create the workdir if needed, and take the lock.

    Raises:
      WorkdirError: another process holds the lock, or it cannot be written.
    """
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      self._file = self._locked()
      self._file.truncate(0)
      self._file.write(_describe_this_process() + "\n")
      self._file.flush()
    except OSError as error:
      raise WorkdirError(
        f"workdir: {self._path} cannot be written ({error.strerror})"
      ) from error
    _held.add(self._file)
    return self

  def check_in_place(self) -> None:
    """Check that the workdir is where it was, before something is written.

    Raises:
      WorkdirError: another one is in its place.
      OSError: it was removed or moved, or its file system does not answer.
    """
    check_in_place(self._path, self._file)

  def check(self) -> None:
    """Check that the workdir was not replaced, and say if it is not there.

    One that was moved, or whose file system does not answer, may come back.
    What has to be written there is tried again, until that has failed too
    often.

    Raises:
      WorkdirError: another one is in its place.
    """
    try:
      self.check_in_place()
    except OSError as error:
      if self._is_reached:
        self._note(
          f"WARNING: {self._path.parent} is not reached ({error.strerror})"
        )
      self._is_reached = False
    else:
      if not self._is_reached:
        self._note(f"{self._path.parent} is reached again")
      self._is_reached = True

  def __exit__(self, *_: Any) -> None:
    """Release the lock."""
    _held.discard(self._file)
    self._file.close()

  def _locked(self) -> IO[str]:
    """Return the lock file, locked if its file system supports locks."""
    while True:
      # Opened without truncation: until it is locked, it may belong to another
      # process.
      file = open(self._path, "a+")
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        with file:
          holder = _read_holder(file)
        raise WorkdirError(
          f"workdir: {self._path.parent} is in use by {holder}; wait until it"
          " ends, or use another workdir"
        ) from None
      except OSError as error:
        self._note(
          f"{self._path.parent} is on a file system without locks"
          f" ({error.strerror}): a second run is not kept out"
        )
        return file
      try:
        check_in_place(self._path, file)
        return file
      # It was removed or moved after it was opened: try again with the new one.
      except (WorkdirError, FileNotFoundError):
        file.close()


def _forget_locks() -> None:
  """Close the lock files in a forked child.

  The child would otherwise keep them locked after its parent has ended.
  """
  for file in _held:
    file.close()
  _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _describe_this_process() -> str:
  since = time.strftime("%Y-%m-%d %H:%M:%S")
  return (
    f"process {os.getpid()} on {socket.gethostname()}, since {since}:"
    f" {shlex.join(sys.argv)}"
  )


def _read_holder(file: IO[str]) -> str:
  file.seek(0)
  text = file.read(_LONGEST_HOLDER).partition("\n")[0]
  text = "".join(x for x in text if x.isprintable())
  return text or "another process"


def check_unused(workdir: pathlib.Path) -> None:
  """Check that no run has written here; called by a run that begins.

  A run writes config.json, metrics and ledger only after its first checkpoint.
  A run that was killed before its first checkpoint leaves none of them.

  Raises:
    WorkdirError: there are such files, although the caller found no checkpoint.
  """
  if _is_present(workdir / FINE_TUNING):
    raise WorkdirError(
      f"workdir: {workdir} is that of a fine-tuning; use another one, with"
      f" warm_start.checkpoint={workdir / 'params'}"
    )
  found = [
    name
    for name in (METRICS, LEDGER)
    if _is_present(workdir / name) and not _is_empty_file(workdir / name)
  ]
  # launch/sft.py writes config.json beside the parameters it trained.
  if _is_present(workdir / "config.json") and not (workdir / "params").exists():
    found.append("config.json")
  if found:
    raise WorkdirError(
      f"workdir: {workdir} holds {' and '.join(found)} of a run, but no"
      f" checkpoint in {workdir / CHECKPOINTS} to continue it from; bring the"
      " checkpoints back (is their disk mounted?), or start in an empty"
      " workdir"
    )


def check_lines(path: pathlib.Path, num_bytes: int) -> None:
  """Check that a file of JSON lines holds what a checkpoint expects.

  Args:
    path: of the file.
    num_bytes: its length at the time of the checkpoint. Later lines may be
      incomplete.

  Raises:
    WorkdirError: the file is missing, too short, or a different one.
  """
  if num_bytes == 0 and not _is_present(path):
    return
  try:
    with open(path, "rb") as file:
      size = file.seek(0, os.SEEK_END)
      last = _last_line(file, num_bytes)
  except OSError as error:
    raise WorkdirError(
      f"workdir: {path} cannot be read ({error.strerror}); the checkpoint"
      f" needs its first {num_bytes} bytes"
    ) from error
  if size < num_bytes:
    raise WorkdirError(
      f"workdir: {path} has {size} bytes, fewer than the {num_bytes} of the"
      " checkpoint; put the whole file back"
    )
  if num_bytes and not _is_an_object(last):
    raise WorkdirError(
      f"workdir: {path} is not the file that the checkpoint knows (its first"
      f" {num_bytes} bytes do not end in a line of JSON); put that back"
    )


def _last_line(file: IO[bytes], num_bytes: int) -> bytes:
  """Return the last line of so many bytes, however long it is."""
  size = _TAIL_BYTES
  while True:
    start = max(0, num_bytes - size)
    file.seek(start)
    tail = file.read(num_bytes - start)
    begin = tail.rfind(b"\n", 0, -1) + 1
    if begin or not start:
      return tail[begin:]
    size *= 2


def _is_an_object(line: bytes) -> bool:
  if not line.endswith(b"\n"):
    return False
  try:
    return isinstance(json.loads(line), dict)
  except (ValueError, RecursionError):
    return False


def _is_present(path: pathlib.Path) -> bool:
  """Return whether the name exists, be it as a broken link."""
  return os.path.lexists(path)


def _is_empty_file(path: pathlib.Path) -> bool:
  return path.is_file() and path.stat().st_size == 0
