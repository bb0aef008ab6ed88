"""Learning rates that follow a schedule of Optax."""

import jax
from jax import numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest
import test_rules
import test_run

from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import rate_schedules
from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections
from jaxrl_async.training import train_step

GAE, HERE = test_rules.GAE, test_rules.HERE
line, config_of = test_rules.line, test_rules.config_of
is_refused = test_rules.is_refused


def section(rate=0.5, **entry):
  return sections.OptimizerSection(
    learning_rate=rate, rate_schedule=config_dict.ConfigDict(entry)
  )


@pytest.mark.parametrize(
  ("entry", "expected"),
  [
    (
      {"schedule": "linear_schedule", "end_value": 0.1, "transition_steps": 4},
      [0.5, 0.4, 0.3, 0.2, 0.1, 0.1],
    ),
    (
      {
        "schedule": "piecewise_constant_schedule",
        "boundaries_and_scales": {"2": 0.1, "4": 0.1},
      },
      [0.5, 0.5, 0.05, 0.05, 0.005, 0.005],
    ),
    # With a peak it rises from 0 to the rate of the section.
    (
      {"schedule": "warmup_constant_schedule", "warmup_steps": 2},
      [0.0, 0.25, 0.5, 0.5, 0.5, 0.5],
    ),
    (
      {
        "schedule": "warmup_cosine_decay_schedule",
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
  made = section(schedule="linear_schedule", end_value=0.1, transition_steps=4)
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


def test_the_schedules_that_a_config_may_name_are_in_optax():
  for name in algorithm_section.SCHEDULES:
    assert callable(getattr(optax.schedules, name))


@pytest.mark.parametrize("of", ["train", "warm_start", "preference", "critic"])
def test_every_optimizer_may_have_a_schedule_and_it_is_checked(of):
  path = f"{of}.optimizer.rate_schedule"
  settings = {
    "train.num_steps": 3,  # 12 updates
    "warm_start.num_steps": 12,
    "warm_start.checkpoint": HERE,
    "preference.num_steps": 12,
    **(GAE if of == "critic" else {}),
  }

  def check(config):
    config_checks.check(config)
    rate_schedules.check(config)

  check(config_of(settings | {path: line(1e-4)}))
  for entry, message in (
    ({"end_value": 0.1}, "...names no schedule"),
    (
      line(0.1) | {"schedule": "join_schedules"},
      "...is not one of",
    ),
    (line(0.1) | {"end": 1}, "...no argument 'end'; did you mean end_value"),
    (line((1, 2)), "'end_value' is (1, 2); use a number"),
    (line(1.7), f"it becomes 1.7 at update 10, and {of}.optimizer.learning_ra"),
    (
      {"schedule": "linear_schedule", "end_value": 0.1},
      "Optax refuses it ...transition_steps",
    ),
    (line("low"), "Optax refuses it"),
    (
      {
        "schedule": "piecewise_constant_schedule",
        "boundaries_and_scales": {"soon": 0.5},
      },
      "Optax refuses it ...soon",
    ),
    (
      {
        "schedule": "exponential_decay",
        "transition_steps": 1,
        "decay_rate": 1e30,
      },
      "it becomes inf at update",
    ),
    (line(-0.1), f"it becomes -0.1 at update 10, and {of}.optimizer.learning"),
  ):
    is_refused(check, settings | {path: entry}, f"{path}: {message}")


@pytest.mark.slow
def test_a_run_and_its_continuation_follow_one_schedule(tmp_path):
  for num_steps in (2, 4):
    config = test_run.make_config(num_steps=num_steps, eval={"num_items": 4})
    config.algorithm.num_epochs = 2  # 4 updates in each step
    config.train.optimizer.learning_rate = 8e-4
    config.train.optimizer.rate_schedule = config_dict.ConfigDict(
      {
        "schedule": "linear_schedule",
        "end_value": 3e-4,
        "transition_steps": 10,
      }
    )
    test_run.start(config, tmp_path)
  rates = [x["policy/lr"] for x in test_run.lines(tmp_path, "metrics")[1:]]
  np.testing.assert_allclose(rates, [8e-4, 6e-4, 4e-4, 3e-4], rtol=1e-6)
