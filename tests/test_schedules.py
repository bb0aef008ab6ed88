"""Fields of the algorithm that change with the train step."""

import copy
import dataclasses
import math

import jax
from jax import numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import policy_world
import pytest
import test_policy_losses
import test_run

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections
from jaxrl_async.run import algorithm as algorithm_lib
from jaxrl_async.run import algorithm_checks
from jaxrl_async.run import config_checks
from jaxrl_async.run import schedules

STEP = 4
# The case of each field, and the value at step 10 of a line from its own.
FIELDS = {
  "clip_low": ("decoupled ppo", 0.45),
  "clip_high": ("gspo", 0.375),
  "dual_clip": ("dual clip", 1.5),
  "sapo_positive": ("sapo", 2.0),
  "sapo_negative": ("sapo", 0.5),
  "behavior_weight_floor": ("icepop", 0.875),
  "behavior_weight_cap": ("decoupled ppo", 3.125),
  "sequence_kl_bound": ("sequences far off", 2.8),
  "kl_coef": ("penalties", 0.0),
  "entropy_coef": ("penalties", 1.0),
}


def line(end, **more):
  return {
    "schedule": "linear_schedule",
    "end_value": end,
    "transition_steps": 10,
    **more,
  }


def config_with(entries, **settings):
  section = sections.AlgorithmSection(**settings)
  section.schedules = config_dict.ConfigDict(entries)
  return sections.Config(algorithm=section)


def refusal(config):
  """The message of the check without JAX, or else of the other."""
  with pytest.raises(sections.ConfigError) as caught:
    config_checks.check(config)
    schedules.check(config)
  message = str(caught.value)
  assert message.startswith("algorithm.schedules: ") and "\n" not in message
  assert len(message) < 600
  return message


def test_there_is_a_case_for_every_field_that_may_have_a_schedule():
  assert FIELDS.keys() == algorithm_checks._SCHEDULED.keys()


@pytest.mark.parametrize("field", FIELDS)
def test_the_loss_of_a_step_is_the_equation_with_the_value_of_the_step(field):
  case, end = FIELDS[field]
  section = policy_world.section(case)
  first = getattr(section, field)
  config = sections.Config(algorithm=copy.copy(section))
  config.algorithm.schedules = config_dict.ConfigDict({field: line(end)})
  config.rollout.max_completion_tokens = policy_world.CONSTANT
  config_checks.check(config)
  schedules.check(config)
  made = policy_world.arrays()
  micro = policy_world.microbatch(made, policy_world.totals(made))
  scheduled = algorithm_lib.policy_loss(config)

  @jax.jit
  def loss(step):
    return scheduled(dataclasses.replace(micro, policy_version=step))

  losses = []
  for step in (0, STEP, 10, 99):
    value = first + (end - first) * min(step, 10) / 10
    setattr(section, field, value)
    found, _ = loss(jnp.int32(step))
    expected, _ = test_policy_losses.transcribed(section, made)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    losses.append(float(found))
  assert losses[0] != losses[2] == losses[3]


def test_schedules_of_optax_and_where_they_start():
  for name in algorithm_section.SCHEDULES:
    assert callable(getattr(optax.schedules, name))
  entries = {
    "clip_high": {
      "schedule": "piecewise_constant_schedule",
      "boundaries_and_scales": {"3": 0.5, "6": 0.5},
    },
    "entropy_coef": {
      "schedule": "cosine_decay_schedule",
      "decay_steps": 10,
      "alpha": 0.1,
    },
    "kl_coef": line(0.4, init_value=0.0),
  }
  config = config_with(entries, clip_high=0.4, entropy_coef=0.2, kl_coef=0.1)
  config_checks.check(config)
  schedules.check(config)
  made = schedules.make(config.algorithm)
  assert made.keys() == entries.keys()
  steps = (0, 4, 7, 10)
  expected = {
    "clip_high": [0.4, 0.2, 0.1, 0.1],
    "entropy_coef": [
      0.2 * (0.1 + 0.9 * (1 + math.cos(math.pi * s / 10)) / 2) for s in steps
    ],
    "kl_coef": [0.0, 0.16, 0.28, 0.4],
  }
  for field, values in expected.items():
    found = [float(made[field](step)) for step in steps]
    np.testing.assert_allclose(found, values, rtol=1e-6, err_msg=field)


