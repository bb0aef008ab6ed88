"""Checks that a directory can be read or written, before a run needs it."""

import os
import pathlib
import tempfile
import unicodedata

from jaxrl_async.config import sections
from jaxrl_async.storage import manifest

_OWN_BYTES = 512  # bytes that a run may append to the path of a directory


def check_can_write(field: str, directory: str) -> None:
  """Check that a directory exists or can be created, and accepts files.

  Nothing is left behind: a missing directory is not created.

  Args:
    field: of the config, for messages.
    directory: its path, absolute or relative.

  Raises:
    ConfigError: it cannot be written to; the message says why.
  """

  def refuse(reason: str):
    raise sections.ConfigError(f"{field}: {sections.shown(directory)} {reason}")

  path, name_bytes = _absolute(field, directory)
  # A dangling link counts as existing, since nothing can be created in its
  # place.
  there = next(p for p in (path, *path.parents) if os.path.lexists(p))
  if not os.path.isdir(there):
    refuse("cannot be a directory" if there != path else "is not a directory")
  for place in (path.resolve(), *path.resolve().parents):
    if manifest.is_sealed(place):
      refuse(
        f"cannot be written to, because {place} is a checkpoint, or parameters,"
        " to which nothing can be added; use another directory, such as the"
        " workdir of its run"
      )
  longest = os.pathconf(there, "PC_NAME_MAX")
  if name_bytes > longest:
    refuse(f"has a name of {name_bytes} bytes; use at most {longest}")
  try:
    # Permissions are not enough: the file system may be full or read-only.
    with tempfile.TemporaryDirectory(prefix=".jaxrl_async-", dir=there):
      pass
  except OSError as error:
    refuse(f"cannot be written to ({error.strerror})")


def check_can_read(field: str, directory: str, use: str) -> None:
  """Check that a directory exists.

  Args:
    field: of the config, for messages.
    directory: its path, absolute or relative.
    use: what to do otherwise, the end of the message.

  Raises:
    ConfigError: it does not exist.
  """
  path, _ = _absolute(field, directory)
  sections.require(
    os.path.isdir(path),
    field,
    f"{sections.shown(directory)} is not a directory; {use}",
  )


def _absolute(field: str, directory: str) -> tuple[pathlib.Path, int]:
  """Return the absolute path, and the bytes of the longest name in it."""
  what = sections.shown(directory)
  sections.require(directory != "", field, "'' is not a directory")
  longest = os.pathconf("/", "PC_PATH_MAX") - _OWN_BYTES
  too_long = f"{what} is too long a path; use at most {longest} bytes"
  sections.require(len(directory) <= longest, field, too_long)
  # The library that writes arrays accepts UTF-8 paths only, and no operating
  # system accepts a NUL.
  odd = [c for c in directory if unicodedata.category(c) in ("Cc", "Cs")]
  sections.require(
    not odd, field, f"{what} has a character that paths may not have: {odd[:1]}"
  )
  path = pathlib.Path(directory).absolute()
  sections.require(len(os.fsencode(path)) <= longest, field, too_long)
  return path, max(len(os.fsencode(part)) for part in path.parts)
