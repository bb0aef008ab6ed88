"""The token at a quantile of a distribution, and the largest logit."""

import hypothesis
from hypothesis import strategies as st
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from jaxrl_async.engine import sampling

at_quantile = jax.jit(sampling._at_quantile)


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
  quantiles = rng.integers(0, 2**23, 400).astype(np.float32) * 2.0**-23
  quantiles[::10], quantiles[1::10] = 0.0, 1 - 2.0**-23
  fractions = rng.random(400).astype(np.float32)
  found = np.asarray(
    at_quantile(
      jnp.asarray(weights), jnp.asarray(quantiles), jnp.asarray(fractions)
    )
  )
  rows = np.arange(400)
  assert (weights[rows, found] > 0).all()
  ends = np.cumsum(weights.astype(np.float64), axis=1)
  ends /= ends[:, -1:]
  begins = ends[rows, found] - weights[rows, found] / weights.sum(axis=1)
  # Off by at most the rounding of sums in float32.
  assert (begins - 3e-6 <= quantiles).all()
  assert (quantiles <= ends[rows, found] + 3e-6).all()


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_recorded():
  """Tokens of probability 2e-8, which one number of 23 bits cannot tell apart.

  Of all numbers that draw some block, the fractions run through their range.
  """
  size, per_number = 151_936, 400
  logits = np.zeros((size,), np.float32)
  logits[0] = 18.0  # nearly all of the weight
  block = 1_000
  first = block * sampling._BLOCK
  logits[first : first + sampling._BLOCK] = np.linspace(
    -1, 1, sampling._BLOCK, dtype=np.float32
  )
  weights = np.exp(logits - 18.0)
  blocks = np.pad(weights, (0, -size % sampling._BLOCK)).reshape(
    -1, sampling._BLOCK
  )
  ends = np.cumsum(blocks.sum(1, dtype=np.float64))
  low, high = ends[block - 1 : block + 1] / ends[-1] * 2.0**23
  numbers = np.arange(int(low) - 3, int(high) + 4) * 2.0**-23
  within = (np.arange(per_number) + 0.5) / per_number
  quantiles, fractions = (
    jnp.asarray(x.ravel(), jnp.float32)
    for x in np.meshgrid(numbers, within, indexing="ij")
  )
  found = jax.lax.map(
    lambda x: at_quantile(jnp.asarray(weights)[None], x[0][None], x[1][None]),
    (quantiles, fractions),
  )
  own = np.asarray(found)[:, 0] - first
  counts = np.bincount(own[(own >= 0) & (own < 64)], minlength=64)
  assert 5 < high - low < 12 and counts.sum() > 5 * per_number
  wanted = blocks[block] / blocks[block].sum() * counts.sum()
  np.testing.assert_allclose(counts, wanted, rtol=0.1)


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
  number=st.integers(0, 2**23 - 1), whole=st.floats(2.0**-60, 2.0**60, width=32)
)
def test_a_product_and_its_rest_are_exact(number, whole):
  x, y = np.float32(number * 2.0**-23), np.float32(whole)
  product, rest = jax.jit(sampling._product)(jnp.array([x]), jnp.array([y]))
  assert product[0] == x * y
  assert float(product[0]) + float(rest[0]) == float(x) * float(y)


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


def test_a_row_with_a_nan_gets_its_first_token_and_spoils_no_other():
  logits = jnp.array([[0, jnp.nan, 5], [0, 7, 5], [jnp.nan, 1, 2]], jnp.float32)
  half = jnp.full((3,), 0.5, jnp.float32)
  temperature = jnp.array([0.0, 0.0, 1.0], jnp.float32)
  found, _ = sampling.sample(logits, half, temperature)
  assert found.tolist() == [0, 1, 0]
