"""Pytrees of arrays on disk, written by Orbax under one name per leaf.

A tree is stored as a flat dict from leaf names such as "layers.0.query" to
arrays. Any container that JAX knows as a pytree can be stored, and a tree can
be read into a different container whose leaves have the same names. Arrays are
read directly into the shardings of the target, whatever mesh the tree was
written from. Dtypes and shapes must be those that were written, since Orbax
would cast silently.

With several processes under jax.distributed, all of them save and load a tree
together, in one order, and each its own parts of the arrays. Process 0 commits
what all have written. A save or load begins when the save before it is
committed, because in each process Orbax may be at another point of it.

Threads: any number may save and load at the same time, as long as all of them
use this module. With several processes only the main threads may.
"""

from collections.abc import Callable
import logging
import pathlib
import threading
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

# Orbax numbers its operations per process, and an operation assumes that the
# latest number is its own. Two operations that start at once can therefore wait
# for each other's directories; a save once lost its directory to a load on
# another thread. The lock covers the start only: after `save_async` has
# returned, a save keeps using the number it started with.
_STARTING = threading.Lock()
# Orbax gives up on a save after 20 minutes by the time of day. That is too
# short for a large one on a slow disk, and a clock that is set meanwhile may
# jump by more. Ten years; whoever waits notices a save that hangs.
_NO_LIMIT_S = 10 * 365 * 86_400
# File systems on a network take about a millisecond for each file.
_MOST_FILES = 2000
# The saves that several processes have begun, and that are to be awaited.
_waits: list["_Wait"] = []


# At each save in files of their own, Orbax warns that there are no others to
# put together.
logging.getLogger("absl").addFilter(
  lambda record: "Skipping merge of OCDBT" not in record.getMessage()
)


class LayoutError(ValueError):
  """Two pytrees differ in names, shapes or dtypes; it names the first leaf."""


def named_leaves(tree: Any) -> dict[str, Any]:
  """Return the leaves by name, in the order of `jax.tree.leaves`.

  Raises:
    LayoutError: a leaf is not an array, or two leaves have the same name.
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
  """Return dtype and shape of each leaf: {"layers.0.query": "float32[2]"}.

  The result can be stored as JSON.

  Args:
    named: the result of `named_leaves`.
  """
  return {
    name: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    for name, leaf in named.items()
  }


def check_layout(found: dict[str, str], expected: dict[str, str]) -> None:
  """Raise a LayoutError that names the first leaf where the two differ."""
  for name in sorted(found.keys() | expected.keys()):
    here, wanted = found.get(name, "nothing"), expected.get(name, "nothing")
    if here != wanted:
      raise LayoutError(f"{name} is {here}, expected {wanted}")


def save_async(
  path: pathlib.Path,
  named: dict[str, Any],
  *,
  is_frequent: bool = False,
) -> Callable[[], None]:
  """Start to write a tree; the arrays may be donated when this returns.

  By then Orbax has copied them from their devices into ordinary memory. Arrays
  that lie in the host's memory already, such as offloaded moments, are copied
  here, because Orbax would not.

  Orbax's sharding file is not written. Only a reader without a target needs it,
  and it takes 20 ms of the 80 ms that saving a small model takes.

  If there are not too many, each shard gets a file of its own. In the format in
  which Orbax puts many into a few files, TensorStore keeps all of them in
  memory until the end: 1.5 GB instead of 0.2 for a train state of 1.5 GB. It
  also keeps 2 kB for each array that is written or read, and does not free it
  (docs/project/results.md, "Killed and disturbed").

  Args:
    path: where to write.
    named: the result of `named_leaves`.
    is_frequent: whether this is done thousands of times in a process.

  Returns:
    A function that waits until Orbax has committed `path` by one rename, and
    raises if that failed.
  """
  context = _context()
  context.array.saving.enable_write_sharding_file = False
  if jax.process_count() == 1:
    in_few_files = _num_shards(named) > _MOST_FILES
    context.array.saving.use_ocdbt = in_few_files
    context.array.saving.use_zarr3 = in_few_files  # else it warns when it loads
  named = {n: _copied(x) if _is_on_host(x) else x for n, x in named.items()}
  _wait_for_others()
  with _STARTING, context:
    wait = ocp.save_async(str(path), named).result
  if jax.process_count() > 1:
    wait = _Wait(wait, is_long=not is_frequent)
    _waits.append(wait)
  return wait


class _Wait:
  """Waits until a save of several processes is committed.

  Attributes:
    is_long: whether others had better do something else meanwhile.
    is_over: whether somebody has waited for it to the end.
  """

  def __init__(self, wait: Callable[[], None], *, is_long: bool):
    self.is_long = is_long
    self.is_over = False
    self._wait = wait

  def __call__(self) -> None:
    try:
      self._wait()
    finally:
      self.is_over = True


def is_held_up() -> bool:
  """Return whether the next save would wait for a large one of all processes.

  A save of a single process never waits.
  """
  return any(wait.is_long and not wait.is_over for wait in _waits)


def load(
  path: pathlib.Path,
  target: Any,
  *,
  stored_as: Callable[[str], str] = lambda name: name,
  is_partial: bool = False,
) -> Any:
  """Read a tree into the structure, dtypes and shardings of the target.

  Args:
    path: the path given to `save_async`.
    target: jax.ShapeDtypeStruct leaves with shardings. The caller has checked
      that their layout equals the one that was written.
    stored_as: from a leaf's name in the target to its name on the disk.
    is_partial: whether the target may lack some of the stored arrays, which are
      then not read.
  """
  named = {stored_as(name): leaf for name, leaf in named_leaves(target).items()}
  context = _context()
  context.pytree.loading.partial_load = is_partial
  _wait_for_others()
  with _STARTING, context:
    loaded: Any = ocp.load(str(path), named)
  # In the order in which `named` has them, which is that of the target.
  leaves = [loaded[name] for name in named]
  return jax.tree.unflatten(jax.tree.structure(target), leaves)


def _is_on_host(leaf: Any) -> bool:
  """Return whether an array of an accelerator lies in the host's memory."""
  if not isinstance(leaf, jax.Array):
    return False  # Orbax copies arrays of numpy
  kinds = {d.default_memory().kind for d in leaf.sharding.addressable_devices}
  return leaf.sharding.memory_kind not in {None, *kinds}


def _copied(leaf: jax.Array) -> jax.Array:
  """Return a copy of this process's shards, in the same kind of memory."""
  shards = [
    jax.device_put(shard.data, shard.data.sharding, may_alias=False)
    for shard in leaf.addressable_shards
  ]
  copy = jax.make_array_from_single_device_arrays(
    leaf.shape, leaf.sharding, shards
  )
  return jax.block_until_ready(copy)


def _num_shards(named: dict[str, Any]) -> int:
  return sum(
    leaf.sharding.num_devices if isinstance(leaf, jax.Array) else 1
    for leaf in named.values()
  )


def _context() -> ocp.Context:
  """Return the settings of a save or load by all processes."""
  context = ocp.Context()
  context.asynchronous.timeout_secs = _NO_LIMIT_S
  if jax.process_count() > 1:
    # By default Orbax waits for the others with programs on all devices, also
    # from threads of its own. If it is told who they are, it sends messages.
    context.multiprocessing.active_processes = set(range(jax.process_count()))
  else:
    # If a thread of Orbax fails to create the directory, its other threads wait
    # for that for 300 s, and keep the process from ending.
    context.asynchronous.create_directories_asynchronously = False
  return context


def _wait_for_others() -> None:
  while _waits:
    _waits.pop()()
