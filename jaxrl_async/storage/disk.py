"""Files that a run needs, and errors that say what to do if one fails.

A full or broken disk is not a bug of the program. It ends the run with one line
that names the file, and without a traceback.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import errno
import fcntl
import os
import pathlib
import re
import shutil

from jaxrl_async.storage import workdir as workdir_lib

# What a file consists of.
Pieces = Sequence[bytes | memoryview]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_BROKEN = {
  *(errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.ENODEV),
  # A file system over a network that does not answer.
  *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN),
}
# Orbax's storage layer reports the error of a system call in these forms.
_OS_ERROR = re.compile(r"(?:OS error |os_error_code=')(\d+)")

# Bytes of records that a file keeps in memory at most, of those that the disk
# refused and of those that it has not confirmed.
_MOST_KEPT = 2**26


class StorageError(OSError):
  """A file could not be written; one line names it and says what to do."""


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
  """Turn a disk failure inside the block into a StorageError.

  Args:
    path: what is being written, for the message. If the system reports which
      file failed, the message names that file instead.
  """
  try:
    yield
  except (OSError, ValueError) as error:
    number = error_number(error)
    if number not in _FULL | _REFUSED | _BROKEN:
      raise  # not a disk failure
    named = getattr(error, "filename", None)
    if number in _FULL:
      advice = "make room there"
    elif number in _REFUSED:
      advice = "allow writing there"
    else:
      advice = "check that the directory exists and its disk works"
    reason = getattr(error, "strerror", None) or os.strerror(number)
    raise StorageError(
      f"{named or os.fspath(path)} cannot be written ({reason}); {advice}. The"
      " same command continues from the newest checkpoint"
    ) from error


@contextlib.contextmanager
def naming_lost_files(path: str | os.PathLike[str]) -> Iterator[None]:
  """Turn what Orbax says about files that have vanished into an OSError.

  If a directory is removed during a write, Orbax misses a file that was in it,
  and may create the directory again. Its error has no number of a system call.

  Args:
    path: what is being written, for the message.
  """
  try:
    yield
  except (OSError, ValueError) as error:
    if error_number(error) is not None:
      raise
    raise FileNotFoundError(
      errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)
    ) from error


def error_number(error: OSError | ValueError) -> int | None:
  """Return the number of the system call's error, or None if there is none."""
  if found := _OS_ERROR.search(str(error)):
    return int(found[1])
  return error.errno if isinstance(error, OSError) else None


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
  """Give a path to write a file or directory to, which then takes its place.

  If the block raises, what it has written is removed: it would keep a full disk
  full. So is what a crash has left there.

  Raises:
    StorageError: it could not be written.
  """
  incomplete = path.with_suffix(".incomplete")
  with writing(path):
    remove(incomplete)
    try:
      yield incomplete
      incomplete.replace(path)
    finally:
      remove(incomplete)


def remove(path: pathlib.Path) -> None:
  """Remove a file or directory, if it is there and can be removed."""
  shutil.rmtree(path, ignore_errors=True)
  with contextlib.suppress(OSError):
    path.unlink()


def replace_text(path: pathlib.Path, text: str) -> None:
  """Write a file atomically: a reader finds the old text or the new one.

  This also holds after a loss of power.

  Raises:
    StorageError: the file could not be written.
  """
  with replacing(path) as incomplete:
    write_pieces(incomplete, [text.encode()], sync=True)
  with writing(path):
    sync_names(path.parent)


def write_pieces(
  path: pathlib.Path, pieces: Pieces, *, sync: bool = False
) -> None:
  """Write a file that consists of these, one after the other.

  Args:
    path: of the file.
    pieces: bytes, or the memory of contiguous arrays.
    sync: also wait until they have reached the disk.
  """
  with open(path, "wb") as file:
    for piece in pieces:
      file.write(piece)
    if sync:
      file.flush()
      os.fsync(file.fileno())


