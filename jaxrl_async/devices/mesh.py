"""Cuts the devices into a train and a rollout slice; maps logical axes.

Every parameter and batch names its axes ("embed", "batch", ...);
`config.ShardingRules` says which mesh axes each of them is split over, and
this file alone turns the two into shardings.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape

AXES = sections.MESH_AXES
TRAIN_RULES = sections.MeshSection().train_rules
ROLLOUT_RULES = sections.MeshSection().rollout_rules


ONE = MeshShape()


def shape_of(mesh: Mesh) -> MeshShape:
  """Devices along each of its axes."""
  return MeshShape(**mesh.shape)


def make_mesh(devices: Sequence[Any], shape: MeshShape = ONE) -> Mesh:
  """A mesh of exactly these devices, which may be any."""
  return Mesh(
    np.asarray(devices, dtype=object).reshape(shape.sizes),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
  )


def cut_devices(
  devices: Sequence[Any],
  *,
  train_shape: MeshShape,
  rollout_shape: MeshShape,
) -> tuple[Mesh, Mesh]:
  """Train mesh from the first devices, rollout mesh from the next ones.

  With one device both slices share it.

  Raises:
    ValueError: the meshes need more devices than there are.
  """
  num_train, num_rollout = train_shape.num_devices, rollout_shape.num_devices
  if len(devices) == 1 and num_train == num_rollout == 1:
    return make_mesh(devices), make_mesh(devices)
  if num_train + num_rollout > len(devices):
    raise ValueError(
      f"train ({train_shape}) and rollout ({rollout_shape}) need"
      f" {num_train + num_rollout} devices; there are {len(devices)}"
    )
  return (
    make_mesh(devices[:num_train], train_shape),
    make_mesh(devices[num_train : num_train + num_rollout], rollout_shape),
  )


def spec(
  rules: sections.ShardingRules, logical_axes: Sequence[str | None]
) -> P:
  """Partition spec of an array with these logical axes; None is not split.

  Raises:
    ValueError: two of its axes would be split over the same mesh axis; the
      message begins with the rule that is one too many.
  """
  entries, taken = [], {}
  for axis in logical_axes:
    mesh_axes = () if axis is None else getattr(rules, axis)
    for mesh_axis in mesh_axes:
      if mesh_axis in taken:
        names = ", ".join(name or "(none)" for name in logical_axes)
        raise ValueError(
          f"{axis}: {mesh_axis} already splits {taken[mesh_axis]} of an array"
          f" of {names}; use another axis, or ()"
        )
      taken[mesh_axis] = axis
    entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
  return P(*entries)


def sharding(
  mesh: Mesh, rules: sections.ShardingRules, *logical_axes: str | None
) -> NamedSharding:
  """Of one array with these logical axes."""
  return NamedSharding(mesh, spec(rules, logical_axes))


def shardings(
  mesh: Mesh, rules: sections.ShardingRules, logical_axes: Any
) -> Any:
  """A NamedSharding for each leaf (a tuple of names) of `logical_axes`."""
  return jax.tree.map(
    lambda axes: sharding(mesh, rules, *axes),
    logical_axes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How a program's arrays lie on a mesh, for what the compiler gets wrong."""

  mesh: Mesh
  rules: sections.ShardingRules

  def constrain(self, array: jax.Array, *logical_axes: str | None) -> jax.Array:
    """The array, split so; what its axes do not name every device holds."""
    here = sharding(self.mesh, self.rules, *logical_axes)
    return jax.lax.with_sharding_constraint(array, here)

  def parts(self, logical_axis: str) -> int:
    """Into how many parts an axis is split."""
    return math.prod(
      self.mesh.shape[axis] for axis in getattr(self.rules, logical_axis)
    )

  def freed(self, *logical_axes: str, of: str) -> "Layout":
    """The layout in which what splits `of` splits none of these axes."""
    taken = getattr(self.rules, of)
    rest = {
      name: tuple(x for x in getattr(self.rules, name) if x not in taken)
      for name in logical_axes
    }
    rules = dataclasses.replace(self.rules, **rest)
    return dataclasses.replace(self, rules=rules)


def put(tree: Any, shardings: Any) -> Any:
  """Host arrays on their devices, each of which is sent its part only.

  With several processes each holds all of the arrays, and places what belongs
  on its own devices.
  """

  def place(array, sharding):
    if sharding.is_fully_addressable:
      return jax.device_put(array, sharding)
    return jax.make_array_from_callback(
      array.shape, sharding, lambda index: array[index]
    )

  if isinstance(shardings, NamedSharding):
    return jax.tree.map(lambda array: place(array, shardings), tree)
  return jax.tree.map(place, tree, shardings)


def replicated(mesh: Mesh) -> NamedSharding:
  """The sharding of scalars and small arrays that every device holds."""
  return NamedSharding(mesh, P())
