"""The token at a quantile of a distribution, and the largest logit."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from jaxrl_async.engine import sampling


@pytest.mark.parametrize("size", [1, 11, 64, 65, 1_000, 4_096])
@pytest.mark.parametrize("zeros", ["none", "many", "whole blocks"])
def test_a_quantile_is_the_token_at_which_the_distribution_passes_it(
  size, zeros
):
  rng = np.random.default_rng(size)
  weights = np.exp(rng.normal(0, 3, (400, size))).astype(np.float32)
  if zeros == "many":
    weights[rng.random(weights.shape) < 0.9] = 0
  elif zeros == "whole blocks":
    weights[:, rng.permutation(-(-size // 64)).repeat(64)[:size] % 3 == 1] = 0
  # Each row has a token; that of the last rows is alone.
  weights[np.arange(400), rng.integers(0, size, 400)] = 1.0
  weights[-20:] *= weights[-20:] == 1.0
  quantiles = rng.random(400).astype(np.float32)
  quantiles[::10], quantiles[1::10] = 0.0, 1 - 2.0**-23
  found = np.asarray(
    jax.jit(sampling._at_quantile)(jnp.asarray(weights), jnp.asarray(quantiles))
  )
  rows = np.arange(400)
  assert (weights[rows, found] > 0).all()
  ends = np.cumsum(weights.astype(np.float64), axis=1)
  ends /= ends[:, -1:]
  begins = ends[rows, found] - weights[rows, found] / weights.sum(axis=1)
  # Off by at most the rounding of sums in float32.
  assert (begins - 3e-6 <= quantiles).all()
  assert (quantiles <= ends[rows, found] + 3e-6).all()


def test_the_largest_logit_is_the_first_of_equal_ones():
  logits = np.array(
    [
      [1, 5, 5, 2],
      [-np.inf, -np.inf, 0, 0],
      [-3, -4, -5, -6],
      [0, 0, 0, 7],
      [1e-30, 1e30, 1e30, -1e30],
    ],
    np.float32,
  )
  rows = len(logits)
  greedily = jnp.zeros((rows,), jnp.float32)
  found, _ = sampling.sample(
    jnp.asarray(logits), jnp.full((rows,), 0.9, jnp.float32), greedily
  )
  assert found.tolist() == [1, 2, 0, 3, 1]
  assert found.tolist() == logits.argmax(axis=-1).tolist()


def test_a_greedy_row_with_a_nan_gets_its_last_token():
  logits = jnp.array([[0, jnp.nan, 5], [0, 7, 5]], jnp.float32)
  half, greedily = jnp.full((2,), 0.5), jnp.zeros((2,), jnp.float32)
  found, _ = sampling.sample(logits, half.astype(jnp.float32), greedily)
  assert found.tolist() == [2, 1]
