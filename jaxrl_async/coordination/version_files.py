"""The files of one version of the weights: sealed, checked and read.

    <version>/                 Orbax's files
    <version>/manifest.json    their digests, written last

A reader checks the digests, and that the version is the one it looks for,
before it reads the arrays. So a version that is torn, or of another run, is
never adopted: its reader fails.
"""

import pathlib
from typing import Any

from orbax.checkpoint import v1 as ocp

from jaxrl_async.storage import manifest
from jaxrl_async.storage import pytree_files

_LONGEST = 300  # characters of an error


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


def read(directory: pathlib.Path, named: dict[str, Any], target: Any) -> Any:
  """Check a version, and return its arrays in the target's shardings.

  Args:
    directory: of the version; the publisher does not remove it meanwhile.
    named: as it was given to `seal`.
    target: jax.ShapeDtypeStruct leaves with shardings.

  Raises:
    ManifestError: it is not what was sealed, or another version, or is gone.
    LayoutError: the arrays are not those of the target.
  """
  try:
    about = manifest.verify(directory)
    found = {key: about.get(key) for key in named}
    if found != named:
      raise manifest.ManifestError(f"it is {found}, not {named}")
    pytree_files.check_layout(
      about["layout"], pytree_files.layout(pytree_files.named_leaves(target))
    )
    return pytree_files.load(directory, target)
  except (OSError, ocp.errors.InvalidLayoutError) as error:
    reason = " ".join(str(error).split())[:_LONGEST]
    raise manifest.ManifestError(
      f"{directory} cannot be read ({reason})"
    ) from error
