"""Pytrees of arrays on disk through Orbax, a name per leaf.

What is stored is a flat dict from leaf name ("layers.0.query") to array, so any
container JAX knows as a pytree goes in and comes out, and reading into another
container with the same names works. Reading goes straight into the target's
shardings, whatever mesh the tree was written from; dtypes and shapes must be
those that were written, since Orbax would cast in silence.

Threads: any number may save and load at once, over this module alone.
"""

from collections.abc import Callable
import pathlib
import threading
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

# Orbax counts operations per process and takes the latest number for its own.
# Two that start at once wait for each other's directories: a save lost its own
# while another thread loaded. All that a save does after `save_async` returned
# goes by the number it began with.
_STARTING = threading.Lock()


class LayoutError(ValueError):
  """Two pytrees differ in names, shapes or dtypes; names the first leaf."""


def named_leaves(tree: Any) -> dict[str, Any]:
  """The leaves by name, in the order of `jax.tree.leaves`.

  Raises:
    LayoutError: a leaf is not an array, or two leaves have one name.
  """
  named: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
      raise LayoutError(f"{name} is a {type(leaf).__name__}, not an array")
    if name in named:
      raise LayoutError(f"{name} names two leaves")
    named[name] = leaf
  return named


def layout(named: dict[str, Any]) -> dict[str, str]:
  """Dtype and shape of every leaf, as JSON: {"layers.0.query": "float32[2]"}.

  Args:
    named: what `named_leaves` returned.
  """
  return {
    name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    for name, leaf in named.items()
  }


def check_layout(found: dict[str, str], expected: dict[str, str]) -> None:
  """Raise a LayoutError that names the first leaf in which the two differ."""
  for name in sorted(found.keys() | expected.keys()):
    here, wanted = found.get(name, "nothing"), expected.get(name, "nothing")
    if here != wanted:
      raise LayoutError(f"{name} is {here}, expected {wanted}")


def save_async(path: pathlib.Path, named: dict[str, Any]) -> Callable[[], None]:
  """Start to write; the arrays may be let go of when this returns.

  Without Orbax's sharding file, which only a reader without a target needs: it
  costs 20 ms of the 80 ms that a small model takes.

  Returns:
    What waits until Orbax has committed `path`, by one rename, or raises.
  """
  context = ocp.Context()
  context.array.saving.enable_write_sharding_file = False
  with _STARTING, context:
    return ocp.save_async(str(path), named).result


def load(
  path: pathlib.Path,
  target: Any,
  *,
  stored_as: Callable[[str], str] = lambda name: name,
) -> Any:
  """Read into the structure, dtypes and shardings of the target.

  Args:
    path: what `save_async` wrote.
    target: jax.ShapeDtypeStruct leaves with shardings. The caller has checked
      their layout against the one that was written.
    stored_as: from a leaf's name in the target to its name on the disk.
  """
  named = {stored_as(name): leaf for name, leaf in named_leaves(target).items()}
  with _STARTING:
    loaded: Any = ocp.load(str(path), named)
  # In the order in which `named` has them, which is that of the target.
  leaves = [loaded[name] for name in named]
  return jax.tree.unflatten(jax.tree.structure(target), leaves)
