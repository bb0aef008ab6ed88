"""The directory of a run's published versions, and the cleanup of old ones.

A start that was killed leaves its last versions behind, often in memory. The
next start of the same workdir removes them before it checks how much room there
is. Otherwise they would occupy the room, the new start would choose another
directory, and they would stay forever.

The name of the directory is the same at every start, so another user of the
machine can make it first. It is used only if it belongs to this user, and only
this user can read it.

The publishing process holds a lock on its directory. The versions of a live run
are therefore never removed.
"""

from collections.abc import Callable
import contextlib
import fcntl
import hashlib
import os
import pathlib
import secrets
import shutil
import time
from typing import IO

from jaxrl_async.config import sections
from jaxrl_async.storage import disk
from jaxrl_async.storage import private_directory

NUM_KEPT = 2  # versions that a reader may be reading
_MEMORY_BACKED = pathlib.Path("/dev/shm")
_LOCK = "publisher"


def prepare(
  section: sections.TransferSection,
  workdir: pathlib.Path,
  num_bytes: int,
  note: Callable[[str], None],
) -> pathlib.Path:
  """Remove what earlier starts left, and choose the directory of versions.

  Args:
    section: of the run's config.
    workdir: of the run; it exists.
    num_bytes: size of one version.
    note: is called with a message, for instance why memory-backed storage is
      not used.

  Raises:
    StorageError: the directory that was configured belongs to another user.
  """
  workdir = pathlib.Path(workdir).resolve()
  memory_backed, beside = defaults(workdir)
  places = [memory_backed, beside]
  if section.directory:
    places.append(pathlib.Path(section.directory).absolute() / _name(workdir))
  for directory in places:
    try:
      remove_leftovers(directory)
    except OSError as error:
      note(f"versions of an earlier start are still in {directory} ({error})")
  if section.channel == sections.Channel.DIRECT:
    return beside  # nothing goes there
  if section.directory:
    private_directory.check(places[-1])
    return places[-1]
  if reason := _reason_against_memory(memory_backed, num_bytes):
    note(f"weights are transferred through {beside}: {reason}")
    return beside
  return memory_backed


def defaults(workdir: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
  """Return where a run's versions go without a setting: in memory, or not."""
  return _MEMORY_BACKED / _name(workdir), workdir / "weight_transfer"


def _name(workdir: pathlib.Path) -> str:
  """Return a name that is unique to the workdir and the same at every start."""
  digest = hashlib.sha256(str(workdir).encode()).hexdigest()
  return f"jaxrl_async-{digest[:16]}"


def _reason_against_memory(directory: pathlib.Path, num_bytes: int) -> str:
  """Return why memory-backed storage cannot hold the versions, or "".

  It must hold the versions that are kept, one that is being written and one
  that is being read. In containers it is often limited to 64 MB.
  """
  if not os.access(_MEMORY_BACKED, os.W_OK):
    return f"{_MEMORY_BACKED} cannot be written to"
  try:
    private_directory.check(directory)
  except disk.StorageError as error:
    return str(error)
  wanted = (NUM_KEPT + 2) * num_bytes
  free = shutil.disk_usage(_MEMORY_BACKED).free
  if free > wanted:
    return ""
  return (
    f"{_MEMORY_BACKED} has {free / 1e6:.1f} MB free, of the"
    f" {wanted / 1e6:.1f} MB that are needed"
  )


def open_incarnation(path: pathlib.Path) -> IO[bytes]:
  """Create the directory of one start, after removing those of dead starts.

  Returns:
    The open lock file. The lock is held for as long as the file is open.

  Raises:
    FileExistsError: the directory exists already.
    StorageError: the directory of all starts belongs to another user.
  """
  private_directory.make(path.parent)
  _remove_incarnations(path.parent)
  path.mkdir()
  lock = open(path / _LOCK, "wb")
  fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  return lock


def remove_leftovers(directory: pathlib.Path) -> None:
  """Remove the incarnations of starts that have ended, and nothing else.

  What belongs to another user is left alone.

  Raises:
    OSError: one of them could not be removed.
  """
  if not private_directory.is_own(directory):
    return
  _remove_incarnations(directory)
  if not any(directory.iterdir()):
    directory.rmdir()


def _remove_incarnations(directory: pathlib.Path) -> None:
  for incarnation in directory.glob("incarnation-*"):
    if not disk.is_locked(incarnation / _LOCK):
      # A reader that has not heard of the end can put nothing there any more.
      removed = incarnation.with_name(f"{incarnation.name}.removed")
      shutil.rmtree(incarnation.rename(removed))


def remove_attempts(version: pathlib.Path) -> None:
  """Remove what attempts to write a version have left.

  Raises:
    OSError: it could not be removed.
  """
  for attempt in version.parent.glob(f"{version.name}*"):
    if attempt.name.partition(".")[0] == version.name:
      shutil.rmtree(attempt)


def remove_now(incarnation: pathlib.Path) -> None:
  """Remove an incarnation whose process ends now; its threads may be writing.

  What they write after it is left to the next start.
  """
  removed = incarnation.with_name(f"{incarnation.name}.removed")
  shutil.rmtree(incarnation.rename(removed), ignore_errors=True)
  with contextlib.suppress(OSError):
    incarnation.parent.rmdir()


def new_incarnation() -> str:
  """Return an id for this start of the run: a readable time and random bits."""
  return f"{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}"
