"""How many devices lie along each axis of a mesh: arithmetic, without JAX."""

from collections.abc import Sequence
import dataclasses
import math

from jaxrl_async.config import sections


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
  """Devices along each mesh axis; neighbours in a list share `tensor`."""

  data: int = 1
  fsdp: int = 1
  context: int = 1
  tensor: int = 1

  @property
  def sizes(self) -> tuple[int, ...]:
    """In the order of `config.MESH_AXES`."""
    return tuple(getattr(self, axis) for axis in sections.MESH_AXES)

  @property
  def num_devices(self) -> int:
    """Of the whole mesh."""
    return math.prod(self.sizes)

  def parts(self, axes: Sequence[str]) -> int:
    """Into how many parts these mesh axes split an array's axis."""
    return math.prod(getattr(self, axis) for axis in axes)

  def __str__(self) -> str:
    return " x ".join(
      f"{axis} {getattr(self, axis)}" for axis in sections.MESH_AXES
    )
