"""What a slice did when, as a line of metrics has it.

A step may have millions of busy intervals, while its picture has a few hundred
columns of pixels. A timeline therefore keeps only the share of each activity in
bins of time.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Float
import numpy as np

_NUM_BINS = 256  # must be even
_FIRST_WIDTH_S = 2.0**-10
_NUM_PARTS = 64


class Interval(NamedTuple):
  """A period that an activity took, in seconds of the clock."""

  start_s: float
  end_s: float
  activity: str


class Timeline:
  """Intervals of one slice, by activity.

  When an interval ends after the last bin, neighbouring bins are merged in
  pairs and all bins become twice as wide. The cost of adding an interval does
  therefore not depend on how many there are.

  Invariant: the bins of an activity add up to the time of all its intervals.

  Threads: nothing here is locked.

  Attributes:
    start_s: when the first bin begins.
    end_s: the last end of an interval, or later.
  """

  def __init__(self, start_s: float):
    self.start_s = self.end_s = start_s
    self._width_s = _FIRST_WIDTH_S
    self._bins: dict[str, np.ndarray] = {}  # share of each bin's width

  def add(self, interval: Interval) -> None:
    """Add an interval; what began before the timeline begins with it."""
    start_s = max(interval.start_s, self.start_s)
    end_s = interval.end_s + (start_s - interval.start_s)
    self.end_s = max(self.end_s, end_s)
    while self.end_s >= self.start_s + _NUM_BINS * self._width_s:
      half = _NUM_BINS // 2
      for bins in self._bins.values():
        bins[:half] = (bins[0::2] + bins[1::2]) / 2
        bins[half:] = 0.0
      self._width_s *= 2
    if interval.activity not in self._bins:
      self._bins[interval.activity] = np.zeros(_NUM_BINS)
    bins = self._bins[interval.activity]
    start = (start_s - self.start_s) / self._width_s
    end = (end_s - self.start_s) / self._width_s
    # Rounding may move an end onto the edge of the last bin.
    first, last = (min(int(x), _NUM_BINS - 1) for x in (start, end))
    if first == last:
      bins[first] += end - start
    else:
      bins[first] += first + 1 - start
      bins[first + 1 : last] += 1.0
      bins[last] += end - last

  def packed(self) -> "Packed":
    """Return each activity's share of 64 equal parts of the timeline.

    A share is two hexadecimal digits, from 00 to ff.
    """
    edges_s = np.linspace(self.start_s, self.end_s, _NUM_PARTS + 1)
    ends_s = self.start_s + self._width_s * np.arange(_NUM_BINS + 1)
    packed = {}
    for activity, bins in self._bins.items():
      seconds = np.concatenate([[0.0], np.cumsum(bins * self._width_s)])
      inside = np.diff(np.interp(edges_s, ends_s, seconds))
      share = inside / max((self.end_s - self.start_s) / _NUM_PARTS, 1e-9)
      level = np.clip(np.rint(255 * share), 0, 255).astype(np.uint8)
      packed[activity] = level.tobytes().hex()
    return Packed(self.start_s, self.end_s, packed)


class Packed(NamedTuple):
  """A timeline as a line of metrics has it; see `Timeline.packed`."""

  start_s: float
  end_s: float
  activities: Mapping[str, str]


def shares(
  timelines: Sequence[Packed], edges_s: Float[np.ndarray, "edges"]
) -> dict[str, np.ndarray]:
  """Return each activity's share of the time between neighbouring edges.

  The time inside a part of a timeline counts as evenly spread.
  """
  if not timelines:
    return {}
  parts_s = [np.linspace(a, b, _NUM_PARTS + 1) for a, b, _ in timelines]
  times_s = np.maximum.accumulate(np.concatenate(parts_s))
  widths_s = np.array([(b - a) / _NUM_PARTS for a, b, _ in timelines])
  nothing = "00" * _NUM_PARTS
  found = {}
  for name in dict.fromkeys(x for one in timelines for x in one.activities):
    text = "".join(one.activities.get(name, nothing) for one in timelines)
    level = np.frombuffer(bytes.fromhex(text), np.uint8).reshape(-1, _NUM_PARTS)
    seconds = np.pad(level / 255 * widths_s[:, None], ((0, 0), (1, 0)))
    totals = np.interp(edges_s, times_s, np.cumsum(seconds))
    found[name] = np.diff(totals) / np.diff(edges_s)
  return found
