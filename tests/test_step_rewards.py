"""Rewards of steps: clip, delta, and what a policy would gain by them."""

import numpy as np
import pytest

from jaxrl_async.algorithms import step_rewards

RNG = np.random.default_rng(0)
SOLUTIONS = [RNG.random(count) for count in (0, 1, 2, 3, 7, 40)]


def transcribed(scores, shape, eta):
  """The equations of arXiv:2410.15115, with steps counted from 1."""
  count = len(scores)
  s = {k + 1: float(x) for k, x in enumerate(scores)}
  if "clip" in shape:
    s = {k: min(x - eta, 0.0) for k, x in s.items()}
  if "delta" not in shape:
    return [s[k] for k in range(1, count + 1)]
  found = []
  for k in range(1, count + 1):
    if k < count - 1:
      found.append(s[k] - s[k + 1])
    elif k == count - 1:
      found.append(s[k])
    else:
      found.append(0.0)
  return found


@pytest.mark.parametrize("shape", step_rewards.SHAPES)
@pytest.mark.parametrize("eta", [0.0, 0.3, 0.9])
def test_rewards_of_steps_equal_the_equations(shape, eta):
  for scores in SOLUTIONS:
    found = step_rewards.shaped(scores, shape=shape, threshold=eta)
    np.testing.assert_allclose(found, transcribed(scores, shape, eta))


def returns(scores, shape, eta=0.6):
  found = step_rewards.shaped(np.asarray(scores), shape=shape, threshold=eta)
  return np.cumsum(found[::-1])[::-1]


def test_with_delta_a_step_is_paid_for_itself():
  for scores in SOLUTIONS[2:]:
    np.testing.assert_allclose(returns(scores, "delta")[:-1], scores[:-1])
    clipped = np.minimum(scores - 0.6, 0)
    np.testing.assert_allclose(returns(scores, "clip_delta")[:-1], clipped[:-1])
    assert returns(scores, "delta")[-1] == 0


def test_repeating_a_right_step_pays_only_without_clip_and_delta():
  def of_repeated(shape, count):
    return returns([0.7, 0.9, *[0.8] * count, 0.9], shape)[0]

  pays = {
    shape: of_repeated(shape, 20) - of_repeated(shape, 0)
    for shape in step_rewards.SHAPES
  }
  assert pays.pop("process") == pytest.approx(16)
  assert pays == pytest.approx(dict.fromkeys(pays, 0), abs=1e-9)
  # A threshold above the scores: with clip alone, each further step costs.
  costs = returns([0.7] * 10, "clip", 0.95)[0] - returns([0.7], "clip", 0.95)[0]
  assert costs == pytest.approx(9 * -0.25)


def test_an_unknown_shape_is_refused():
  with pytest.raises(ValueError, match="'normed'; use process, clip, delta"):
    step_rewards.shaped(np.zeros(2), shape="normed")
