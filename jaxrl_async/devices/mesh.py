"""Device meshes of both slices, and shardings from logical axis names.

Every parameter and batch names its axes ("embed", "batch", ...), and
`sections.ShardingRules` says which mesh axes split each of them. Only this file
combines the two into shardings.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape

AXES = sections.MESH_AXES
TRAIN_RULES = sections.MeshSection().train_rules
ROLLOUT_RULES = sections.MeshSection().rollout_rules


ONE = MeshShape()


def shape_of(mesh: Mesh) -> MeshShape:
  """Return the number of devices along each axis of a mesh."""
  return MeshShape(**mesh.shape)


def make_mesh(devices: Sequence[Any], shape: MeshShape = ONE) -> Mesh:
  """Return a mesh of exactly these devices, of any kind."""
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
  """Return a train mesh of the first devices and a rollout mesh of the next.

  If there is only one device, both meshes consist of it.

  Args:
    devices: in the order in which they are assigned.
    train_shape: number of devices along each axis of the train mesh.
    rollout_shape: the same of the rollout mesh.

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
  """Return the partition spec of an array with these logical axes.

  An axis named None is not split.

  Raises:
    ValueError: two axes of the array would be split over the same mesh axis.
      The message begins with the name of the second one.
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
  mesh: Mesh | AbstractMesh,
  rules: sections.ShardingRules,
  *logical_axes: str | None,
) -> NamedSharding:
  """Return the sharding of one array with these logical axes."""
  return NamedSharding(mesh, spec(rules, logical_axes))


def shardings(
  mesh: Mesh, rules: sections.ShardingRules, logical_axes: Any
) -> Any:
  """Return a NamedSharding for each leaf (a tuple of names) of logical_axes."""
  return jax.tree.map(
    lambda axes: sharding(mesh, rules, *axes),
    logical_axes,
    is_leaf=lambda x: isinstance(x, tuple),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """A mesh with its rules, for constraints on arrays inside a program.

  Most shardings are left to the compiler. Constraints are for the places where
  it would choose badly.

  Attributes:
    mesh: of the program.
    rules: which mesh axes split which logical axes.
    mapped: mesh axes that an enclosing `shard_map` has divided already.
  """

  mesh: Mesh
  rules: sections.ShardingRules
  mapped: tuple[str, ...] = ()

  def constrain(self, array: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Return the array, split as the rules say.

    Mesh axes that none of the logical axes name hold copies.
    """
    here = sharding(self.context, self.rules, *logical_axes)
    return jax.lax.with_sharding_constraint(array, here)

  @property
  def axes(self) -> frozenset[str]:
    """The mesh axes that are not mapped."""
    return frozenset(self.mesh.axis_names) - {*self.mapped}

  @property
  def context(self) -> Mesh | AbstractMesh:
    """The mesh for shardings, in which JAX wants mapped axes to be manual."""
    if not self.mapped:
      return self.mesh
    kinds = dict.fromkeys(self.mapped, AxisType.Manual)
    return self.mesh.abstract_mesh.update_axis_types(kinds)

  @property
  def data_parallel(self) -> tuple[str, ...]:
    """The mesh axes that split the rows of a batch, and no parameter."""
    of_params = {
      axis
      for name, axes in dataclasses.asdict(self.rules).items()
      if name != "batch"
      for axis in axes
    }
    return tuple(
      axis
      for axis in self.rules.batch
      if self.mesh.shape[axis] > 1 and axis not in of_params
    )

  def in_data_parallel(self) -> "Layout":
    """Return the layout inside a `shard_map` over `data_parallel`."""
    mapped = self.data_parallel
    batch = tuple(x for x in self.rules.batch if x not in mapped)
    rules = dataclasses.replace(self.rules, batch=batch)
    return dataclasses.replace(self, rules=rules, mapped=mapped)

  def parts(self, logical_axis: str) -> int:
    """Return into how many parts the rules split a logical axis."""
    return shape_of(self.mesh).parts(getattr(self.rules, logical_axis))

  def freed(self, *logical_axes: str, of: str) -> "Layout":
    """Return a layout in which these axes avoid the mesh axes of `of`.

    Args:
      *logical_axes: names of the axes that are split less than before.
      of: axis whose mesh axes are no longer used by `logical_axes`.
    """
    taken = getattr(self.rules, of)
    rest = {
      name: tuple(x for x in getattr(self.rules, name) if x not in taken)
      for name in logical_axes
    }
    rules = dataclasses.replace(self.rules, **rest)
    return dataclasses.replace(self, rules=rules)


def put(tree: Any, shardings: Any) -> Any:
  """Move host arrays to devices; each device receives only its own part.

  With several processes, each process holds all of the arrays and places the
  parts that belong to its own devices.
  """
  if isinstance(shardings, NamedSharding):
    shardings = jax.tree.map(lambda _, one=shardings: one, tree)
  # A single call for all arrays takes a fraction of the time.
  if all(x.is_fully_addressable for x in jax.tree.leaves(shardings)):
    return jax.device_put(tree, shardings)
  return jax.tree.map(
    lambda array, sharding: jax.make_array_from_callback(
      array.shape, sharding, lambda index: array[index]
    ),
    tree,
    shardings,
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """Return the sharding of arrays of which every device holds a copy."""
  return NamedSharding(mesh, P())
