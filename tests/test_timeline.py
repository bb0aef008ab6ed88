"""A timeline keeps every second of every activity, in bins that widen."""

import numpy as np
import pytest

from jaxrl_async.reporting import timeline as timeline_lib


def of(*intervals):
  timeline = timeline_lib.Timeline()
  for interval in intervals:
    timeline.add(timeline_lib.Interval(*interval))
  return timeline


def test_shares_are_those_of_the_intervals():
  timeline = of(
    (10.0, 11.0, "decode"), (11.0, 11.5, "prefill"), (12.0, 14.0, "x")
  )
  shares = timeline.shares(np.array([10.0, 12.0, 13.0, 20.0]))
  assert timeline.activities == ["decode", "prefill", "x"]
  assert timeline.span_s == (10.0, 14.0)
  np.testing.assert_allclose(shares["decode"], [0.5, 0, 0])
  np.testing.assert_allclose(shares["prefill"], [0.25, 0, 0])
  np.testing.assert_allclose(shares["x"], [0, 1, 1 / 7])


@pytest.mark.parametrize("scale_s", [1e-4, 0.1, 70.0, 1e4])
def test_no_second_is_lost_and_each_stays_where_it_was(scale_s):
  rng = np.random.default_rng(0)
  times = np.cumsum(rng.random(2_000) * scale_s) + 1e5
  spans = [(a, b, f"{i % 3}") for i, (a, b) in enumerate(times.reshape(-1, 2))]
  timeline = of(*spans)
  start_s, end_s = timeline.span_s
  assert (start_s, end_s) == (spans[0][0], spans[-1][1])
  edges = np.linspace(start_s, end_s, 101)
  shares = timeline.shares(edges)
  width_s = edges[1] - edges[0]
  for activity in "012":
    own = [(a, b) for a, b, name in spans if name == activity]
    seconds = shares[activity] * width_s
    whole_s = np.array([start_s, 2 * end_s])
    total_s = timeline.shares(whole_s)[activity] * np.diff(whole_s)
    np.testing.assert_allclose(total_s, sum(b - a for a, b in own), rtol=1e-6)
    expected = [
      sum(max(0.0, min(b, right) - max(a, left)) for a, b in own)
      for left, right in zip(edges, edges[1:], strict=False)
    ]
    # At most a bin on either edge is shared with a neighbour.
    bin_s = (end_s - start_s) / (timeline_lib._NUM_BINS / 2)
    bin_s = max(bin_s, timeline_lib._FIRST_WIDTH_S)
    np.testing.assert_allclose(seconds, expected, atol=2 * bin_s)


def test_memory_stays_the_same_however_much_is_added():
  timeline = of()
  for i in range(2 * timeline_lib._NUM_RECENT):
    if i == timeline_lib._NUM_RECENT:
      assert timeline.detailed_from_s == -np.inf
      assert len(timeline.recent) == i
    timeline.add(timeline_lib.Interval(float(i), i + 0.5, "decode"))
  assert len(timeline.recent) == timeline_lib._NUM_RECENT
  assert timeline.detailed_from_s == timeline_lib._NUM_RECENT
  assert {len(x) for x in timeline._bins.values()} == {timeline_lib._NUM_BINS}
