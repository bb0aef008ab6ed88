"""Whether a directory can be read from or written to, before a run needs it."""

import os
import pathlib
import tempfile
import unicodedata

from jaxrl_async.config import sections

_OWN_BYTES = 512  # of a path: what a run itself adds to a directory's


def check_can_write(field: str, directory: str) -> None:
  """Checks that a directory is there, or can be made, and takes files.

  Nothing is left behind: the directory itself is not made.

  Raises:
    ConfigError: it cannot be; the line says what stands in the way.
  """

  def refuse(reason: str):
    raise sections.ConfigError(f"{field}: {sections.shown(directory)} {reason}")

  path, name_bytes = _absolute(field, directory)
  # A link to nowhere exists, and nothing can be made in its place.
  there = next(p for p in (path, *path.parents) if os.path.lexists(p))
  if not os.path.isdir(there):
    refuse("cannot be a directory" if there != path else "is not a directory")
  longest = os.pathconf(there, "PC_NAME_MAX")
  if name_bytes > longest:
    refuse(f"has a name of {name_bytes} bytes; use at most {longest}")
  try:
    # Permissions do not say all: the file system may be full or read-only.
    with tempfile.TemporaryDirectory(prefix=".jaxrl_async-", dir=there):
      pass
  except OSError as error:
    refuse(f"cannot be written to ({error.strerror})")


def check_can_read(field: str, directory: str, use: str) -> None:
  """Checks that a directory is there.

  Raises:
    ConfigError: it is not; the line ends with `use`.
  """
  path, _ = _absolute(field, directory)
  sections.require(
    os.path.isdir(path),
    field,
    f"{sections.shown(directory)} is not a directory; {use}",
  )


def _absolute(field: str, directory: str) -> tuple[pathlib.Path, int]:
  """The absolute path, and the bytes of the longest name in it."""
  what = sections.shown(directory)
  sections.require(directory != "", field, "'' is not a directory")
  longest = os.pathconf("/", "PC_PATH_MAX") - _OWN_BYTES
  too_long = f"{what} is too long a path; use at most {longest} bytes"
  sections.require(len(directory) <= longest, field, too_long)
  # What writes arrays takes paths of UTF-8 only; a NUL no system takes.
  odd = [c for c in directory if unicodedata.category(c) in ("Cc", "Cs")]
  sections.require(
    not odd, field, f"{what} has a character that paths may not have: {odd[:1]}"
  )
  path = pathlib.Path(directory).absolute()
  sections.require(len(os.fsencode(path)) <= longest, field, too_long)
  return path, max(len(os.fsencode(part)) for part in path.parts)
