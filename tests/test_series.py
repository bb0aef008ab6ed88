"""A series keeps its ends exactly and points of all of it in between."""

import dataclasses
import json

import pytest

from jaxrl_async.reporting import series as series_lib


def of(count):
  series = series_lib.Series()
  for i in range(count):
    series.append((float(i), i % 7))
  return series


def numbers(series):
  return [point[0] for point in series.points()]


@pytest.mark.parametrize("count", [0, 1, 2, 511, 512])
def test_a_short_series_has_every_point(count):
  assert numbers(of(count)) == list(range(count))


@pytest.mark.parametrize("count", [513, 514, 1024, 1025, 5_000, 66_000])
def test_a_long_one_has_evenly_spaced_points_and_both_ends(count):
  series = of(count)
  *most, last = numbers(series)
  assert most == list(range(0, series.stride * len(most), series.stride))
  assert 0 < last - most[-1] <= series.stride
  assert 256 <= len(most) <= 512
  assert series.first == (0.0, 0) and last == count - 1 == series.last[0]
  assert series.num_points == count
  recent = [point[0] for point in series.recent]
  assert recent == list(range(count - 128, count))


@pytest.mark.parametrize("count", [0, 3, 700])
def test_it_goes_on_after_a_checkpoint_as_if_there_was_none(count):
  text = json.dumps(dataclasses.asdict(of(count)))
  resumed = series_lib.Series.from_json(json.loads(text))
  for i in range(count, 2_000):
    resumed.append((float(i), i % 7))
  assert resumed == of(2_000)
