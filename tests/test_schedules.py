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
import test_train_step

from jaxrl_async import types
from jaxrl_async.algorithms import value_functions
from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import schedules
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import episodes
from jaxrl_async.training import objectives
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

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
# Of a field that a stage reads: what it needs, its value, and that at step 10.
GAE = {"advantage": "gae", "advantage_scale": sections.AdvantageScale.NONE}
IN_REWARD = {
  "kl_coef": 0.5,
  "kl_in_reward": True,
  "kl_estimator": sections.KlEstimator.K1,
}
STAGE_FIELDS = {
  "gamma": (GAE, 1.0, 0.5),
  "gae_lambda": (GAE, 1.0, 0.5),
  "kl_reward_clip": (IN_REWARD, 1.0, 0.25),
  "second_moment_bound": ({}, 1.0, 0.01),
  "distill_coef": ({"teacher": "anything"}, 0.5, 0.0),
}
# Of a field that the host reads.
REWARD_FIELDS = {
  "reward_bias": ({}, 0.25, 2.0),
  "reward_scale": ({}, 1.0, 3.0),
  "reward_clip": ({}, 2.0, 0.5),
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


def with_values(settings, **values):
  section = sections.AlgorithmSection(**settings)
  for field, value in values.items():
    setattr(section, field, value)
  return section


def stages_of(section):
  """The stages of a section that need no forward pass of a model here."""
  setup = setup_lib.resolve(test_run.make_config("sync"), jax.devices())
  config = sections.Config(algorithm=section)
  setup = dataclasses.replace(setup, config=config)
  return {
    stage.name: stage
    for stage in algorithm_lib.stages(setup)
    if stage.name in ("advantages", "second_moment", "teacher")
  }


@pytest.mark.parametrize(
  ("settings", "field", "first", "end"),
  [
    *((given, name, *ends) for name, (given, *ends) in STAGE_FIELDS.items()),
    (IN_REWARD, "kl_coef", 0.5, 0.0),
    (GAE | IN_REWARD, "kl_coef", 0.5, 0.0),
    (GAE | IN_REWARD, "kl_reward_clip", 1.0, 0.25),
    # A stage that is not the last.
    (GAE | {"second_moment_bound": 0.04}, "gamma", 1.0, 0.5),
  ],
)
def test_a_stage_has_the_value_of_the_step(
  settings, field, first, end, monkeypatch
):
  batch = test_train_step.packed(rows=4, minibatches=2)
  rng = np.random.default_rng(0)

  def random(scale=1.0):
    return rng.normal(0, scale, batch.tokens.shape).astype(np.float32)

  behavior = batch.behavior_logprobs
  batch = batch.with_arrays(
    {
      objectives.REFERENCE: behavior + random(),
      objectives.PROXIMAL: behavior + random(0.2),
      critic_lib.VALUES: random(),
      critic_lib.VALUES_AFTER: random(),
      episodes.REWARDS: random(),
      episodes.CUT_OFF: (random() > 0).astype(np.float32),
    }
  )
  teacher = jnp.asarray(behavior + random())
  monkeypatch.setattr(train_step, "batch_logprobs", lambda *_: teacher)
  models = {
    name: {train_state.RETURN_STATISTICS: None}
    for name in (train_state.CRITIC, train_state.TEACHER)
  }

  forwards = dict.fromkeys(models, test_train_step.FORWARD)

  def made(section, step):
    # The statistics of returns have no part in what is compared here.
    monkeypatch.setattr(critic_lib, "_with_returns", lambda *_: None)
    monkeypatch.setattr(value_functions, "normalized", lambda x, _: x)
    return {
      name: value
      for stage in stages_of(section).values()
      for name, value in jax.jit(
        lambda batch, step, run=stage.run: run(forwards, models, batch, step)
      )(batch, np.int32(step)).items()
    }

  section = with_values(settings, **{field: first})
  section.schedules = config_dict.ConfigDict({field: line(end)})
  config = sections.Config(algorithm=section)
  if not section.teacher:
    config_checks.check(config)
    schedules.check(config)
  for step in (0, STEP, 10, 99):
    value = first + (end - first) * min(step, 10) / 10
    found = made(section, step)
    # A fixed number that is 0 would leave the stage out.
    fixed = made(with_values(settings, **{field: value or 1e-30}), step)
    assert found.keys() == fixed.keys() and found
    for name, array in found.items():
      np.testing.assert_allclose(
        array, fixed[name], rtol=1e-5, atol=1e-6, err_msg=name
      )
  first_found, last = made(section, 0), made(section, 10)
  assert any(np.any(first_found[x] != last[x]) for x in last)


@pytest.mark.parametrize("field", REWARD_FIELDS)
def test_rewards_have_the_shape_of_the_step(field):
  settings, first, end = REWARD_FIELDS[field]
  settings |= {"advantage_scale": sections.AdvantageScale.NONE}
  settings |= {"reward_clip": 2.0}  # without it a bias changes nothing
  groups = test_train_step.groups()
  for i, trajectory in enumerate(t for g in groups for t in g.trajectories):
    scores = {0: 1.5} if i % 2 else {}
    trajectory.reward = types.Reward(score=i / 4, token_scores=scores)
  trajectories = [t for g in groups for t in g.trajectories]
  for kind in ({}, {"advantage": "segment"}, GAE):
    section = with_values(settings | kind, **{field: first})
    section.schedules = config_dict.ConfigDict({field: line(end)})
    config = sections.Config(algorithm=section)
    config_checks.check(config)
    schedules.check(config)
    found = []
    for step in (0, STEP, 99):
      value = first + (end - first) * min(step, 10) / 10
      fixed = with_values(settings | kind, **{field: value})
      if kind is GAE:
        makers = [algorithm_lib.fields(x) for x in (section, fixed)]
        now, wanted = (
          make(trajectories, step)[episodes.REWARDS] for make in makers
        )
      else:
        makers = [algorithm_lib.advantages(x) for x in (section, fixed)]
        now, wanted = (make(groups, step) for make in makers)
      now, wanted = (np.hstack(list(x)) for x in (now, wanted))
      np.testing.assert_allclose(now, wanted, atol=1e-5)
      found.append(now)
    assert np.any(found[0] != found[1]) and np.any(found[1] != found[2])


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
  made = schedules.make(config)
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


@pytest.mark.slow
def test_a_run_and_its_continuation_follow_one_schedule(tmp_path):
  def config(num_steps):
    made = test_run.make_config(num_steps=num_steps, eval={"num_items": 4})
    made.algorithm.entropy_coef = 0.5
    made.algorithm.num_epochs = 2
    made.algorithm.schedules = config_dict.ConfigDict(
      {"entropy_coef": line(0.0), "clip_high": line(0.4)}
    )
    # 4 updates in each step.
    made.train.optimizer.learning_rate = 8e-4
    made.train.optimizer.rate_schedule = config_dict.ConfigDict(line(3e-4))
    return made

  for num_steps in (2, 4):
    test_run.start(config(num_steps), tmp_path)
  steps = test_run.lines(tmp_path, "metrics")[1:]
  for name, values in (
    ("schedule/entropy_coef", [0.5, 0.45, 0.4, 0.35]),
    ("schedule/clip_high", [0.2, 0.22, 0.24, 0.26]),
    ("policy/lr", [8e-4, 6e-4, 4e-4, 3e-4]),
  ):
    np.testing.assert_allclose([x[name] for x in steps], values, rtol=1e-6)


def test_a_coefficient_may_begin_at_0_with_a_reference_that_moves():
  entries = {"kl_coef": line(0.4, init_value=0.0)}
  config = config_with(entries, kl_coef=0.1, reference_every=2)
  schedules.check(config)