@pytest.mark.parametrize(
  ("entries", "settings", "words"),
  [
    ({"clip_hi": line(0.1)}, {}, "'clip_hi' clip_high"),
    ({"learning_rate": line(0.1)}, {}, "'learning_rate' entropy_coef"),
    # A stage and the host read these.
    (
      {"second_moment_bound": line(0.1)},
      {"second_moment_bound": 0.04},
      "'second_moment_bound' is not read in the update",
    ),
    ({"reward_scale": line(0.1)}, {}, "'reward_scale' is not read"),
    ({"clip_low": 0.1}, {}, "clip_low: 0.1 names no schedule"),
    ({"clip_low": {"end_value": 0.1}}, {}, "clip_low names no schedule"),
    ({"clip_low": {"schedule": "join_schedules"}}, {}, "clip_low is not one"),
    ({"clip_low": {"schedule": 3}}, {}, "clip_low is not one cosine_decay"),
    (
      {"clip_low": line((1, 2))},
      {},
      "clip_low 'end_value' is (1, 2) use a number",
    ),
    ({"sapo_positive": line(2.0)}, {}, "sapo_positive algorithm.loss sapo"),
    (
      {"clip_low": line(0.1)},
      {"loss": "a.b:c"},
      "clip_low 'a.b:c' algorithm.loss",
    ),
    (
      {"kl_coef": line(0.1)},
      {},
      "kl_coef algorithm.kl_coef=0 leaves init_value",
    ),
    (
      {"behavior_weight_cap": line(3.0)},
      {"behavior_weight_level": sections.BehaviorWeightLevel.NONE},
      "behavior_weight_cap algorithm.behavior_weight_level",
    ),
    (
      {"kl_coef": line(0.2)},
      {
        "kl_coef": 0.1,
        "kl_in_reward": True,
        "kl_estimator": sections.KlEstimator.K1,
      },
      "kl_coef algorithm.kl_in_reward",
    ),
    # What Optax does not take.
    (
      {"clip_low": {**line(0.1), "end": 0.2}},
      {},
      "clip_low no argument 'end'; did you mean end_value",
    ),
    (
      {"clip_low": {"schedule": "linear_schedule", "end_value": 0.1}},
      {},
      "clip_low Optax refuses it transition_steps",
    ),
    (
      {"clip_low": line("low")},
      {},
      "clip_low Optax refuses it",
    ),
    (
      {
        "clip_low": {
          "schedule": "piecewise_constant_schedule",
          "boundaries_and_scales": {"soon": 0.5},
        }
      },
      {},
      "clip_low Optax refuses it soon",
    ),
    # What leaves the bounds of the field on the way.
    (
      {"clip_low": line(1.5)},
      {},
      "clip_low becomes 1.5 at train step 10, algorithm.clip_low",
    ),
    (
      {"entropy_coef": line(-1.0)},
      {"entropy_coef": 1.0},
      "entropy_coef becomes -1 step 10 algorithm.entropy_coef",
    ),
    (
      {"dual_clip": line(0.0)},
      {"dual_clip": 3.0},
      "dual_clip becomes 0 switch it off",
    ),
    (
      {"dual_clip": line(0.5)},
      {"dual_clip": 3.0},
      "dual_clip becomes 0.5 at train step 10 algorithm.dual_clip",
    ),
    (
      {
        "entropy_coef": {
          "schedule": "exponential_decay",
          "transition_steps": 1,
          "decay_rate": 1e30,
        }
      },
      {"entropy_coef": 1.0},
      "entropy_coef becomes inf at train step 2 finite",
    ),
  ],
)
def test_what_cannot_be_scheduled_is_refused_in_one_line(
  entries, settings, words
):
  config = config_with(entries, **settings)
  config.train.num_steps = 60
  message = refusal(config)
  for word in words.split():
    assert word in message, message


def test_a_run_of_very_many_steps_is_tried_at_some_of_them():
  config = config_with({"clip_low": line(1.5)})
  config.train.num_steps = 2**28
  assert "becomes 1.5" in refusal(config)
  config.train.num_steps = 5
  schedules.check(config)


@pytest.mark.slow
def test_a_run_and_its_continuation_follow_one_schedule(tmp_path):
  def config(num_steps):
    made = test_run.make_config(num_steps=num_steps, eval={"num_items": 4})
    made.algorithm.entropy_coef = 0.5
    made.algorithm.num_epochs = 2
    made.algorithm.schedules = config_dict.ConfigDict(
      {"entropy_coef": line(0.0), "clip_high": line(0.4)}
    )
    return made

  for num_steps in (2, 4):
    test_run.start(config(num_steps), tmp_path)
  steps = test_run.lines(tmp_path, "metrics")[1:]
  for name, values in (
    ("schedule/entropy_coef", [0.5, 0.45, 0.4, 0.35]),
    ("schedule/clip_high", [0.2, 0.22, 0.24, 0.26]),
  ):
    np.testing.assert_allclose([x[name] for x in steps], values, rtol=1e-6)
  assert steps[0]["policy/lr"] == steps[3]["policy/lr"] > 0


def test_a_coefficient_may_begin_at_0_with_a_reference_that_moves():
  entries = {"kl_coef": line(0.4, init_value=0.0)}
  config = config_with(entries, kl_coef=0.1, reference_every=2)
  schedules.check(config)
