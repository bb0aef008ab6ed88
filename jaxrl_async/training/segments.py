"""Trajectories as segments of packed rows, before they are arrays.

`packing.plan` decides where each trajectory lies. A `Segments` holds that
decision together with the trajectories' own values, which take as much memory
as the tokens that there are. The packed arrays take as much as the tokens that
there could be, so they are made in parts: one array for the rows of one device
at a time. With several processes, each process gets the segments of its own
rows and makes no others.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from jaxtyping import Float, Int
import numpy as np

# The arrays of a packed batch, with their dtypes and the value of padding.
# Further fields are float32 with zeros.
ARRAYS: dict[str, tuple[Any, int]] = {
  "tokens": (np.int32, 0),
  "segment_ids": (np.int32, 0),
  "positions": (np.int32, 0),
  "segment_start": (np.int32, 0),
  "loss_mask": (np.bool_, 0),
  "advantages": (np.float32, 0),
  "behavior_logprobs": (np.float32, 0),
  "policy_versions": (np.int32, -1),
}
# Those that have a value for each token. The others follow from the layout.
VALUES = ("tokens", "loss_mask", "behavior_logprobs", "policy_versions")

Bounds = tuple[tuple[int, int], ...]


def dtype_of(name: str) -> Any:
  """Return the dtype of an array of a packed batch."""
  return ARRAYS.get(name, (np.float32, 0))[0]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
  """Where trajectories lie in [M, K, B, T] arrays, and what is written there.

  Attributes:
    starts: index of each trajectory's first token in the flattened array.
    lengths: number of tokens of each trajectory.
    segment_ids: 1, 2, ... along the row.
    advantages: of each trajectory, unless `values` has those of its tokens.
    values: by the names of `VALUES` and of further fields, an array with one
      number per token for each trajectory.
  """

  shape: tuple[int, int, int, int]
  starts: Int[np.ndarray, "trajectories"]
  lengths: Int[np.ndarray, "trajectories"]
  segment_ids: Int[np.ndarray, "trajectories"]
  advantages: Float[np.ndarray, "trajectories"]
  values: Mapping[str, Sequence[np.ndarray]]

  @property
  def names(self) -> list[str]:
    """The names of all arrays, further fields last."""
    return [*ARRAYS, *(name for name in self.values if name not in ARRAYS)]

  @property
  def pack_efficiency(self) -> float:
    """Share of tokens that are not padding, in the microbatches in use."""
    per_microbatch = self.shape[2] * self.shape[3]
    num_used = len(np.unique(self.starts // per_microbatch))
    return float(self.lengths.sum() / (num_used * per_microbatch))

  def of_rows(self, rows: Sequence[int]) -> "Segments":
    """Return those segments that lie in these rows of a microbatch."""
    row = self.starts // self.shape[3] % self.shape[2]
    chosen = np.flatnonzero(np.isin(row, rows))
    return dataclasses.replace(
      self,
      starts=self.starts[chosen],
      lengths=self.lengths[chosen],
      segment_ids=self.segment_ids[chosen],
      advantages=self.advantages[chosen],
      values={
        name: [values[i] for i in chosen.tolist()]
        for name, values in self.values.items()
      },
    )

  def filled(
    self, bounds: Bounds | None = None
  ) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each array's name and a part of it; one is in memory at a time.

    Args:
      bounds: begin and end of the part along each axis. None is everything.
    """
    bounds = bounds or tuple((0, size) for size in self.shape)
    first = [begin for begin, _ in bounds]
    size = tuple(end - begin for begin, end in bounds)
    places = np.stack(np.unravel_index(self.starts, self.shape), axis=1)
    ends = self._row_ends()
    left, right = bounds[3]
    begin = np.maximum(places[:, 3], left)
    end = np.minimum(places[:, 3] + self.lengths, right)
    inside = begin < end
    for axis in range(3):
      inside &= (bounds[axis][0] <= places[:, axis]) & (
        places[:, axis] < bounds[axis][1]
      )
    chosen = np.flatnonzero(inside)
    # Of each segment: its index, its row, and the columns in row and segment.
    pieces = [
      (
        i,
        tuple(place[:3] - first[:3]),
        slice(b - left, e - left),
        slice(b - place[3], e - place[3]),
      )
      for i, place, b, e in zip(
        chosen.tolist(), places[chosen], begin[chosen], end[chosen], strict=True
      )
    ]
    for name in self.names:
      dtype, padding = ARRAYS.get(name, (np.float32, 0))
      part = np.full(size, padding, dtype)
      if name == "segment_start":
        rows = tuple(slice(*bound) for bound in bounds[:3])
        part[...] = ends[rows][..., None]
      for i, row, columns, own in pieces:
        part[row][columns] = self._value(name, i, own)
      yield name, part
      del part  # the caller has sent it, and the next one takes its memory

  def _value(self, name: str, i: int, own: slice) -> Any:
    """Return what one array holds of a segment's tokens `own`."""
    if name == "segment_ids":
      return self.segment_ids[i]
    if name == "positions":
      return np.arange(own.start, own.stop, dtype=np.int32)
    if name == "segment_start":
      return self.starts[i] % self.shape[3]
    if name == "advantages" and name not in self.values:
      return self.advantages[i]
    return self.values[name][i][own]

  def _row_ends(self) -> Int[np.ndarray, "M K B"]:
    """Return the first column of padding of each row.

    A row of which other processes hold all segments is not right here, and is
    not asked for.
    """
    num_rows = int(np.prod(self.shape[:3]))
    row, column = np.divmod(self.starts, self.shape[3])
    ends = np.zeros(num_rows, np.int64)
    np.maximum.at(ends, row, column + self.lengths)
    return ends.reshape(self.shape[:3])
