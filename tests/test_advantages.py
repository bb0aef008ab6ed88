"""Group-relative advantages."""

import math

import numpy as np
import pytest

from jaxrl_async.algorithms import advantages as advantages_lib
from jaxrl_async.config import sections

# Groups of four, of one, of none, of three equal ones, of two; interleaved.
GROUP_IDS = np.array([0, 3, 0, 1, 4, 0, 3, 0, 3, 4])
REWARDS = np.array([1.0, 0.1, 0.0, 1.0, 0.25, 0.0, 0.1, 1.0, 0.1, -2.0])
NUM_GROUPS = 5


def transcribed(rewards, group_ids, scale):
  result = []
  for reward, group in zip(rewards, group_ids, strict=True):
    mates = [r for r, g in zip(rewards, group_ids, strict=True) if g == group]
    mean = sum(mates) / len(mates)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in mates) / len(mates))
    divisor = deviation + 1e-6 if scale is sections.AdvantageScale.STD else 1.0
    result.append((reward - mean) / divisor)
  return np.array(result)


@pytest.mark.parametrize("scale", sections.AdvantageScale)
def test_advantages_equal_the_formula_for_groups_of_any_size(scale):
  expected = transcribed(REWARDS, GROUP_IDS, scale)
  assert (expected > 0.5).any() and (expected < -0.5).any()
  actual = advantages_lib.group_relative_advantages(
    REWARDS, GROUP_IDS, NUM_GROUPS, scale=scale
  )
  assert actual.dtype == np.float32
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)


def test_scale_changes_the_result():
  with_std, without = (
    advantages_lib.group_relative_advantages(
      REWARDS, GROUP_IDS, NUM_GROUPS, scale=scale
    )
    for scale in (sections.AdvantageScale.STD, sections.AdvantageScale.NONE)
  )
  assert np.abs(with_std - without).max() > 0.4


def test_a_group_that_agrees_teaches_nothing():
  actual = advantages_lib.group_relative_advantages(
    REWARDS, GROUP_IDS, NUM_GROUPS, scale=sections.AdvantageScale.STD
  )
  np.testing.assert_allclose(actual[np.isin(GROUP_IDS, [1, 3])], 0, atol=1e-9)


def test_another_group_has_no_influence():
  rewards = REWARDS.copy()
  rewards[GROUP_IDS == 4] = [7.0, 9.0]
  before, after = (
    advantages_lib.group_relative_advantages(
      r, GROUP_IDS, NUM_GROUPS, scale=sections.AdvantageScale.STD
    )
    for r in (REWARDS, rewards)
  )
  np.testing.assert_array_equal(
    before[GROUP_IDS != 4], after[GROUP_IDS != 4], strict=True
  )
  assert (before != after)[GROUP_IDS == 4].all()


def test_what_cannot_be_compared_is_refused():
  with pytest.raises(ValueError, match="finite"):
    advantages_lib.group_relative_advantages(
      np.array([1.0, np.nan]),
      np.array([0, 0]),
      1,
      scale=sections.AdvantageScale.STD,
    )
  for ids in ([0, 2], [-1, 0]):
    with pytest.raises(ValueError, match="num_groups = 2"):
      advantages_lib.group_relative_advantages(
        np.array([1.0, 0.0]),
        np.array(ids),
        2,
        scale=sections.AdvantageScale.STD,
      )
