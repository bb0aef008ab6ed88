"""The critic's loss beside the policy's, with the settings of its section."""

import dataclasses

from jax import numpy as jnp
import numpy as np
import policy_world
import test_value_functions

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.config import sections
from jaxrl_async.training import critic as critic_lib


def config_with(**settings):
  """A run with a critic that has these settings."""
  config = sections.Config()
  config.algorithm.advantage = "gae"
  config.algorithm.advantage_scale = sections.AdvantageScale.BATCH_STD
  config.rollout.max_completion_tokens = policy_world.CONSTANT
  for name, value in settings.items():
    setattr(config.critic, name, value)
  return config


def test_the_value_loss_has_its_coefficient_and_its_clip():
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
  micro = dataclasses.replace(micro, batch=batch, values=values)
  mask = np.asarray(batch.loss_mask)
  rows = [np.asarray(x)[mask] for x in (values, before, targets)]

  def loss(**settings):
    found, _ = algorithm_lib.policy_loss(config_with(**settings))(micro)
    return float(found)

  policy_alone = loss(value_coef=0.0)
  for coef, clip in ((0.5, 0.4), (2.0, 0.4), (0.5, 0.05)):
    of_values = [
      test_value_functions.one_loss(*x, clip)[0]
      for x in zip(*rows, strict=True)
    ]
    np.testing.assert_allclose(
      loss(value_coef=coef, value_clip=clip),
      policy_alone + coef * np.mean(of_values),
      rtol=1e-5,
    )
