"""Draws against exact probabilities, and what a draw depends on."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxrl_async.rollout import sampling

V = 11
NUM_DRAWS = 20_000


def keys_of(groups, *, seed=3, stream=0, member=0):
  groups = jnp.atleast_1d(jnp.asarray(groups, jnp.int32))
  return sampling.row_keys(
    jnp.int32(seed),
    jnp.full_like(groups, stream),
    groups,
    jnp.full_like(groups, member),
  )


def draw(logits, keys, positions=4, temperature=1.0):
  rows = keys.shape[0]
  tokens, logprobs = sampling.sample(
    jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, len(logits))),
    keys,
    jnp.full((rows,), positions, jnp.int32),
    jnp.full((rows,), temperature, jnp.float32),
  )
  return np.asarray(tokens), np.asarray(logprobs)


def log_softmax(logits, temperature):
  scaled = np.asarray(logits, np.float64) / temperature
  scaled = scaled - scaled.max()
  return scaled - np.log(np.exp(scaled).sum())


@pytest.fixture(scope="module")
def logits():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=V).astype(np.float32)
  logits[3] = -np.inf  # a token that cannot be drawn
  return logits


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("varies", ["group", "position"])
def test_draws_have_the_frequencies_of_the_distribution(
  logits, temperature, varies
):
  count = jnp.arange(NUM_DRAWS, dtype=jnp.int32)
  if varies == "group":
    tokens, _ = draw(logits, keys_of(count), temperature=temperature)
  else:
    tokens, _ = sampling.sample(
      jnp.broadcast_to(jnp.asarray(logits), (NUM_DRAWS, V)),
      keys_of(jnp.zeros_like(count)),
      count,
      jnp.full((NUM_DRAWS,), temperature, jnp.float32),
    )
  observed = np.bincount(np.asarray(tokens), minlength=V)
  probs = np.exp(log_softmax(logits, temperature))
  assert observed[3] == 0
  possible = probs > 0
  assert min(NUM_DRAWS * probs[possible]) > 5
  test = scipy.stats.chisquare(
    observed[possible], NUM_DRAWS * probs[possible] / probs.sum()
  )
  assert test.pvalue > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.3, 5.0])
def test_the_logprob_is_that_of_the_distribution_of_the_draw(
  logits, temperature
):
  tokens, logprobs = draw(
    logits, keys_of(np.arange(200)), temperature=temperature
  )
  expected = log_softmax(logits, temperature)[tokens]
  assert len(set(tokens)) > 3
  np.testing.assert_allclose(logprobs, expected, rtol=1e-5, atol=1e-6)


def test_temperature_zero_takes_the_largest_with_its_logprob_at_one(logits):
  tokens, logprobs = draw(logits, keys_of(np.arange(50)), temperature=0.0)
  assert set(tokens) == {np.argmax(logits)}
  expected = log_softmax(logits, 1.0).max()
  np.testing.assert_allclose(logprobs, expected, rtol=1e-5)


def test_very_different_logits_overflow_nothing():
  tokens, logprobs = draw([1e4, 0.0, -1e4], keys_of(np.arange(20)))
  assert (tokens == 0).all()
  assert (logprobs == 0).all()


def uniforms(**where):
  """The token of a flat distribution over many is the uniform, as it were."""
  positions = where.pop("position", 4)
  groups = where.pop("group", 5)
  tokens, _ = draw(np.zeros(50_000), keys_of(groups, **where), positions)
  return tokens


@pytest.mark.parametrize(
  "change",
  [{"seed": 4}, {"stream": 1}, {"group": 6}, {"member": 1}, {"position": 5}],
)
def test_a_draw_depends_on_each_of_its_counters(change):
  assert uniforms(**change)[0] != uniforms()[0]


def test_counters_do_not_stand_for_one_another():
  # A sum or a product of counters would make some of these the same.
  draws = [
    uniforms(stream=stream, group=group, member=member, position=position)[0]
    for stream in range(2)
    for group in range(2)
    for member in range(2)
    for position in range(2)
  ]
  assert len(set(draws)) == 16


def test_a_draw_depends_on_neither_row_nor_batch():
  groups = np.array([9, 5, 7, 5, 5], np.int32)
  together = uniforms(group=groups)
  assert together[1] == together[3] == together[4] == uniforms()[0]
  assert together[0] == uniforms(group=9)[0]


def test_a_draw_is_the_same_in_and_out_of_a_jit(logits):
  keys = keys_of(np.arange(32))
  jitted = jax.jit(sampling.sample)
  broadcast = jnp.broadcast_to(jnp.asarray(logits), (32, V))
  positions = jnp.arange(32, dtype=jnp.int32)
  temperature = jnp.ones((32,), jnp.float32)
  plain = sampling.sample(broadcast, keys, positions, temperature)
  fused = jitted(broadcast, keys, positions, temperature)
  np.testing.assert_array_equal(plain[0], fused[0])
  np.testing.assert_allclose(plain[1], fused[1], atol=1e-6)
