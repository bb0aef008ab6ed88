"""What a slice did when, in memory that does not grow with the run.

A run of weeks has hundreds of millions of busy intervals, while its picture has
a thousand columns of pixels. A timeline therefore keeps the share of each
activity in bins of time, and only the last intervals as they were.
"""

import collections
import math
from typing import NamedTuple

from jaxtyping import Float
import numpy as np

_NUM_BINS = 4_096  # must be even
_FIRST_WIDTH_S = 2.0**-10
_NUM_RECENT = 16_384


class Interval(NamedTuple):
  """A period that an activity took, in seconds of the clock."""

  start_s: float
  end_s: float
  activity: str


class Timeline:
  """Intervals of one slice, by activity.

  The bins begin with the first interval. When an interval ends after the last
  bin, neighbouring bins are merged in pairs and all bins become twice as wide.
  At least half of the bins are thus in use once the timeline is longer than a
  few seconds, and the cost of adding an interval does not depend on how many
  there are.

  Invariant: the bins of an activity add up to the time of all its intervals.

  Threads: nothing here is locked.

  Attributes:
    recent: the last intervals, in the order in which they were added.
  """

  def __init__(self):
    self.recent: collections.deque[Interval] = collections.deque(
      maxlen=_NUM_RECENT
    )
    self._num_added = 0
    self._start_s = 0.0
    self._end_s = 0.0
    self._width_s = _FIRST_WIDTH_S
    self._bins: dict[str, np.ndarray] = {}  # share of each bin's width

  def add(self, interval: Interval) -> None:
    """Add an interval; the first one added must also be the earliest."""
    if not self._num_added:
      self._start_s = self._end_s = interval.start_s
    self._num_added += 1
    self.recent.append(interval)
    self._end_s = max(self._end_s, interval.end_s)
    while self._end_s >= self._start_s + _NUM_BINS * self._width_s:
      self._widen()
    if interval.activity not in self._bins:
      self._bins[interval.activity] = np.zeros(_NUM_BINS)
    bins = self._bins[interval.activity]
    start = max(interval.start_s - self._start_s, 0.0) / self._width_s
    end = max(interval.end_s - self._start_s, 0.0) / self._width_s
    # Rounding may move an end onto the edge of the last bin.
    first, last = (min(int(x), _NUM_BINS - 1) for x in (start, end))
    if first == last:
      bins[first] += end - start
    else:
      bins[first] += first + 1 - start
      bins[first + 1 : last] += 1.0
      bins[last] += end - last

  def _widen(self) -> None:
    half = _NUM_BINS // 2
    for bins in self._bins.values():
      bins[:half] = (bins[0::2] + bins[1::2]) / 2
      bins[half:] = 0.0
    self._width_s *= 2

  @property
  def activities(self) -> list[str]:
    """The names of all activities, in the order of their first interval."""
    return list(self._bins)

  @property
  def span_s(self) -> tuple[float, float] | None:
    """The start of the first interval and the last end; None if empty."""
    return (self._start_s, self._end_s) if self._num_added else None

  @property
  def detailed_from_s(self) -> float:
    """The time from which on `recent` has every interval."""
    has_all = self._num_added == len(self.recent)
    return -math.inf if has_all else self.recent[0].start_s

  def shares(
    self, edges_s: Float[np.ndarray, "edges"]
  ) -> dict[str, np.ndarray]:
    """Return each activity's share of the time between neighbouring edges.

    The time inside a bin counts as evenly spread.
    """
    ends_s = self._start_s + self._width_s * np.arange(_NUM_BINS + 1)
    shares = {}
    for activity, bins in self._bins.items():
      seconds = np.concatenate([[0.0], np.cumsum(bins * self._width_s)])
      shares[activity] = np.diff(np.interp(edges_s, ends_s, seconds))
      shares[activity] /= np.diff(edges_s)
    return shares
