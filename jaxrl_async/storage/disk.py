"""Files that a run needs, and errors that say what to do if one fails.

A full or broken disk is not a bug of the program. It ends the run with one line
that names the file, and without a traceback.
"""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import re

from jaxrl_async.storage import workdir as workdir_lib

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_BROKEN = {errno.EIO, errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV}
# Orbax's storage layer reports the error of a system call in this form.
_OS_ERROR = re.compile(r"OS error (\d+)")


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
    number = error.errno if isinstance(error, OSError) else None
    if found := _OS_ERROR.search(str(error)):
      number = int(found[1])
    if number not in _FULL | _REFUSED | _BROKEN:
      raise  # not a disk failure
    named = getattr(error, "filename", None)
    if number in _FULL:
      advice = "make room there"
    elif number in _REFUSED:
      advice = "allow writing there"
    else:
      advice = "check that the directory exists and its disk works"
    raise StorageError(
      f"{named or os.fspath(path)} cannot be written ({os.strerror(number)});"
      f" {advice}. The same command continues from the newest checkpoint"
    ) from error


def replace_text(path: pathlib.Path, text: str) -> None:
  """Write a file atomically: a reader finds the old text or the new one.

  Raises:
    StorageError: the file could not be written.
  """
  incomplete = path.with_suffix(".incomplete")
  with writing(path):
    incomplete.write_text(text)
    incomplete.replace(path)


class AppendFile:
  """A file that only grows, by whole records.

  Invariant: the file ends with a whole record, because the remains of a failed
  write are cut off. Nothing is buffered, so closing the file writes nothing.

  Threads: one at a time.
  """

  def __init__(self, path: str | os.PathLike[str], num_bytes: int = 0):
    """Open or create the file and cut it to `num_bytes`.

    Raises:
      ValueError: the file is shorter than that.
      StorageError: the file cannot be opened.
    """
    self._path = pathlib.Path(path)
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
      self.num_bytes = self._file.seek(num_bytes)

  def append(self, record: bytes) -> None:
    """Write all of a record, or nothing.

    Raises:
      WorkdirError: the file is no longer at its path.
      StorageError: the disk refused the record.
    """
    workdir_lib.check_in_place(self._path, self._file)
    with writing(self._path):
      try:
        rest = memoryview(record)
        while rest:
          rest = rest[self._file.write(rest) :]
      except OSError:
        self._file.seek(self.num_bytes)
        self._file.truncate()
        raise
    self.num_bytes += len(record)

  def sync(self) -> None:
    """Wait until everything has reached the disk.

    Raises:
      WorkdirError: the file is no longer at its path.
      StorageError: the disk refused it.
    """
    workdir_lib.check_in_place(self._path, self._file)
    with writing(self._path):
      os.fsync(self._file.fileno())

  def close(self) -> None:
    """Close the file."""
    self._file.close()
