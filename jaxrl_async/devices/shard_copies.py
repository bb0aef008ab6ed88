"""Copies of arrays to a mesh that may split them differently.

`jax.device_put` copies from device to device if every shard that the other mesh
wants is a shard of the array. If not, it puts the whole array together in the
host's memory, through NumPy and in one thread.

Here the work has two halves. `regrouped` makes the wanted shards on the devices
that have the array. It cuts the array's shards, brings the pieces of a wanted
shard to one device, and joins them there. No shard is made twice, and the
shards are dealt out so that each device makes about as many bytes as the
others. `copied` then copies each shard to every device that wants it.

`regrouped` runs programs, but each on a single device. A reshard by collectives
would be one program on all of them, which only one thread may start. It would
also give each device a copy of an array that the other mesh does not split, and
for some pairs of shardings XLA copies the whole array to each device on the way
(docs/project/notebook.md, "Weight transfer").

A program starts when its device has ended what it was given before. If that may
be a train step, the thread that trains should call `regrouped` before it begins
the step. `copied` runs no program, so any thread may call it.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Sharding

# Where a part of an array begins, on each axis.
_Start = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Regrouped:
  """An array as the shards of another sharding, still on its own devices.

  Attributes:
    shape: of the whole array.
    shards: one for each device of the other sharding, in its order. Devices
      that hold copies share one.
  """

  shape: tuple[int, ...]
  shards: list[jax.Array]


def put(tree: Any, shardings: Any) -> Any:
  """Return arrays in other shardings; those in place are returned as they are.

  Args:
    tree: arrays of this process alone, on devices or of NumPy.
    shardings: of the same structure.
  """
  arrays, structure = jax.tree.flatten(tree)
  wanted = structure.flatten_up_to(shardings)
  return jax.tree.unflatten(
    structure, copied(regrouped(arrays, wanted), wanted)
  )


def regrouped(
  arrays: Sequence[Any], shardings: Sequence[Sharding]
) -> list[Any]:
  """Make the shards of other shardings on the devices that have the arrays.

  Args:
    arrays: as in `put`. They stay as they are, and a shard that is wanted may
      share their memory.
    shardings: one for each array.

  Returns:
    What `copied` takes. Arrays that have the wanted shards, and those of NumPy,
    are returned as they are. The others become a `Regrouped`.
  """
  made_bytes: collections.Counter[Any] = collections.Counter()
  return [
    _regrouped(x, sharding, made_bytes) if _is_split_unlike(x, sharding) else x
    for x, sharding in zip(arrays, shardings, strict=True)
  ]


def copied(
  arrays: Sequence[Any], shardings: Sequence[Sharding]
) -> list[jax.Array]:
  """Return what `regrouped` has made in the shardings, and run no program.

  What is on the right device already is not copied.
  """
  places = [
    list(sharding.devices_indices_map(x.shape))
    if isinstance(x, Regrouped)
    else sharding
    for x, sharding in zip(arrays, shardings, strict=True)
  ]
  shards = [x.shards if isinstance(x, Regrouped) else x for x in arrays]
  # A single call for all arrays takes a fraction of the time.
  return [
    jax.make_array_from_single_device_arrays(x.shape, sharding, there)
    if isinstance(x, Regrouped)
    else there
    for x, sharding, there in zip(
      arrays, shardings, jax.device_put(shards, places), strict=True
    )
  ]


def _is_split_unlike(array: Any, sharding: Sharding) -> bool:
  """Return whether the sharding has shards that the array does not have.

  All shards of an array have one shape, and they begin at multiples of it.
  """
  if not isinstance(array, jax.Array):
    return False
  shape = array.shape
  return array.sharding.shard_shape(shape) != sharding.shard_shape(shape)


def _regrouped(
  array: jax.Array,
  sharding: Sharding,
  made_bytes: collections.Counter[Any],
) -> Regrouped:
  """Make the shards of a sharding that splits the array differently.

  Args:
    array: all of its shards are in this process.
    sharding: the wanted one.
    made_bytes: of wanted shards, by device, so far; it is updated.
  """
  held = array.sharding.shard_shape(array.shape)
  wanted = sharding.shard_shape(array.shape)
  # A piece begins wherever a shard of either sharding does.
  points = [
    sorted({*range(0, size, x), *range(0, size, y)})
    for size, x, y in zip(array.shape, held, wanted, strict=True)
  ]
  copies: dict[_Start, list[jax.Array]] = collections.defaultdict(list)
  for shard in array.addressable_shards:
    copies[_start(shard.index)].append(shard.data)
  pieces: dict[_Start, jax.Array] = {}
  for start, shards in copies.items():
    inside = _inside(points, start, held)
    shard = min(shards, key=lambda x: made_bytes[x.device])
    cuts = tuple(
      tuple(x - low for x in xs[1:])
      for xs, low in zip(inside, start, strict=True)
    )
    cut = _cut(shard, cuts) if any(cuts) else [shard]
    pieces |= zip(itertools.product(*inside), cut, strict=True)
  made: dict[_Start, jax.Array] = {}
  indices = sharding.devices_indices_map(array.shape).values()
  for start in map(_start, indices):
    if start not in made:
      inside = _inside(points, start, wanted)
      parts = [pieces[x] for x in itertools.product(*inside)]
      device = min((x.device for x in parts), key=lambda x: made_bytes[x])
      grid = tuple(len(xs) for xs in inside)
      parts = jax.device_put(parts, device)
      made[start] = _joined(parts, grid) if len(parts) > 1 else parts[0]
      made_bytes[device] += made[start].nbytes
  return Regrouped(array.shape, [made[start] for start in map(_start, indices)])


def _start(index: tuple[slice, ...]) -> _Start:
  return tuple(x.start or 0 for x in index)


def _inside(
  points: list[list[int]], start: _Start, shape: tuple[int, ...]
) -> list[list[int]]:
  """Return the points of each axis that lie in the shard that begins there."""
  return [
    [x for x in xs if low <= x < low + size]
    for xs, low, size in zip(points, start, shape, strict=True)
  ]


@functools.partial(jax.jit, static_argnames="cuts")
def _cut(
  shard: jax.Array, cuts: tuple[tuple[int, ...], ...]
) -> list[jax.Array]:
  """Return the pieces of a shard that is cut on each axis, in row-major order.

  Args:
    shard: on one device.
    cuts: where each axis is cut.
  """
  pieces = [shard]
  for axis, places in enumerate(cuts):
    pieces = [x for piece in pieces for x in jnp.split(piece, places, axis)]
  return pieces


@functools.partial(jax.jit, static_argnames="grid")
def _joined(pieces: list[jax.Array], grid: tuple[int, ...]) -> jax.Array:
  """Join pieces, the reverse of `_cut`.

  Args:
    pieces: on one device, in row-major order.
    grid: number of pieces along each axis.
  """
  dtype = pieces[0].dtype
  # As bits, because XLA's CPU backend joins bfloat16 as float32, which changes
  # the payload of NaNs.
  bits = jnp.dtype(f"uint{8 * dtype.itemsize}")
  pieces = [jax.lax.bitcast_convert_type(x, bits) for x in pieces]
  for axis in reversed(range(len(grid))):
    size = grid[axis]
    pieces = [
      jnp.concatenate(pieces[i : i + size], axis)
      for i in range(0, len(pieces), size)
    ]
  (whole,) = pieces
  return jax.lax.bitcast_convert_type(whole, dtype)
