"""A packed batch on the devices, made from its segments part by part.

Each part is one array for the rows of one device. It is filled on the host,
sent and released before the next one, so that the host never holds the whole
batch. With several processes, each makes the parts of its own devices.
"""

import collections
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxrl_async.training import packing
from jaxrl_async.training import segments as segments_lib


def placed(
  segments: segments_lib.Segments, sharding: NamedSharding
) -> packing.PackedBatch:
  """Return the packed arrays on the devices.

  Args:
    segments: at least those in the rows of this process's devices.
  """
  shape = segments.shape
  holders = collections.defaultdict(list)
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    holders[_bounds(index, shape)].append(device)
  parts: dict[str, list[jax.Array]] = {name: [] for name in segments.names}
  for bounds, devices in holders.items():
    for name, filled in segments.filled(bounds):
      sent = [jax.device_put(filled, device) for device in devices]
      # The transfers end before the next part is filled.
      parts[name] += jax.block_until_ready(sent)
      del filled, sent
  return packing.packed_batch(
    {
      name: jax.make_array_from_single_device_arrays(
        shape, sharding, arrays, dtype=segments_lib.dtype_of(name)
      )
      for name, arrays in parts.items()
    }
  )


def abstract(
  segments: segments_lib.Segments, sharding: NamedSharding
) -> packing.PackedBatch:
  """Return the shapes and shardings of what `placed` returns."""
  return packing.packed_batch(
    {
      name: jax.ShapeDtypeStruct(
        segments.shape, segments_lib.dtype_of(name), sharding=sharding
      )
      for name in segments.names
    }
  )


def rows_of_processes(
  shape: tuple[int, ...], sharding: NamedSharding
) -> dict[int, list[int]]:
  """Return which rows of a microbatch each process has a device for.

  The keys are the indices of processes that have devices of the sharding.
  """
  rows: dict[int, set[int]] = collections.defaultdict(set)
  for device, index in sharding.devices_indices_map(shape).items():
    begin, end = _bounds(index, shape)[2]
    rows[device.process_index].update(range(begin, end))
  return {process: sorted(here) for process, here in rows.items()}


def _bounds(index: Any, shape: tuple[int, ...]) -> segments_lib.Bounds:
  """Return begin and end along each axis of a device's part."""
  whole = (*(index or ()), *(slice(None),) * (len(shape) - len(index or ())))
  return tuple(
    part.indices(size)[:2] for part, size in zip(whole, shape, strict=True)
  )