def sync_names(directory: pathlib.Path) -> None:
  """Wait until the names in a directory have reached the disk."""
  descriptor = os.open(directory, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def is_locked(path: pathlib.Path) -> bool:
  """Return whether somebody holds an exclusive `flock` on a file.

  A file that is not there is not locked.
  """
  try:
    lock = open(path, "r+b")
  except FileNotFoundError:
    return False
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
  return False


# What moves at least so fast makes progress: slower disks and networks are of
# no use for a large model.
_SLOWEST_BYTES_PER_S = 1e8


def most_s(num_bytes: int) -> float:
  """Return the longest time that reading or writing so many bytes may take."""
  return num_bytes / _SLOWEST_BYTES_PER_S


class AppendFile:
  """A file that only grows, by whole records.

  Invariant: the file ends with a whole record, because the remains of a failed
  write are cut off. What the disk has refused may be kept in memory, and is
  then written before anything else. Records are never reordered.

  Records stay in memory until `fsync` has confirmed them. If it fails, the
  system may forget what was written, and confirm the next `fsync` all the same.

  Attributes:
    num_bytes: of all records, those in memory included.

  Threads: one at a time.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    num_bytes: int = 0,
    note: Callable[[str], None] | None = None,
  ):
    """Open or create the file and cut it to `num_bytes`.

    Args:
      path: of the file.
      num_bytes: its length before the next record.
      note: if given, records that the disk refuses are kept in memory, and
        this is called with a message about the first of them.

    Raises:
      ValueError: the file is shorter than that.
      StorageError: the file cannot be opened.
    """
    self._path = pathlib.Path(path)
    self._note = note
    self._kept: list[bytes] = []  # not confirmed, the first of them written
    self._num_written = 0
    with writing(self._path):
      is_there = self._path.exists()
      found = self._path.stat().st_size if is_there else 0
      if found < num_bytes:
        raise ValueError(
          f"{self._path} has {found} bytes, fewer than the {num_bytes} of the"
          " checkpoint"
        )
      self._file = open(self._path, "r+b" if is_there else "x+b", 0)
      self._file.truncate(num_bytes)
      self.num_bytes = self._written = self._file.seek(num_bytes)
      self._confirmed = num_bytes

  def append(self, record: bytes) -> None:
    """Write all of a record, or keep all of it, or do neither.

    Raises:
      WorkdirError: another file is in its place.
      StorageError: the disk refused the record, or the file is no longer at its
        path, and the record is not kept.
    """
    was_refused = self._num_written < len(self._kept)
    self._kept.append(record)
    self.num_bytes += len(record)
    try:
      self.check_in_place()
      self._write_kept()
      if self._written - self._confirmed > _MOST_KEPT // 2:
        self._confirm()
    except (workdir_lib.WorkdirError, StorageError) as error:
      is_full = self.num_bytes - self._written > _MOST_KEPT
      is_refused = isinstance(error, StorageError)
      if self._note is None or is_full or not is_refused:
        self.num_bytes -= len(self._kept.pop())
        raise
      if not was_refused:
        self._note(
          f"WARNING: {self._path} cannot be written"
          f" ({error.__cause__ or error}); its records stay in memory until it"
          " can be"
        )
    else:
      if was_refused and self._note is not None:
        self._note(f"{self._path} is written again, and lacks nothing")

  def sync(self) -> None:
    """Wait until everything has reached the disk.

    Raises:
      WorkdirError: another file is in its place.
      StorageError: the disk refused it, or the file is no longer at its path.
    """
    self.check_in_place()
    self._write_kept()
    self._confirm()

  def close(self) -> None:
    """Close the file.

    Raises:
      StorageError: there are records in memory that the disk refuses.
    """
    if not self._file.closed:
      with self._file:
        self._write_kept()

  def check_in_place(self) -> None:
    """Check that the file is still at its path.

    Raises:
      WorkdirError: another file is in its place.
      StorageError: it was removed or moved, or its file system does not answer.
    """
    with writing(self._path):
      workdir_lib.check_in_place(self._path, self._file)

  def _write_kept(self) -> None:
    """Write the records that are not in the file, oldest first."""
    while self._num_written < len(self._kept):
      record = self._kept[self._num_written]
      with writing(self._path):
        try:
          rest = memoryview(record)
          while rest:
            rest = rest[self._file.write(rest) :]
        except OSError:
          self._cut()
          raise
      self._written += len(record)
      self._num_written += 1

  def _confirm(self) -> None:
    """Wait until what was written has reached the disk."""
    with writing(self._path):
      try:
        os.fsync(self._file.fileno())
      except OSError:
        self._written, self._num_written = self._confirmed, 0
        self._cut()
        raise
    self._confirmed = self._written
    del self._kept[: self._num_written]
    self._num_written = 0

  def _cut(self) -> None:
    self._file.seek(self._written)
    self._file.truncate()
