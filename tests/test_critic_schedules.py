"""Numbers of the critic's loss that change with the train step."""

import dataclasses

import jax
from jax import numpy as jnp
from ml_collections import config_dict
import numpy as np
import policy_world
import pytest
import test_value_functions

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import schedules
from jaxrl_async.config import sections
from jaxrl_async.training import critic as critic_lib

STEP = 4
# The value of each field, and that of a line at step 10.
FIELDS = {"value_coef": (0.5, 2.0), "value_clip": (0.4, 0.05)}


def config_with(*fields, **settings):
  """A run with a critic and a line for each of these fields."""
  config = sections.Config()
  config.algorithm.advantage = "gae"
  config.algorithm.advantage_scale = sections.AdvantageScale.BATCH_STD
  config.rollout.max_completion_tokens = policy_world.CONSTANT
  for name, value in settings.items():
    setattr(config.critic, name, value)
  for field in fields:
    first, end = FIELDS[field]
    setattr(config.critic, field, first)
    config.algorithm.schedules[field] = config_dict.ConfigDict(
      {
        "schedule": "linear_schedule",
        "end_value": end,
        "transition_steps": 10,
      }
    )
  config_checks.check(config)
  schedules.check(config)
  return config


def at(field, step):
  first, end = FIELDS[field]
  return first + (end - first) * min(step, 10) / 10


def microbatch():
  made = policy_world.arrays()
  micro = policy_world.microbatch(made, policy_world.totals(made))
  values, before, targets, _ = (
    jnp.asarray(x).reshape(policy_world.B, policy_world.T)
    for x in test_value_functions.sample(size=policy_world.B * policy_world.T)
  )
  batch = micro.batch.with_arrays(
    {
      critic_lib.VALUES: before,
      critic_lib.RETURNS: targets,
      critic_lib.NORMALIZED_VALUES: before,
      critic_lib.NORMALIZED_RETURNS: targets,
    }
  )
  return dataclasses.replace(micro, batch=batch, values=values)


@pytest.mark.parametrize("field", FIELDS)
def test_the_value_loss_of_a_step_has_the_number_of_the_step(field):
  micro = microbatch()
  mask = np.asarray(micro.batch.loss_mask)
  rows = [
    np.asarray(x)[mask]
    for x in (
      micro.values,
      micro.batch.fields[critic_lib.NORMALIZED_VALUES],
      micro.batch.fields[critic_lib.NORMALIZED_RETURNS],
    )
  ]
  config = config_with(field)
  scheduled = algorithm_lib.policy_loss(config)
  policy_alone, _ = algorithm_lib.policy_loss(config_with(value_coef=0.0))(
    micro
  )

  @jax.jit
  def loss(step):
    return scheduled(dataclasses.replace(micro, policy_version=step))[0]

  found = []
  for step in (0, STEP, 10, 99):
    now = dataclasses.replace(config.critic)
    setattr(now, field, at(field, step))
    of_values = [
      test_value_functions.one_loss(*x, now.value_clip)[0]
      for x in zip(*rows, strict=True)
    ]
    expected = float(policy_alone) + now.value_coef * np.mean(of_values)
    found.append(float(loss(jnp.int32(step))))
    np.testing.assert_allclose(found[-1], expected, rtol=1e-5)
  assert found[0] != found[1] != found[2] == found[3]
