"""Learning rates that follow a schedule of Optax, by the update."""

import jax
from jax import numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest

from jaxrl_async.config import sections
from jaxrl_async.run import config_checks
from jaxrl_async.run import schedules
from jaxrl_async.run import unread_settings
from jaxrl_async.training import train_step


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


def config_with(changes, path="train.optimizer.rate_schedule"):
  config = sections.Config()
  config.train.num_steps = 2  # 8 updates
  for name, value in {path: changes}.items():
    *owners, last = name.split(".")
    place = config
    for owner in owners:
      place = getattr(place, owner)
    setattr(place, last, config_dict.ConfigDict(value))
  return config


def refusal(config):
  with pytest.raises(sections.ConfigError) as caught:
    config_checks.check(config)
    schedules.check(config)
  message = str(caught.value)
  assert "\n" not in message and len(message) < 600
  return message


LINE = {
  "schedule": "linear_schedule",
  "end_value": 1e-4,
  "transition_steps": 7,
}


@pytest.mark.parametrize("of", ["train", "warm_start", "preference", "critic"])
def test_every_optimizer_may_have_one_and_it_is_checked(of):
  path = f"{of}.optimizer.rate_schedule"

  def made(entry):
    config = config_with(entry, path)
    config.warm_start.num_steps = config.preference.num_steps = 8
    config.warm_start.checkpoint = "."
    if of == "critic":
      config.algorithm.advantage = "gae"
      config.algorithm.advantage_scale = sections.AdvantageScale.BATCH_STD
    return config

  config = made(LINE)
  config_checks.check(config)
  schedules.check(config)
  for entry, words in (
    ({"end_value": 0.1}, "names no schedule"),
    (LINE | {"schedule": "join_schedules"}, "'join_schedules' is not one of"),
    (LINE | {"end": 1}, "no argument 'end'; did you mean end_value"),
    (LINE | {"end_value": (1, 2)}, "'end_value' use a number"),
    (LINE | {"end_value": 1.7}, f"at update 7 {of}.optimizer.learning_rate"),
    (LINE | {"end_value": -0.1}, f"at update 7 {of}.optimizer.learning_rate"),
  ):
    message = refusal(made(entry))
    assert message.startswith(f"{path}: "), message
    assert all(word in message for word in words.split()), message


def test_settings_that_a_schedule_replaces_are_told():
  def told(config):
    notes = []
    unread_settings.settled(config, notes.append)
    return [note.partition(":")[0] for note in notes]

  config = config_with(LINE)
  config.train.decay = 0.1
  assert told(config) == ["train.decay"]
  # The critic's rate still has that decay.
  config.algorithm.advantage = "gae"
  config.algorithm.advantage_scale = sections.AdvantageScale.BATCH_STD
  assert not told(config)
  config.critic.optimizer.rate_schedule = config_dict.ConfigDict(LINE)
  assert told(config) == ["train.decay"]
  config.train.optimizer.warmup_steps = 3
  assert set(told(config)) == {"train.decay", "train.optimizer.warmup_steps"}
