"""Numbers of a run of any length, in memory that does not grow with it."""

import dataclasses
import math
from typing import Any

_MAX_POINTS = 512
_NUM_RECENT = 128


@dataclasses.dataclass(kw_only=True, slots=True)
class Series:
  """Points in their order, such as one a train step; JSON.

  All of them, as long as they are no more than 512. Then every other one is
  dropped, and from there on only every second is kept; and so on.

  Attributes:
    num_points: that were appended.
    stride: of the points, every stride-th is in `thinned`.
    thinned: points 0, stride, 2 * stride and so on.
    recent: the last points, every one of them.
  """

  num_points: int = 0
  stride: int = 1
  thinned: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
  recent: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

  @classmethod
  def from_json(cls, values: dict[str, Any] | list[list[Any]]) -> "Series":
    """A series of a checkpoint, or of an older one the list of all points."""
    if isinstance(values, list):
      series = cls()
      for point in values:
        series.append(tuple(point))
      return series
    return cls(
      num_points=values["num_points"],
      stride=values["stride"],
      thinned=[tuple(point) for point in values["thinned"]],
      recent=[tuple(point) for point in values["recent"]],
    )

  def append(self, point: tuple[Any, ...]) -> None:
    """Adds the next point."""
    if self.num_points % self.stride == 0:
      if len(self.thinned) == _MAX_POINTS:  # which is even: this one stays
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
    """The last one."""
    return self.recent[-1]

  def points(self) -> list[tuple[Any, ...]]:
    """What is left of the whole series; always the first and the last."""
    if not self.num_points or (self.num_points - 1) % self.stride == 0:
      return list(self.thinned)
    return [*self.thinned, self.last]


@dataclasses.dataclass(kw_only=True, slots=True)
class Mean:
  """Mean and maximum of numbers that are not kept; JSON.

  What is not finite is counted and left out: a skipped update has such numbers,
  and one of them would take the place of all others for good.
  """

  count: int = 0
  total: float = 0.0
  maximum: float = 0.0
  num_not_finite: int = 0

  def add(self, value: float) -> None:
    """Takes another number, at least 0."""
    if not math.isfinite(value):
      self.num_not_finite += 1
      return
    self.count += 1
    self.total += value
    self.maximum = max(self.maximum, value)

  @property
  def mean(self) -> float:
    """Of what was finite; 0 without any."""
    return self.total / self.count if self.count else 0.0
