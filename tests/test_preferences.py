"""Losses of pairs and of steps: float64 transcriptions, gradients, PyTorch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
