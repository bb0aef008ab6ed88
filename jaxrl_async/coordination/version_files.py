"""The files of one version of the weights: sealed, checked, read and removed.

    <version>/                 Orbax's files
    <version>/manifest.json    their digests, written last
    <version>.checked-<host>   what the first reader on a host found

Every reader checks that a version is the one it looks for, that no file was
added or lost, and that no file has changed since it was checked. The digests of
the files are checked by one reader on each host, see `storage/shared_check.py`.
"""

import pathlib
import shutil
from typing import Any

from jaxrl_async.storage import manifest
from jaxrl_async.storage import pytree_files
from jaxrl_async.storage import shared_check


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
  pytree_files.save_async(path, pytree_files.named_leaves(params))


# The identities of the files of a version, as `shared_check` returns them.
Checked = list[list[int]]


def check(
  directory: pathlib.Path, named: dict[str, Any], target: Any
) -> Checked:
  """Check that a version is the one that is looked for, and is whole.

  Args:
    directory: of the version; nobody removes it meanwhile.
    named: as it was given to `seal`.
    target: jax.ShapeDtypeStruct leaves.

  Returns:
    Which files were checked, for `read`.

  Raises:
    ManifestError: it is not what was sealed, or another version.
    LayoutError: the arrays are not those of the target.
  """
  checked = _identities(directory)
  about = manifest.verify(directory, shared_check.record_of(directory))
  found = {key: about[key] for key in named}
  if found != named:
    raise manifest.ManifestError(f"it is {found}, not {named}")
  pytree_files.check_layout(
    about["layout"], pytree_files.layout(pytree_files.named_leaves(target))
  )
  return checked


def read(directory: pathlib.Path, checked: Checked, target: Any) -> Any:
  """Return the arrays of a version in the target's shardings.

  Args:
    directory: of the version; nobody removes it meanwhile.
    checked: what `check` has returned.
    target: jax.ShapeDtypeStruct leaves with shardings.

  Raises:
    ManifestError: a file has changed since it was checked.
  """
  arrays = pytree_files.load(directory, target)
  if _identities(directory) != checked:
    raise manifest.ManifestError(f"{directory} has changed while it was read")
  return arrays


def _identities(directory: pathlib.Path) -> Checked:
  files = sorted(path for path in directory.rglob("*") if path.is_file())
  return shared_check.identities(files)


def remove(directory: pathlib.Path) -> None:
  """Remove a version that nobody reads, with its records."""
  shared_check.remove_records(directory)
  shutil.rmtree(directory)
