"""Where checkpoints lie in their directory, and how readers hold them there.

A checkpoint is a directory named by its step. While another one takes its
place, it is called `<step>.old`. A reader holds a shared lock on the manifest,
and the writer removes only what it can lock exclusively.
"""

from collections.abc import Iterator
import contextlib
import fcntl
import logging
import os
import pathlib
import shutil
from typing import IO

from jaxrl_async.config import sections
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest

OLD = ".old"


class CheckpointError(sections.ConfigError):
  """A checkpoint cannot be written or read; the message is one line."""


def names(directory: pathlib.Path) -> list[str]:
  """Return the names in a directory, which need not exist.

  Raises:
    CheckpointError: the directory exists but cannot be read.
  """
  try:
    return sorted(os.listdir(directory))
  except FileNotFoundError:
    if directory.is_symlink():
      raise CheckpointError(
        f"{directory} is a link to {os.readlink(directory)}, which does not"
        " exist; is its disk mounted?"
      ) from None
    return []
  except OSError as error:
    raise CheckpointError(
      f"{directory} cannot be read ({error.strerror})"
    ) from error


def path_of(directory: pathlib.Path, step: int) -> pathlib.Path:
  """Return the path of a checkpoint.

  A crash may have left it complete but under the name `<step>.old`.
  """
  path = pathlib.Path(directory).absolute() / str(step)
  aside = path.with_suffix(OLD)
  return aside if not path.exists() and aside.exists() else path


def is_at(path: pathlib.Path, lock: IO[bytes]) -> bool:
  """Return whether the checkpoint at a path still has this open manifest."""
  try:
    found = os.stat(path / manifest.NAME)
  except FileNotFoundError:
    return False
  return os.path.samestat(found, os.fstat(lock.fileno()))


def lock_manifest(manifest_file: IO[bytes], how: int) -> bool:
  """Lock a manifest; return False if another process holds it.

  On a file system without locks the result is True. Readers then rely on
  `read_newest`, which reads again if a checkpoint has vanished.
  """
  try:
    fcntl.flock(manifest_file, how)
  except BlockingIOError:
    return False
  except OSError:
    return True
  return True


def remove_unread(path: pathlib.Path) -> None:
  """Remove a checkpoint unless a process reads it.

  In that case a later `save` removes it.
  """
  with open(path / manifest.NAME, "r+b") as lock:
    if lock_manifest(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
      remove(path)


def remove(path: pathlib.Path) -> None:
  """Remove a checkpoint."""
  # The rename comes first, so that a half-removed directory does not look like
  # a checkpoint.
  shutil.rmtree(path.rename(path.with_suffix(".removed")))


def steps(directory: pathlib.Path) -> list[int]:
  """Return the steps that have a sealed checkpoint, in ascending order."""
  found = {name.removesuffix(OLD) for name in names(directory)}
  return sorted(
    int(step)
    for step in found
    if step.isdecimal()
    and (path_of(directory, int(step)) / manifest.NAME).exists()
  )


def recover(directory: pathlib.Path) -> None:
  """Rename back a complete checkpoint that a crash left as `<step>.old`.

  That happens if the writer is killed between its two renames. Only the process
  that writes may call this function. Readers find the checkpoint under either
  name.
  """
  for replaced in directory.glob(f"*{OLD}"):
    if not replaced.with_suffix("").exists():
      replaced.rename(replaced.with_suffix(""))


def make_ready(directory: pathlib.Path) -> None:
  """Create the directory, or remove what a crash has left in it."""
  if not directory.is_dir():
    directory.mkdir(parents=True)
    disk.sync_names(directory.parent)
  recover(directory)
  for leftover in directory.glob("*.incomplete"):
    shutil.rmtree(leftover)
  for leftover in directory.glob("*.removed"):
    with _staying():
      shutil.rmtree(leftover)
  for replaced in directory.glob(f"*{OLD}"):
    with _staying():
      remove(replaced)


def put_in_place(directory: pathlib.Path, step: int, keep: int) -> None:
  """Give a sealed checkpoint its name, and remove all but the newest ones."""
  target, replaced = directory / str(step), directory / f"{step}{OLD}"
  if target.exists():
    target.rename(replaced)
  (directory / f"{step}.incomplete").rename(target)
  disk.sync_names(directory)
  if replaced.exists():
    with _staying():
      remove(replaced)
  for old in steps(directory)[:-keep]:
    with _staying():
      remove_unread(directory / str(old))


@contextlib.contextmanager
def _staying() -> Iterator[None]:
  """Let an old checkpoint stay that cannot be removed, until the next save.

  The new one is on the disk, and does not fail because of it.
  """
  try:
    yield
  except OSError as error:
    logging.warning("an old checkpoint could not be removed: %s", error)
