"""The number of devices along each axis of a mesh, computed without JAX."""

from collections.abc import Sequence
import dataclasses
import math

from jaxrl_async.config import sections


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
  """Devices along each mesh axis.

  The last axis varies fastest: neighbours in a list of devices share `tensor`.
  """

  data: int = 1
  fsdp: int = 1
  context: int = 1
  tensor: int = 1

  @property
  def sizes(self) -> tuple[int, ...]:
    """The sizes in the order of `sections.MESH_AXES`."""
    return tuple(getattr(self, axis) for axis in sections.MESH_AXES)

  @property
  def num_devices(self) -> int:
    """The number of devices of the whole mesh."""
    return math.prod(self.sizes)

  def parts(self, axes: Sequence[str]) -> int:
    """Return into how many parts these mesh axes split an array's axis."""
    return math.prod(getattr(self, axis) for axis in axes)

  def __str__(self) -> str:
    return " x ".join(
      f"{axis} {getattr(self, axis)}" for axis in sections.MESH_AXES
    )


def of_slices(
  mesh: sections.MeshSection, num_devices: int, *, are_apart: bool = False
) -> tuple[MeshShape, MeshShape]:
  """Return the shapes of the train and the rollout mesh, with -1 resolved.

  Args:
    mesh: of the config.
    num_devices: number of devices that the two meshes are cut from.
    are_apart: only the train mesh is cut from them. The rollout mesh is that of
      a replica in another process.

  Raises:
    ConfigError: more than one axis is -1, or there are too few devices.
  """
  fields = [f.name for f in dataclasses.fields(mesh) if f.type is int]
  sizes = {name: getattr(mesh, name) for name in fields}
  open_axes = [name for name in sizes if sizes[name] == -1]
  sections.require(
    len(open_axes) <= 1,
    f"mesh.{[*sizes, *open_axes][-1]}",
    f"only one axis may be -1; {' and '.join(open_axes)} are",
  )

  def shape(side: str) -> MeshShape:
    start = f"{side}_"
    own = {n[len(start) :]: sizes[n] for n in fields if n.startswith(start)}
    return MeshShape(**own)

  for name in open_axes:
    sizes[name] = 1
    own, other = shape("train").num_devices, shape("rollout").num_devices
    if name.startswith("rollout"):
      own, other = other, own
    left = num_devices - (0 if are_apart else other)
    sizes[name] = max(1, left // own)
  train, rollout = shape("train").num_devices, shape("rollout").num_devices
  there_are = f"there {'is' if num_devices == 1 else 'are'} {num_devices}"
  sections.require(
    train + rollout <= num_devices
    or are_apart
    or num_devices == train == rollout == 1,
    "mesh",
    f"train_* need {train} and rollout_* {rollout} devices, together"
    f" {train + rollout}; {there_are}",
  )
  message = f"train_* need {train} devices; {there_are}"
  sections.require(train <= num_devices, "mesh", message)
  return shape("train"), shape("rollout")


def require_divides(
  side: str,
  shape: MeshShape,
  axes: Sequence[str],
  size: int,
  of: str,
  otherwise: str = "",
) -> None:
  """Check that the axes of a slice divide a size.

  Args:
    side: "train" or "rollout".
    shape: of its mesh.
    axes: that split an array.
    size: of the array's axis.
    of: what has that size, for the message.
    otherwise: what else to do, likewise.

  Raises:
    ConfigError: they do not; the field is like "mesh.train_data * train_fsdp".
  """
  parts = shape.parts(axes)
  used = [f"{side}_{axis}" for axis in axes if shape.parts([axis]) > 1]
  sections.require(
    size % parts == 0,
    f"mesh.{' * '.join(used)}",
    f"{parts} does not divide {size} {of}; use numbers that divide{otherwise}",
  )
