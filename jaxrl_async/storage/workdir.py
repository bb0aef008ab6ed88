"""The directory of a run: one writer at a time, and books that stay in place.

A run writes checkpoints, `metrics.jsonl`, `ledger.jsonl` and `config.json` into
its workdir. Whoever writes there holds a `Claim`; readers, such as a server of
the newest checkpoint, need none and write nothing.
"""

from collections.abc import Callable
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
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
_LONGEST_HOLDER = 500

# Lock files that this process holds open.
_held: set[IO[str]] = set()


class WorkdirError(sections.ConfigError):
  """The workdir cannot be used, or no longer; one line says what to do."""


def check_in_place(path: str | os.PathLike[str], file: IO[Any]) -> None:
  """Checks that the file open for writing is still the one at its path.

  Raises:
    WorkdirError: it was removed, moved or replaced, so that whatever is written
      to it would be lost.
  """
  try:
    is_same = os.path.samestat(os.stat(path), os.fstat(file.fileno()))
  except (FileNotFoundError, NotADirectoryError):
    is_same = False
  if not is_same:
    raise WorkdirError(
      f"workdir: {os.fspath(path)} was removed, moved or replaced while the run"
      " was writing to it; put it back and start again to continue from the"
      " newest checkpoint"
    )


class Claim:
  """The right to write to a workdir; a context manager.

  It is an exclusive `flock` on the file `lock`, which the kernel releases when
  the process ends, however it ends. The lock belongs to this process alone:
  the file is closed in programs that it starts and in children that it forks.
  The file stays behind and means nothing by itself.

  Threads: belongs to the main thread.
  """

  def __init__(self, workdir: pathlib.Path, note: Callable[[str], None]):
    """Args: note: is told if nothing can be locked there."""
    self._path = workdir / LOCK
    self._note = note

  def __enter__(self) -> "Claim":
    """Creates the workdir if needed and takes the lock.

    Raises:
      WorkdirError: another process holds it, or it cannot be written.
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

  def check(self) -> None:
    """Checks that the workdir is still where it was.

    Raises:
      WorkdirError: the lock file was removed or the workdir moved.
    """
    check_in_place(self._path, self._file)

  def __exit__(
    self, kind: Any, error: BaseException | None, where: Any
  ) -> None:
    """Releases the lock.

    Raises:
      WorkdirError: the workdir is gone, which also explains whatever error
        that led to.
    """
    del kind, where
    try:
      if error is None or isinstance(error, Exception):
        if not isinstance(error, WorkdirError):
          self.check()
    except WorkdirError as lost:
      raise lost from error
    finally:
      _held.discard(self._file)
      self._file.close()

  def _locked(self) -> IO[str]:
    """The lock file, locked if its file system can do that."""
    while True:
      # Not truncated: until it is locked it may be another process's.
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
          f" ({error.strerror}): nothing keeps a second run out of it"
        )
        return file
      try:
        check_in_place(self._path, file)
        return file
      except WorkdirError:  # removed after it was opened: take the new one
        file.close()


def _forget_locks() -> None:
  """In a forked child, which would keep them locked after its parent's end."""
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
  """Checks that no run has written its books here; for one that begins.

  A run writes to all of them only after its first checkpoint, so a run that was
  killed before it leaves none.

  Raises:
    WorkdirError: there are books, but the caller found no checkpoint.
  """
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
      " checkpoints back (is their disk mounted?), or begin anew in an empty"
      " workdir"
    )


def check_lines(path: pathlib.Path, num_bytes: int) -> None:
  """Checks that a file of JSON lines has what a checkpoint knows of it.

  Args:
    path: of the file.
    num_bytes: its length at the checkpoint; what follows may be torn.

  Raises:
    WorkdirError: it is missing, too short, or not such a file.
  """
  if num_bytes == 0 and not _is_present(path):
    return
  try:
    with open(path, "rb") as file:
      size = file.seek(0, os.SEEK_END)
      file.seek(max(0, num_bytes - 2**20))
      last = file.read(min(num_bytes, 2**20))
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
  if num_bytes and not _ends_in_an_object(last):
    raise WorkdirError(
      f"workdir: {path} is not the file that the checkpoint knows (its first"
      f" {num_bytes} bytes do not end in a line of JSON); put that back"
    )


def _ends_in_an_object(data: bytes) -> bool:
  whole, end, torn = data.rpartition(b"\n")
  if not end or torn:
    return False
  try:
    return isinstance(json.loads(whole.rpartition(b"\n")[2]), dict)
  except (ValueError, RecursionError):
    return False


def _is_present(path: pathlib.Path) -> bool:
  """Whether there is something of that name, if only a broken link."""
  return os.path.lexists(path)


def _is_empty_file(path: pathlib.Path) -> bool:
  return path.is_file() and path.stat().st_size == 0
