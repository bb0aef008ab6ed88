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
