"""Cuts the devices into a train and a rollout slice; maps logical axes.

Every parameter names its axes ("embed", "heads", ...); `ShardingRules` says
which mesh axis each of them is split over, and this file alone knows both.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

AXES = ("data", "fsdp", "tensor")
MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
  """Mesh axis (or axes) of each logical axis; None is replicated."""

  batch: MeshAxes = ("data", "fsdp")
  layers: MeshAxes = None
  vocab: MeshAxes = "tensor"
  embed: MeshAxes = "fsdp"
  heads: MeshAxes = "tensor"
  kv_heads: MeshAxes = "tensor"
  head: MeshAxes = None
  mlp: MeshAxes = "tensor"

  def spec(self, logical_axes: Sequence[str | None]) -> P:
    """Partition spec of an array with these logical axes.

    Raises:
      ValueError: two of its axes would be split over the same mesh axis.
    """
    mesh_axes = [
      None if axis is None else getattr(self, axis) for axis in logical_axes
    ]
    used = [
      name
      for axes in mesh_axes
      if axes is not None
      for name in ((axes,) if isinstance(axes, str) else axes)
    ]
    if len(used) != len(set(used)):
      raise ValueError(
        f"axes {tuple(logical_axes)} map to {mesh_axes}: one mesh axis cannot"
        " split two axes of the same array"
      )
    return P(*mesh_axes)


TRAIN_RULES = ShardingRules()
# Decoding reads every weight for every token: nothing is gathered over fsdp.
ROLLOUT_RULES = ShardingRules(embed=None, batch="data")


def _mesh(devices: Sequence[Any], shape: tuple[int, int, int]) -> Mesh:
  return Mesh(
    np.asarray(devices, dtype=object).reshape(shape),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
  )


def cut_devices(
  devices: Sequence[Any],
  *,
  train_shape: tuple[int, int, int],
  rollout_shape: tuple[int, int, int],
) -> tuple[Mesh, Mesh]:
  """Train mesh from the first devices, rollout mesh from the next ones.

  With one device both slices share it.

  Args:
    devices: of this process, in order.
    train_shape: sizes of the axes data, fsdp, tensor.
    rollout_shape: the same for the rollout slice.

  Raises:
    ValueError: the meshes need more devices than there are.
  """
  num_train, num_rollout = math.prod(train_shape), math.prod(rollout_shape)
  if len(devices) == 1 and num_train == num_rollout == 1:
    return _mesh(devices, train_shape), _mesh(devices, rollout_shape)
  if num_train + num_rollout > len(devices):
    raise ValueError(
      f"train {train_shape} and rollout {rollout_shape} need"
      f" {num_train + num_rollout} devices; there are {len(devices)}"
    )
  return (
    _mesh(devices[:num_train], train_shape),
    _mesh(devices[num_train : num_train + num_rollout], rollout_shape),
  )


def shardings(mesh: Mesh, rules: ShardingRules, logical_axes: Any) -> Any:
  """A NamedSharding for each leaf (a tuple of names) of `logical_axes`."""
  return jax.tree.map(
    lambda axes: NamedSharding(mesh, rules.spec(axes)),
    logical_axes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of scalars and small arrays that every device holds."""
  return NamedSharding(mesh, P())
