"""A check of large files that the processes of one host make once for all.

Several replicas on one host adopt the same version at the same time. The first
one locks the record of the version and hashes all files; the others wait for
it. It then records what it found and which files it read. What a process finds
in the record counts as its own check if every file still has the inode, size
and times that are recorded. So the verdict is about the files that are there
now, and not about others of the same name. Whatever goes wrong with a record,
a process checks the files by itself.

    a process that checks dies         the kernel releases its lock, and the
                                       next process checks
    a process that checks stands still the others wait for a limited time, and
                                       then check by themselves
    a file changes after the check     its times or its inode differ, so the
                                       record is about another file
    a record is torn                   it is not JSON, and counts as none
    files that were written just now   nothing is recorded, because a later
                                       change might have the same times
    a record cannot be written         every process checks

What is trusted is that a file that has not changed reads the same twice on one
host. A process that checks a file by itself and reads it afterwards trusts the
same. On a network file system, the server tells when a file was changed, and
its answer is trusted too.

A record lies beside what it is about, and is removed with it. Its name contains
the host's, so that no host relies on what another one has read.
"""

from collections.abc import Callable, Sequence
import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import socket
import time
from typing import IO

from jaxrl_async.storage import disk

_CHECKED = ".checked-"
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
# Longer than the tick of a file system's clock, which is 10 ms at most.
_SETTLED_NS = 100_000_000
_POLL_S = 0.02
# Others wait so long for a check, which is longer than any check takes that
# makes progress.
_PATIENCE_S = 10.0


def record_of(directory: pathlib.Path) -> pathlib.Path | None:
  """Return where this host records a check of a directory.

  Returns:
    A file beside the directory; None if the host has no id.
  """
  try:
    boot_id = _BOOT_ID.read_text()
  except OSError:
    return None
  host = hashlib.sha256(f"{socket.gethostname()} {boot_id}".encode())
  name = f"{directory.name}{_CHECKED}{host.hexdigest()[:16]}"
  return directory.with_name(name)


def remove_records(directory: pathlib.Path) -> None:
  """Remove the records of all hosts about a directory that nobody reads."""
  for record in directory.parent.glob(f"{directory.name}{_CHECKED}*"):
    record.unlink()


def identities(files: Sequence[pathlib.Path]) -> list[list[int]]:
  """Return what differs if one of the files is replaced or changed.

  Files are opened for this, because a network file system then asks its server.
  """
  found = []
  for path in files:
    with open(path, "rb") as file:
      status = os.fstat(file.fileno())
    found.append(
      [
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
      ]
    )
  return found


def marks(directory: pathlib.Path) -> tuple[list[str], list[list[int]]]:
  """Return what differs if a file of a directory is added, lost or changed.

  Raises:
    OSError: a file cannot be opened.
  """
  files = sorted(path for path in directory.rglob("*") if path.is_file())
  return [*map(str, files)], identities(files)


def once(
  record: pathlib.Path | None,
  about: str,
  files: Sequence[pathlib.Path],
  check: Callable[[], str],
) -> str:
  """Return the result of a check, which one process makes for its host.

  Args:
    record: a file of this host alone; None lets this process check.
    about: what the files are checked against.
    files: all files that the check reads.
    check: returns why the files are refused, or "".
  """
  lock = None if record is None else _locked(record, files)
  if lock is None:
    return check()
  with lock:
    now = [about, identities(files)]
    if (known := _verdict(lock, now)) is not None:
      return known
    clock_ns = os.fstat(lock.fileno()).st_mtime_ns
    changed_ns = max((file[-1] for file in now[1]), default=0)
    is_settled = changed_ns + _SETTLED_NS < clock_ns
    verdict = check()
    if is_settled:
      with contextlib.suppress(OSError):
        lock.truncate(0)
        lock.write(json.dumps([now, verdict]).encode())
    return verdict


def _locked(
  record: pathlib.Path, files: Sequence[pathlib.Path]
) -> IO[bytes] | None:
  """Return the record with its lock, or None if it cannot be had.

  Raises:
    OSError: one of the files is gone. Then there is no record of them either.
  """
  most_s = _PATIENCE_S + disk.most_s(sum(x.stat().st_size for x in files))
  try:
    lock = open(record, "a+b", buffering=0)
  except OSError:
    return None
  end_s = time.monotonic() + most_s
  while True:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      os.utime(lock.fileno())  # with the clock of the file system
      return lock
    except BlockingIOError:
      if time.monotonic() > end_s:
        lock.close()
        return None
      time.sleep(_POLL_S)
    except OSError:  # a file system without locks
      lock.close()
      return None


def _verdict(lock: IO[bytes], about: list) -> str | None:
  """Return the verdict of a record, if there is one and it is about that."""
  lock.seek(0)
  try:
    known, verdict = json.loads(lock.read())
  except ValueError:
    return None
  return verdict if known == about else None
