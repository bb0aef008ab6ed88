"""Series and means of numbers, in memory that does not grow with the run."""

import dataclasses
import math
from typing import Any

_MAX_POINTS = 512
_NUM_RECENT = 128


@dataclasses.dataclass(kw_only=True, slots=True)
class Series:
  """Points in order, such as one per train step; can be stored as JSON.

  Up to 512 points are all kept. When one more arrives, every other point is
  dropped, and from then on only every second point is kept; this repeats
  whenever 512 are reached again.

  Attributes:
    num_points: points that were appended.
    stride: every stride-th point is in `thinned`.
    thinned: points 0, stride, 2 * stride and so on.
    recent: the last points, without gaps.
  """

  num_points: int = 0
  stride: int = 1
  thinned: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
  recent: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

  @classmethod
  def from_json(cls, values: dict[str, Any]) -> "Series":
    """Return the series of a checkpoint."""
    return cls(
      num_points=values["num_points"],
      stride=values["stride"],
      thinned=[tuple(point) for point in values["thinned"]],
      recent=[tuple(point) for point in values["recent"]],
    )

  def append(self, point: tuple[Any, ...]) -> None:
    """Append the next point."""
    if self.num_points % self.stride == 0:
      # even, so this point has a multiple of the new stride
      if len(self.thinned) == _MAX_POINTS:
        del self.thinned[1::2]
        self.stride *= 2
      self.thinned.append(point)
    self.num_points += 1
    self.recent.append(point)
    del self.recent[:-_NUM_RECENT]

  @property
  def first(self) -> tuple[Any, ...]:
    """The first point of all."""
    return self.thinned[0]

  @property
  def last(self) -> tuple[Any, ...]:
    """The last point of all."""
    return self.recent[-1]

  def points(self) -> list[tuple[Any, ...]]:
    """Return the kept points of the whole series, and always the last one."""
    if not self.num_points or (self.num_points - 1) % self.stride == 0:
      return list(self.thinned)
    return [*self.thinned, self.last]


@dataclasses.dataclass(kw_only=True, slots=True)
class Mean:
  """Mean and maximum of numbers that are not kept; can be stored as JSON.

  Numbers that are not finite are counted and left out. A skipped update has
  such numbers, and a single one would make the mean useless for good.
  """

  count: int = 0
  total: float = 0.0
  maximum: float = 0.0
  num_not_finite: int = 0

  def add(self, value: float) -> None:
    """Add a number, which is at least 0."""
    if not math.isfinite(value):
      self.num_not_finite += 1
      return
    self.count += 1
    self.total += value
    self.maximum = max(self.maximum, value)

  @property
  def mean(self) -> float:
    """The mean of the finite numbers, or 0 if there are none."""
    return self.total / self.count if self.count else 0.0
