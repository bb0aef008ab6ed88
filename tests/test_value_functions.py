"""The critic's equations against float64 transcriptions."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms import value_functions


def sample(seed=0, size=60):
  rng = np.random.default_rng(seed)
  before, targets = rng.normal(0, 1, (2, size)).astype(np.float32)
  values = (before + rng.normal(0, 0.4, size)).astype(np.float32)
  return values, before, targets, np.arange(size) % 4 > 0


def one_loss(value, before, target, clip):
  """Of one value, in Python's floats."""
  value, before, target = map(float, (value, before, target))
  error = (value - target) ** 2
  if clip == 0:
    return error / 2, False
  near = before + min(max(value - before, -clip), clip)
  clipped = (near - target) ** 2
  return max(error, clipped) / 2, clipped > error


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_loss_and_gradient_of_a_value_are_those_of_the_larger_square(clip):
  values, before, targets, mask = sample()

  def total(*arrays):
    losses, clipped = value_functions.value_loss(
      *arrays, jnp.asarray(mask), clip=clip
    )
    return losses.sum(), (losses, clipped)

  (found, *others), (losses, clipped) = jax.grad(total, (0, 1, 2), True)(
    *(jnp.where(mask, x, jnp.nan) for x in (values, before, targets))
  )
  assert not any(x.any() for x in others)
  expected = [
    one_loss(*x, clip) if inside else (0.0, False)
    for *x, inside in zip(values, before, targets, mask, strict=True)
  ]
  np.testing.assert_allclose(losses, [x for x, _ in expected], rtol=1e-5)
  assert clipped.tolist() == [x for _, x in expected]
  assert clipped.any() == (clip > 0) and not clipped[mask].all()
  step = 1e-6
  for i, inside in enumerate(mask):
    if not inside:
      assert found[i] == 0
      continue
    up, down = (
      one_loss(float(values[i]) + sign * step, before[i], targets[i], clip)[0]
      for sign in (1, -1)
    )
    np.testing.assert_allclose(found[i], (up - down) / 2 / step, atol=2e-5)
  if clip:
    assert (found[mask] == 0).any()  # moved beyond the bound already


def test_statistics_are_weighted_means_of_all_steps():
  rng = np.random.default_rng(0)
  decay = 0.9
  statistics = {x: jnp.float32(0) for x in value_functions.STATISTICS}
  mean, deviation = value_functions.moments(statistics)
  assert (mean, deviation) == (0, 1)
  means, squares = [], []
  for step in range(6):
    mask = rng.random((3, 20)) < 0.5
    returns = rng.normal(3 + step, 2, (3, 20)).astype(np.float32)
    means.append(returns[mask].astype(np.float64).mean())
    squares.append((returns[mask].astype(np.float64) ** 2).mean())
    statistics = value_functions.updated_statistics(
      statistics,
      jnp.asarray(np.where(mask, returns, np.nan)),
      jnp.asarray(mask),
      decay=decay,
    )
    weights = decay ** np.arange(step, -1, -1.0)
    wanted_mean = np.average(means, weights=weights)
    wanted = np.average(squares, weights=weights) - wanted_mean**2
    mean, deviation = value_functions.moments(statistics)
    np.testing.assert_allclose(mean, wanted_mean, rtol=1e-5)
    np.testing.assert_allclose(deviation, np.sqrt(wanted), rtol=1e-4)
  values = jnp.asarray(rng.normal(size=5), jnp.float32)
  unit = value_functions.normalized(values, statistics)
  np.testing.assert_allclose(unit, (values - mean) / deviation, rtol=1e-5)
  back = value_functions.denormalized(unit, statistics)
  np.testing.assert_allclose(back, values, atol=1e-5)


def test_statistics_stay_without_loss_tokens_and_never_divide_by_little():
  statistics = {x: jnp.float32(0) for x in value_functions.STATISTICS}
  nothing = jnp.zeros((2, 3), bool)
  after = value_functions.updated_statistics(
    statistics, jnp.ones((2, 3)), nothing, decay=0.5
  )
  assert all(x == 0 for x in after.values())
  after = value_functions.updated_statistics(
    statistics, jnp.ones((2, 3)), ~nothing, decay=0.5
  )
  mean, deviation = value_functions.moments(after)
  np.testing.assert_allclose((mean, deviation), (1.0, 0.1), rtol=1e-5)


def test_returns_that_are_not_finite_change_no_statistics():
  mask = jnp.array([True, True, False])
  before = value_functions.updated_statistics(
    {name: jnp.float32(0) for name in value_functions.STATISTICS},
    jnp.array([1.0, 2.0, 3.0], jnp.float32),
    mask,
    decay=0.5,
  )
  for wrong in (np.nan, np.inf, 1e30):
    after = value_functions.updated_statistics(
      before, jnp.array([wrong, 1.0, 0.0], jnp.float32), mask, decay=0.5
    )
    assert {k: float(v) for k, v in after.items()} == {
      k: float(v) for k, v in before.items()
    }


def test_a_token_has_the_value_of_the_state_before_it():
  after = jnp.arange(6.0).reshape(2, 3)
  found = value_functions.before_tokens(after)
  assert found[:, 1:].tolist() == after[:, :-1].tolist()
