"""Directories of this user alone, also where all users may make directories.

In /tmp and /dev/shm another user can make a directory, or a link to one, before
this process does. Whoever owns a directory decides what is in it. The sticky
bit of both keeps others from renaming or removing what they do not own.
"""

import contextlib
import os
import pathlib
import stat
import tempfile

from jaxrl_async.storage import disk


def is_own(path: pathlib.Path) -> bool:
  """Return whether a directory is there, is no link, and is this user's."""
  try:
    found = os.lstat(path)
  except OSError:
    return False
  return stat.S_ISDIR(found.st_mode) and found.st_uid == _own_id(path.parent)


def _own_id(directory: pathlib.Path) -> int:
  """Return the user to whom what this process makes in a directory belongs.

  A server of files may give what root makes to nobody.
  """
  try:
    with tempfile.TemporaryFile(dir=directory) as file:
      return os.fstat(file.fileno()).st_uid
  except OSError:
    return os.geteuid()


def check(path: pathlib.Path) -> None:
  """Check that a directory is this user's, if there is anything of its name.

  Raises:
    StorageError: it is somebody else's, or no directory.
  """
  if os.path.lexists(path) and not is_own(path):
    raise disk.StorageError(
      f"{path} belongs to another user, or is no directory; remove it, or"
      " choose another one"
    )


def make(path: pathlib.Path) -> None:
  """Make a directory that only this user can read, unless it is there already.

  Raises:
    StorageError: it is somebody else's, or no directory.
    OSError: it cannot be made.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with contextlib.suppress(FileExistsError):
    path.mkdir(mode=0o700)
  check(path)
  if path.stat().st_mode & 0o077:
    path.chmod(0o700)
