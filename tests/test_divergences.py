"""Divergences, interpolated proximal logprobs, and the cross-entropy."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.algorithms import divergences
from jaxrl_async.algorithms import losses

LOSS_MASK = np.array([1, 1, 1, 1, 1, 1, 1, 0], bool)


def logprobs():
  """Arrays of [B = 2, T = 8] by the names of policies, and a mask."""
  rng = np.random.default_rng(0)
  proximal = np.stack([np.linspace(-2.0, -0.1, 8)] * 2)
  return {
    "current": (proximal + rng.normal(0, 0.3, (2, 8))).astype(np.float32),
    "proximal": proximal.astype(np.float32),
    "behavior": (proximal - rng.normal(0, 0.7, (2, 8))).astype(np.float32),
    "mask": np.stack([LOSS_MASK, LOSS_MASK[::-1]]),
  }


def test_k3_is_the_divergence_on_average_and_never_negative():
  p = np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)
  q = np.array([[0.2, 0.2, 0.2, 0.4]], np.float32)
  values = divergences.k3(jnp.log(p), jnp.log(q))
  assert (values >= 0).all()
  np.testing.assert_allclose(
    (p * values).sum(), (p * np.log(p / q)).sum(), rtol=1e-5
  )
  on_host = divergences.k3(np.log(p, dtype=np.float64), np.log(q))
  assert isinstance(on_host, np.ndarray) and on_host.dtype == np.float64
  np.testing.assert_allclose(on_host, values, rtol=1e-5, atol=1e-7)
  # A rounding error e counts e^2 / 2, not e.
  tiny = divergences.k3(jnp.log(p), jnp.log(p) + 1e-5)
  assert (tiny < 1e-9).all()


def test_loglinear_proximal_logprobs_are_their_formula():
  arrays = logprobs()
  current, behavior = arrays["current"], arrays["behavior"]
  version = 9
  versions = np.arange(16, dtype=np.int32).reshape(2, 8) % 4 + version - 3
  assert {*np.unique(version - versions)} == {0, 1, 2, 3}
  found, gradient = jax.value_and_grad(
    lambda x: losses.loglinear_proximal_logprobs(
      x, jnp.asarray(behavior), jnp.asarray(versions), jnp.int32(version)
    ).sum()
  )(jnp.asarray(current))
  expected = np.zeros((2, 8))
  for index in np.ndindex(2, 8):
    d = (version + 1) - int(versions[index])
    expected[index] = float(behavior[index]) / d
    expected[index] += (1 - 1 / d) * float(current[index])
  np.testing.assert_allclose(
    losses.loglinear_proximal_logprobs(
      jnp.asarray(current),
      jnp.asarray(behavior),
      jnp.asarray(versions),
      jnp.int32(version),
    ),
    expected,
    rtol=1e-6,
  )
  np.testing.assert_allclose(found, expected.sum(), rtol=1e-5)
  assert not gradient.any()
  # What is not stale is what drew it.
  fresh = versions == version
  np.testing.assert_allclose(expected[fresh], behavior[fresh], rtol=1e-6)


def test_behavior_kl_sums_equal_the_formula_and_ignore_the_rest():
  arrays = logprobs()
  mask = arrays["mask"]
  is_current = np.zeros((2, 8), bool)
  is_current[0, 1::2] = True
  assert (is_current & ~mask).any() and (is_current & mask).any()
  expected = dict.fromkeys(
    (
      *("behavior_kl_sum", "behavior_k1_sum", "behavior_k2_sum"),
      *("mismatch_kl_sum", "mismatch_count"),
    ),
    0.0,
  )
  proximal, behavior = arrays["proximal"], arrays["behavior"]
  for index in np.argwhere(mask):
    log_ratio = float(proximal[*index]) - float(behavior[*index])
    kl = math.exp(log_ratio) - 1 - log_ratio
    expected["behavior_kl_sum"] += kl
    expected["behavior_k1_sum"] -= log_ratio
    expected["behavior_k2_sum"] += log_ratio**2 / 2
    if is_current[*index]:
      expected["mismatch_kl_sum"] += kl
      expected["mismatch_count"] += 1
  actual = divergences.behavior_kl_sums(
    jnp.asarray(np.where(mask, proximal, np.nan)),
    jnp.asarray(behavior),
    jnp.asarray(mask),
    jnp.asarray(is_current),
  )
  assert actual.keys() == expected.keys()
  for name in expected:
    np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)


def test_next_token_loss_is_the_mean_cross_entropy_of_the_mask():
  arrays = logprobs()
  mask = arrays["mask"]
  current = np.where(mask, arrays["current"], np.nan)
  loss, gradient = jax.value_and_grad(
    lambda x: losses.next_token_loss(x, jnp.asarray(mask), num_loss_tokens=14)
  )(jnp.asarray(current))
  expected = -sum(float(x) for x in current[mask]) / 14
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  np.testing.assert_allclose(gradient, np.where(mask, -1 / 14, 0), rtol=1e-6)
