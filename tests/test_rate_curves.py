"""Learning rates that follow a schedule of Optax, by the update."""

import jax
from jax import numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest

from jaxrl_async.config import sections
from jaxrl_async.training import train_step


def section(rate=0.5, **entry):
  return sections.OptimizerSection(
    learning_rate=rate, rate_curve=config_dict.ConfigDict(entry)
  )


@pytest.mark.parametrize(
  ("entry", "expected"),
  [
    (
      {"curve": "linear_schedule", "end_value": 0.1, "transition_steps": 4},
      [0.5, 0.4, 0.3, 0.2, 0.1, 0.1],
    ),
    (
      {
        "curve": "piecewise_constant_schedule",
        "boundaries_and_scales": {"2": 0.1, "4": 0.1},
      },
      [0.5, 0.5, 0.05, 0.05, 0.005, 0.005],
    ),
    # With a peak it rises from 0 to the rate of the section.
    (
      {"curve": "warmup_constant_schedule", "warmup_steps": 2},
      [0.0, 0.25, 0.5, 0.5, 0.5, 0.5],
    ),
    (
      {
        "curve": "warmup_cosine_decay_schedule",
        "init_value": 0.1,
        "peak_value": 0.3,
        "warmup_steps": 2,
        "decay_steps": 4,
      },
      [0.1, 0.2, 0.3, 0.15, 0.0, 0.0],
    ),
  ],
)
def test_the_rate_of_an_update_is_that_of_the_schedule(entry, expected):
  made = train_step.learning_rate_schedule(
    section(**entry), total_steps=3, decay=0.5
  )
  found = [float(made(i)) for i in range(6)]
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", sections.OptimizerName)
def test_updates_have_the_rate_of_their_number(name):
  """With equal gradients Adam moves a weight by the rate of the update."""
  made = section(curve="linear_schedule", end_value=0.1, transition_steps=4)
  made.name, made.b1, made.b2 = name, 0.0, 0.0
  optimizer = train_step.make_optimizer(
    made, train_step.learning_rate_schedule(made)
  )
  params = {"embed": jnp.zeros(3)}
  state = optimizer.init(params)

  @jax.jit
  def update(state, params):
    gradients = {"embed": jnp.full(3, 0.25)}
    with jax.numpy_dtype_promotion("standard"):
      moved, state = optimizer.update(gradients, state, params)
    return state, optax.apply_updates(params, moved)

  places = [0.0]
  for _ in range(5):
    state, params = update(state, params)
    places.append(float(params["embed"][0]))
  found = -np.diff(places)
  np.testing.assert_allclose(found, [0.5, 0.4, 0.3, 0.2, 0.1], rtol=1e-5)
