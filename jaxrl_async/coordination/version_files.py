"""The files of one version of the weights: sealed, checked, read and removed.

    <copy>/                 Orbax's files
    <copy>/manifest.json    their digests, written last
    <copy>.checked-<host>   what the first reader on a host found
    <copy>.refused          whether a reader has refused it

The first copy of version 7 is called "7". If a reader refuses it, or if it is
removed, the publisher may write another one, which is called "7-2".

Every reader checks that a version is the one it looks for, that no file was
added or lost, and that no file has changed since it was checked. The digests of
the files are checked by one reader on each host, see `storage/shared_check.py`.
"""

import contextlib
import os
import pathlib
import shutil
from typing import Any

from orbax.checkpoint import v1 as ocp

from jaxrl_async.storage import manifest
from jaxrl_async.storage import pytree_files
from jaxrl_async.storage import shared_check

_LONGEST = 300  # characters of an error


def copy_name(version: int, number: int) -> str:
  """Return the name of a copy of a version; the first has number 1."""
  return f"{version}" if number == 1 else f"{version}-{number}"


def version_of(copy: str) -> int:
  """Return the version of a copy with this name."""
  return int(copy.partition("-")[0])


def number_of(copy: str) -> int:
  """Return the number of a copy with this name."""
  return int(copy.partition("-")[2] or 1)


def seal(
  directory: pathlib.Path, named: dict[str, Any], layout: dict[str, str]
) -> None:
  """Seal a version that Orbax has committed.

  Args:
    directory: of the version.
    named: what the version is, by which `read` recognises it.
    layout: of its arrays.
  """
  manifest.write(directory, named | {"layout": layout})


def write_part(path: pathlib.Path, params: Any) -> None:
  """Begin to write this process's parts of a version that process 0 publishes.

  Args:
    path: of the version, as process 0 has told.
    params: the same arrays that process 0 publishes.
  """
  pytree_files.save_async(
    path, pytree_files.named_leaves(params), is_frequent=True
  )


# The marks of the files of a version, as `shared_check` returns them.
Checked = tuple[list[str], list[list[int]]]


def check(
  directory: pathlib.Path, named: dict[str, Any], target: Any
) -> Checked:
  """Check that a version is the one that is looked for, and is whole.

  Args:
    directory: of the version; the publisher does not remove it meanwhile.
    named: as it was given to `seal`.
    target: jax.ShapeDtypeStruct leaves.

  Returns:
    Which files were checked, for `load`.

  Raises:
    ManifestError: it is not what was sealed, or another version, or is gone.
    LayoutError: the arrays are not those of the target.
  """
  checked = _marks(directory)
  try:
    about = manifest.verify(directory, shared_check.record_of(directory))
  except OSError as error:
    raise _unreadable(directory, error) from error
  found = {key: about.get(key) for key in named}
  if found != named:
    raise manifest.ManifestError(f"it is {found}, not {named}")
  pytree_files.check_layout(
    about["layout"], pytree_files.layout(pytree_files.named_leaves(target))
  )
  return checked


def load(directory: pathlib.Path, target: Any, checked: Checked) -> Any:
  """Return the arrays of a version in the target's shardings.

  Args:
    directory: as for `check`.
    target: jax.ShapeDtypeStruct leaves with shardings.
    checked: what `check` has returned.

  Raises:
    ManifestError: a file has changed since it was checked, or cannot be read,
      or was removed before the version was sealed.
  """
  try:
    return pytree_files.load(directory, target)
  except (OSError, ocp.errors.InvalidLayoutError) as error:
    raise _unreadable(directory, error) from error
  finally:
    # Whatever Orbax raises, it is no error of its own if the files are others.
    if _marks(directory) != checked:
      raise manifest.ManifestError(f"{directory} has changed while it was read")


def _marks(directory: pathlib.Path) -> Checked:
  """Return what differs if a file is added, lost, replaced or changed."""
  try:
    return shared_check.marks(directory)
  except OSError as error:
    raise _unreadable(directory, error) from error


def _unreadable(
  directory: pathlib.Path, error: Exception
) -> manifest.ManifestError:
  reason = " ".join(str(error).split())[:_LONGEST]
  return manifest.ManifestError(f"{directory} cannot be read ({reason})")


def mark_refused(directory: pathlib.Path) -> None:
  """Leave a mark that a reader has refused a version, if that is possible."""
  with contextlib.suppress(OSError):
    _mark(directory).touch()


def is_refused(directory: pathlib.Path) -> bool:
  """Return whether a reader has left its mark."""
  return os.path.exists(_mark(directory))


def _mark(directory: pathlib.Path) -> pathlib.Path:
  return directory.with_name(f"{directory.name}.refused")


def remove(directory: pathlib.Path) -> None:
  """Remove a version that nobody reads, with its records."""
  shared_check.remove_records(directory)
  _mark(directory).unlink(missing_ok=True)
  shutil.rmtree(directory)
