"""Rates that follow a schedule of Optax, and what no setting may follow."""

import jax
from jax import numpy as jnp
from ml_collections import config_dict
import numpy as np
import optax
import pytest
import test_critic_schedules
import test_rules
import test_schedules

from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import schedules
from jaxrl_async.config import rules
from jaxrl_async.config import sections
from jaxrl_async.training import train_step

GAE, OWN, HERE = test_rules.GAE, test_rules.OWN, test_rules.HERE
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


def test_there_is_a_case_for_every_field_that_may_have_a_schedule():
  known = [
    *(*test_schedules.FIELDS, *test_schedules.STAGE_FIELDS),
    *(*test_schedules.REWARD_FIELDS, *test_critic_schedules.FIELDS),
  ]
  assert len(known) == len({*known})
  assert {*known} == {*rules.schedules()}


@pytest.mark.parametrize(
  ("entries", "settings", "message"),
  [
    ({"clip_hi": line(0.1)}, {}, "'clip_hi' has none...use one of clip_low"),
    (
      {"learning_rate": line(0.1)},
      {},
      "'learning_rate' has none (rate_schedule",
    ),
    ({"max_staleness": line(1)}, {}, "'max_staleness' ...staleness_control"),
    ({"temperature": line(0.5)}, {}, "'temperature' has none (stored logprobs"),
    ({"normalize_decay": line(0.5)}, GAE, "'normalize_decay' ...average"),
    ({"clip_low": 0.1}, {}, "clip_low: 0.1 names no schedule"),
    ({"clip_low": {"end_value": 0.1}}, {}, "clip_low: ...names no schedule"),
    (
      {"clip_low": {"schedule": "join_schedules"}},
      {},
      "...is not one",
    ),
    ({"clip_low": {"schedule": 3}}, {}, "clip_low: 3 is not one of ...cosine"),
    (
      {"clip_low": line((1, 2))},
      {},
      "clip_low: 'end_value' is (1, 2); use a number",
    ),
    # What nothing reads, or what is off.
    ({"sapo_positive": line(2.0)}, {}, "sapo_positive: ...algorithm.loss"),
    ({"clip_low": line(0.1)}, OWN, "clip_low: ...'my:loss' (algorithm.loss)"),
    ({"gamma": line(0.9)}, {}, "gamma: it has no effect, ...gae"),
    ({"value_coef": line(0.1)}, {}, "value_coef: ...no critic without gae"),
    ({"kl_coef": line(0.1)}, {}, "kl_coef: algorithm.kl_coef=0 leaves it ..."),
    ({"second_moment_bound": line(0.1)}, {}, "second_moment_bound: ...=0 leav"),
    # What Optax does not take.
    (
      {"clip_low": line(0.1) | {"end": 0.2}},
      {},
      "clip_low: ...no argument 'end'; did you mean end_value",
    ),
    (
      {"clip_low": {"schedule": "linear_schedule", "end_value": 0.1}},
      {},
      "clip_low: Optax refuses it ...transition_steps",
    ),
    ({"clip_low": line("low")}, {}, "clip_low: Optax refuses it"),
    (
      {
        "clip_low": {
          "schedule": "piecewise_constant_schedule",
          "boundaries_and_scales": {"soon": 0.5},
        }
      },
      {},
      "clip_low: Optax refuses it ...soon",
    ),
    # What leaves the bounds of the field on the way.
    (
      {"clip_low": line(1.5)},
      {},
      "clip_low becomes 1.5 at train step 10, and algorithm.clip_low: 1.5 is",
    ),
    (
      {"clip_low": line(1.5)},
      {"train.num_steps": 2**28},
      "clip_low becomes 1.5 at train step",
    ),
    (
      {"entropy_coef": line(-1.0)},
      {"algorithm.entropy_coef": 1.0},
      "entropy_coef becomes -1 at train step 10, and algorithm.entropy_coef",
    ),
    (
      {"reward_scale": line(0.0)},
      {},
      "reward_scale becomes 0 at train step 10, and algorithm.reward_scale",
    ),
    (
      {"dual_clip": line(0.0)},
      {"algorithm.dual_clip": 3.0},
      "dual_clip becomes 0 ...switch it off",
    ),
    ({"value_clip": line(0.0)}, GAE, "value_clip becomes 0 ...switch it off"),
    ({"value_coef": line(-1.0)}, GAE, "value_coef becomes -1 ...critic.value_"),
    (
      {"dual_clip": line(0.5)},
      {"algorithm.dual_clip": 3.0},
      "dual_clip becomes 0.5 at train step 10, and algorithm.dual_clip: 0.5",
    ),
    (
      {
        "entropy_coef": {
          "schedule": "exponential_decay",
          "transition_steps": 1,
          "decay_rate": 1e30,
        }
      },
      {"algorithm.entropy_coef": 1.0},
      "entropy_coef becomes inf at train step 2, ...finite",
    ),
  ],
  ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_a_schedule_is_refused(entries, settings, message):
  def check(config):
    config_checks.check(config)
    schedules.check(config)

  settings = settings | {"algorithm.schedules": entries}
  is_refused(check, settings, f"algorithm.schedules: {message}")


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
    schedules.check(config)

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
    (line(-0.1), f"it becomes -0.1 at update 10, and {of}.optimizer.learning"),
  ):
    is_refused(check, settings | {path: entry}, f"{path}: {message}")
