"""A timeline keeps every second of every activity, in bins that widen."""

import numpy as np
import pytest

from jaxrl_async.reporting import timeline as timeline_lib


def of(start_s, *intervals):
  timeline = timeline_lib.Timeline(start_s)
  for interval in intervals:
    timeline.add(timeline_lib.Interval(*interval))
  return timeline


def test_shares_are_those_of_the_intervals():
  first = of(10.0, (10.0, 11.0, "decode"), (11.0, 11.5, "prefill"))
  # Told late, by another process: it counts as the first thing.
  second = of(12.0, (11.0, 12.0, "decode"), (14.0, 16.0, "x"))
  second.end_s = 20.0
  edges = np.array([10.0, 11.5, 12.0, 13.0, 14.0, 20.0])
  shares = timeline_lib.shares([first.packed(), second.packed()], edges)
  assert list(shares) == ["decode", "prefill", "x"]
  near = {"atol": 0.02}
  np.testing.assert_allclose(shares["decode"], [2 / 3, 0, 1, 0, 0], **near)
  np.testing.assert_allclose(shares["prefill"], [1 / 3, 0, 0, 0, 0], **near)
  np.testing.assert_allclose(shares["x"], [0, 0, 0, 0, 1 / 3], **near)
  assert timeline_lib.shares([], edges) == {}


@pytest.mark.parametrize("scale_s", [1e-4, 0.1, 70.0, 1e4])
def test_no_second_is_lost_and_each_stays_where_it_was(scale_s):
  rng = np.random.default_rng(0)
  times = np.cumsum(rng.random(2_000) * scale_s) + 1e5
  spans = [(a, b, f"{i % 3}") for i, (a, b) in enumerate(times.reshape(-1, 2))]
  timeline = of(spans[0][0], *spans)
  start_s, end_s = timeline.start_s, timeline.end_s
  assert end_s == spans[-1][1]
  assert {len(x) for x in timeline._bins.values()} == {timeline_lib._NUM_BINS}
  edges = np.linspace(start_s, end_s, 11)
  shares = timeline_lib.shares([timeline.packed()], edges)
  width_s = edges[1] - edges[0]
  for activity in "012":
    own = [(a, b) for a, b, name in spans if name == activity]
    seconds = timeline._bins[activity].sum() * timeline._width_s
    np.testing.assert_allclose(seconds, sum(b - a for a, b in own), rtol=1e-6)
    expected = [
      sum(max(0.0, min(b, right) - max(a, left)) for a, b in own)
      for left, right in zip(edges, edges[1:], strict=False)
    ]
    # A level is rounded to a 255th, and what is inside of a bin is spread.
    bin_s = max(timeline._width_s, width_s / 255)
    np.testing.assert_allclose(
      shares[activity] * width_s, expected, atol=2 * bin_s
    )
