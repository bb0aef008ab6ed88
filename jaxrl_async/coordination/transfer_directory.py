"""Where a run's versions go, and the removal of what its earlier starts left.

A start that was killed leaves its last versions behind, often in memory. The
next start of the same workdir removes them before it looks how much room there
is; otherwise they would take the room, and it would go elsewhere and leave them
there for ever. The workdir remembers every directory that was used, since the
setting may change between two starts.

What is being published to is locked by its process, so that nobody removes the
versions of a run that is alive, whatever a copied workdir remembers.
"""

from collections.abc import Callable
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from typing import IO

from jaxrl_async.config import sections
from jaxrl_async.storage import disk

NUM_KEPT = 2  # versions that a reader may be reading
_MEMORY_BACKED = pathlib.Path("/dev/shm")
_RECORD = "weight_transfer.json"
_LOCK = "publisher"


def prepare(
  section: sections.TransferSection,
  workdir: pathlib.Path,
  num_bytes: int,
  note: Callable[[str], None],
) -> pathlib.Path:
  """Removes what earlier starts left, then chooses where versions go.

  Args:
    section: of the run's configuration.
    workdir: of the run; it exists.
    num_bytes: of one version.
    note: told why memory-backed storage is not used.

  Raises:
    StorageError: the workdir cannot be written to.
  """
  workdir = pathlib.Path(workdir).resolve()
  record = workdir / _RECORD
  memory_backed = _MEMORY_BACKED / _name(workdir)
  known = {memory_backed, workdir / "weight_transfer", *_read(record)}
  for directory in sorted(known):
    try:
      remove_leftovers(directory)
    except OSError as error:
      note(f"versions of an earlier start are still in {directory} ({error})")
  if section.channel == sections.Channel.DIRECT:
    return workdir / "weight_transfer"  # nothing goes there
  if section.directory:
    chosen = pathlib.Path(section.directory).absolute() / _name(workdir)
  elif reason := _lack_of_memory(num_bytes):
    chosen = workdir / "weight_transfer"
    note(f"weights are transferred through {chosen}: {reason}")
  else:
    chosen = memory_backed
  used = {chosen, *(path for path in known if path.exists())}
  with disk.writing(record):
    incomplete = record.with_suffix(".incomplete")
    incomplete.write_text(json.dumps(sorted(map(str, used))))
    incomplete.replace(record)
  return chosen


def _name(workdir: pathlib.Path) -> str:
  """No two workdirs share one; every start of a workdir finds it."""
  digest = hashlib.sha256(str(workdir).encode()).hexdigest()
  return f"jaxrl_async-{digest[:16]}"


def _read(record: pathlib.Path) -> list[pathlib.Path]:
  if not record.exists():
    return []
  return [pathlib.Path(path) for path in json.loads(record.read_text())]


def _lack_of_memory(num_bytes: int) -> str:
  """Why memory-backed storage cannot take the versions; "" if it can.

  Those exist at a time that are kept, written and read. In a container it
  often holds only 64 MB.
  """
  if not os.access(_MEMORY_BACKED, os.W_OK):
    return f"{_MEMORY_BACKED} cannot be written to"
  wanted = (NUM_KEPT + 2) * num_bytes
  free = shutil.disk_usage(_MEMORY_BACKED).free
  if free > wanted:
    return ""
  return (
    f"{_MEMORY_BACKED} has {free / 1e6:.1f} MB free, of the"
    f" {wanted / 1e6:.1f} MB that are needed"
  )


def open_incarnation(path: pathlib.Path) -> IO[bytes]:
  """Makes the directory of one start, after removing those of dead ones.

  Returns:
    Its lock, which belongs to this process for as long as it is open.

  Raises:
    FileExistsError: it is there already.
  """
  remove_leftovers(path.parent)
  path.mkdir(parents=True)
  lock = open(path / _LOCK, "wb")
  fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  return lock


def remove_leftovers(directory: pathlib.Path) -> None:
  """Removes the incarnations of starts that are over, and nothing else.

  Raises:
    OSError: one could not be removed.
  """
  for incarnation in directory.glob("incarnation-*"):
    if not _is_published_to(incarnation):
      shutil.rmtree(incarnation)
  if directory.is_dir() and not any(directory.iterdir()):
    directory.rmdir()


def _is_published_to(incarnation: pathlib.Path) -> bool:
  try:
    lock = open(incarnation / _LOCK, "rb")
  except FileNotFoundError:
    return False
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
  return False
