"""Advantages: baselines, divisors and shaped rewards."""

import math

import numpy as np
import pytest

from jaxrl_async.algorithms import advantages as advantages_lib
from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections

# Groups of four, of one, of none, of three equal ones, of two; interleaved.
GROUP_IDS = np.array([0, 3, 0, 1, 4, 0, 3, 0, 3, 4])
REWARDS = np.array([1.0, 0.1, 0.0, 1.0, 0.25, 0.0, 0.1, 1.0, 0.1, -2.0])
NUM_GROUPS = 5


Scale = sections.AdvantageScale
CHOICES = [
  (baseline, scale)
  for baseline in algorithm_section.BASELINES
  for scale in Scale
]


def deviation_of(values):
  mean = sum(values) / len(values)
  return math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))


def transcribed(rewards, group_ids, baseline, scale):
  centred, deviations = [], []
  for i, (reward, group) in enumerate(zip(rewards, group_ids, strict=True)):
    mates = [r for r, g in zip(rewards, group_ids, strict=True) if g == group]
    others = [
      r
      for j, (r, g) in enumerate(zip(rewards, group_ids, strict=True))
      if g == group and j != i
    ]
    compared = {
      "group": mates,
      "leave_one_out": others or mates,
      "batch": list(rewards),
    }[baseline]
    centred.append(reward - sum(compared) / len(compared))
    deviations.append(deviation_of(mates))
  if scale is Scale.NONE:
    return np.array(centred)
  if scale is Scale.BATCH_STD:
    deviations = [deviation_of(centred)] * len(centred)
  return np.array(centred) / (np.array(deviations) + 1e-6)


def advantages(
  rewards, group_ids, num_groups, baseline="group", scale=Scale.STD
):
  return advantages_lib.relative_advantages(
    rewards, group_ids, num_groups, baseline=baseline, scale=scale
  )


@pytest.mark.parametrize(("baseline", "scale"), CHOICES)
def test_advantages_equal_the_formula_for_groups_of_any_size(baseline, scale):
  expected = transcribed(REWARDS, GROUP_IDS, baseline, scale)
  assert (expected > 0.4).any() and (expected < -0.5).any()
  actual = advantages(REWARDS, GROUP_IDS, NUM_GROUPS, baseline, scale)
  assert actual.dtype == np.float32
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)
  # Groups that agree teach nothing, to the bit.
  of_equal = actual[np.isin(GROUP_IDS, [1, 3])]
  assert (of_equal == 0).all() == (baseline != "batch")


def test_rewards_are_shaped_before_they_are_compared():
  shaped = advantages_lib.shaped(REWARDS, bias=-0.5, scale=4.0, clip=3.0)
  expected = [min(max(4 * (r - 0.5), -3.0), 3.0) for r in REWARDS]
  np.testing.assert_allclose(shaped, expected)
  assert {*np.sign(shaped)} == {-1, 1} and -3.0 in shaped
  unbounded = advantages_lib.shaped(REWARDS, bias=-0.5, scale=4.0, clip=0.0)
  assert unbounded.min() == -10.0
  same = advantages_lib.shaped(REWARDS, bias=0.0, scale=1.0, clip=0.0)
  np.testing.assert_array_equal(same, REWARDS, strict=True)


def test_what_cannot_be_compared_is_refused():
  with pytest.raises(ValueError, match="finite"):
    advantages(np.array([1.0, np.nan]), np.array([0, 0]), 1)
  for ids in ([0, 2], [-1, 0]):
    with pytest.raises(ValueError, match="num_groups = 2"):
      advantages(np.array([1.0, 0.0]), np.array(ids), 2)
  with pytest.raises(ValueError, match="no baseline 'median'"):
    advantages(np.array([1.0, 0.0]), np.array([0, 0]), 1, "median")


def segments_of(mask, scores):
  """The positions of each segment, by its turn and its number in it."""
  found, place, turn, part, is_new = {}, 0, -1, 0, True
  for t, is_loss in enumerate(mask):
    if not is_loss:
      is_new = True
      continue
    if is_new:
      turn, part, is_new = turn + 1, 0, False
    found.setdefault((turn, part), []).append(t)
    part += place in scores
    place += 1
  return found


def transcribed_segments(rewards, scores, masks, group_ids, scale):
  returns = {}
  for i, mask in enumerate(masks):
    parts = segments_of(mask, scores[i])
    places = [t for part in parts.values() for t in part]
    for k, part in parts.items():
      later = range(places.index(part[0]), len(places))
      found = sum(x for at, x in scores[i].items() if at in later)
      returns[i, k] = rewards[i] + found
  mates = {
    (i, k): [
      r
      for (j, other), r in returns.items()
      if other == k and group_ids[j] == group_ids[i]
    ]
    for i, k in returns
  }
  centred = {
    key: r - sum(mates[key]) / len(mates[key]) for key, r in returns.items()
  }
  divisor = {
    Scale.NONE: dict.fromkeys(centred, 1.0),
    Scale.STD: {key: deviation_of(m) + 1e-6 for key, m in mates.items()},
    Scale.BATCH_STD: dict.fromkeys(
      centred, deviation_of([*centred.values()]) + 1e-6
    ),
  }[scale]
  found = [np.zeros(len(mask)) for mask in masks]
  for i, mask in enumerate(masks):
    for k, part in segments_of(mask, scores[i]).items():
      found[i][part] = centred[i, k] / divisor[i, k]
  return found


@pytest.mark.parametrize("scale", Scale)
def test_each_turn_is_compared_with_the_same_turn_of_the_others(scale):
  rng = np.random.default_rng(0)
  masks = [
    np.array([*map(int, text)], bool)
    for text in (
      *("0110", "001101", "01011101", "0000", "0111", "00101", "010101"),
      *("011", "001", "01111"),
    )
  ]
  scores = [
    {int(at): x / 4 for at, x in enumerate(values) if x < 2}
    for values in (rng.integers(-1, 4, mask.sum()) for mask in masks)
  ]
  assert any(x == 0 for of_one in scores for x in of_one.values())
  found = advantages_lib.segment_advantages(
    REWARDS, scores, masks, GROUP_IDS, NUM_GROUPS, scale=scale
  )
  expected = transcribed_segments(REWARDS, scores, masks, GROUP_IDS, scale)
  assert len(found) == len(expected)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
  assert any(
    len({*x[m].tolist()}) > 1 for x, m in zip(found, masks, strict=True)
  )


def test_one_turn_without_scores_has_the_baseline_of_the_group():
  masks = [np.array([False, True, True])] * len(REWARDS)
  found = advantages_lib.segment_advantages(
    REWARDS, [{}] * len(REWARDS), masks, GROUP_IDS, NUM_GROUPS, scale=Scale.STD
  )
  expected = advantages(REWARDS, GROUP_IDS, NUM_GROUPS)
  for one, value in zip(found, expected, strict=True):
    assert one.tolist() == [0, value, value]
