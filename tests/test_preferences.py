"""Losses of pairs and of steps: float64 transcriptions, gradients, PyTorch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms import divergences
from jaxrl_async.algorithms import losses
from jaxrl_async.algorithms import preferences

# From clearly wrong to clearly right, and where exp of it overflows.
MARGINS = np.array([-800.0, -31.7, -3.2, -0.4, 0.0, 0.3, 2.9, 27.5, 800.0])
LABELS = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
OTHERS = np.array([1.5, -0.5, 2.0, -3.0, 0.0, 1.0, -1.0, 0.5, 4.0])


def log_sigmoid(x):
  """Of a Python float, without overflow."""
  return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def dpo(beta, eps):
  return np.array(
    [
      -(1 - eps) * log_sigmoid(beta * h) - eps * log_sigmoid(-beta * h)
      for h in MARGINS
    ]
  )


def ipo(tau):
  return np.array([(h - 0.5 / tau) ** 2 for h in MARGINS])


def bradley_terry():
  return np.array(
    [-log_sigmoid(c - r) for c, r in zip(MARGINS, OTHERS, strict=True)]
  )


def steps():
  return np.array(
    [
      -y * log_sigmoid(r) - (1 - y) * log_sigmoid(-r)
      for r, y in zip(MARGINS, LABELS, strict=True)
    ]
  )


def score_loss(scores):
  return preferences.bradley_terry_loss(scores - jnp.asarray(OTHERS, "float32"))


def labelled_loss(logits):
  return preferences.step_loss(logits, jnp.asarray(LABELS, "float32"))


CASES = {
  "dpo": (
    functools.partial(preferences.dpo_loss, beta=0.1, label_smoothing=0.0),
    dpo(0.1, 0.0),
  ),
  "conservative dpo": (
    functools.partial(preferences.dpo_loss, beta=0.7, label_smoothing=0.2),
    dpo(0.7, 0.2),
  ),
  "ipo": (functools.partial(preferences.ipo_loss, beta=0.3), ipo(0.3)),
  "bradley-terry": (score_loss, bradley_terry()),
  "steps": (labelled_loss, steps()),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_is_its_equation_in_float64(name):
  loss, wanted = CASES[name]
  found = loss(jnp.asarray(MARGINS, "float32"))
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_the_finite_difference(name):
  loss, _ = CASES[name]
  inside = np.abs(MARGINS) < 100  # differences of float32 say nothing beyond
  margins = jnp.asarray(MARGINS, "float32")
  found = jax.grad(lambda x: loss(x).sum())(margins)
  assert np.isfinite(found).all()
  width = 0.05
  slope = (loss(margins + width) - loss(margins - width)) / (2 * width)
  np.testing.assert_allclose(found[inside], slope[inside], rtol=2e-3, atol=1e-4)


def test_dpo_leaves_mass_where_no_data_was_and_ppo_does_not():
  """The counterexample of arXiv:2404.10719, section 4.1, with three actions.

  The data say that the first is better than the second. Nothing was said of
  the third, which the reference never takes.
  """
  reference = jnp.log(jnp.array([0.5, 0.5, 1e-9]))
  start = jnp.array([0.0, 0.0, 3.0])  # 0.91 of the policy is the third

  def dpo(logits):
    ratios = jax.nn.log_softmax(logits) - reference
    margin = ratios[0] - ratios[1]
    return preferences.dpo_loss(margin, beta=1.0, label_smoothing=0.0)

  def ppo(logits):
    logprobs = jax.nn.log_softmax(logits)
    rewards = jnp.array([1.0, 0.0, 0.0])
    rewards -= 0.1 * divergences.k1(logprobs, reference)
    drawn = jnp.exp(jax.lax.stop_gradient(logprobs))
    objective, _ = losses.ppo_objective(
      logprobs[None],
      logprobs[None],
      (rewards - drawn @ rewards)[None],
      jnp.ones((1, 3), bool),
      clip_low=0.2,
      clip_high=0.2,
    )
    return -drawn @ objective[0]

  # Whatever the third action has, the loss is least if the second has nothing.
  for policy in ([0.1, 1e-9, 0.9], [1.0, 1e-9, 1e-9]):
    assert dpo(jnp.log(jnp.array(policy))) < 1e-6

  def trained(loss, is_done):
    logits, step = start, jax.jit(jax.grad(loss))
    while not is_done(logits):
      logits -= step(logits)
    return jax.nn.softmax(logits), logits

  policy, logits = trained(dpo, lambda x: dpo(x) < 0.01)
  assert policy[1] < 0.01 and policy[2] > 0.6
  assert logits[2] == start[2]  # it has no gradient
  policy, _ = trained(ppo, lambda x: jax.nn.softmax(x)[0] > 0.99)
  assert policy[2] < 0.01
