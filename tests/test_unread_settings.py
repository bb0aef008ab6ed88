"""Settings without an effect: they are told, and do have none."""

import copy

import policy_world
import pytest
import test_algorithms

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.run import algorithm as algorithm_lib
from jaxrl_async.run import config_checks
from jaxrl_async.run import unread_settings

Level, Mode = sections.BehaviorWeightLevel, sections.BehaviorWeightCapMode
BATCH_STD = sections.AdvantageScale.BATCH_STD
OWN = {"loss": "my:loss"}
NOTHING = {
  "advantage": "none",
  "advantage_scale": sections.AdvantageScale.NONE,
  "teacher": ".",
  "distill_coef": 1.0,
}
COUPLED = {"loss": "coupled_ppo", "behavior_weight_level": Level.NONE}
# Other values of each field that a loss reads, beyond the bound of some token.
CHANGED = {
  "clip_low": 0.1,
  "clip_high": 0.1,
  "dual_clip": 1.5,
  "sapo_positive": 3.0,
  "sapo_negative": 3.0,
  "behavior_weight_level": Level.SEQUENCE_MEAN,
  "behavior_weight_floor": 0.9,
  "behavior_weight_cap": 1.15,
  "behavior_weight_cap_mode": Mode.TRUNCATE,
  "second_moment_bound": policy_world.SECOND_MOMENT,
  "sequence_kl_bound": 0.1,
  "aggregation": sections.Aggregation.SEQUENCE_MEAN,
  "aggregation_tokens": 3,
  "kl_estimator": sections.KlEstimator.K2,
}


def notes(config):
  found = []
  unread_settings.settled(config, found.append)
  return found


def test_every_reason_is_of_a_field():
  config = test_algorithms.config_with(**OWN)
  paths = {path for path, *_ in fields_lib.walk(config)}
  assert unread_settings.reasons(config).keys() <= paths


@pytest.mark.parametrize(
  ("settings", "names"),
  [
    ({"sapo_positive": 2.0}, "sapo_positive algorithm.loss"),
    ({"dual_clip": 3.0, "loss": "gspo"}, "dual_clip algorithm.loss"),
    (
      {"aggregation_tokens": 8},
      "aggregation_tokens algorithm.aggregation sequence_sum",
    ),
    (
      {"behavior_weight_level": Level.NONE, "behavior_weight_floor": 0.5},
      "behavior_weight_floor algorithm.behavior_weight_level",
    ),
    ({"gamma": 0.9}, "gamma algorithm.advantage gae"),
    ({"gae_lambda": 0.9}, "gae_lambda algorithm.advantage gae"),
    ({"kl_in_reward": True}, "kl_in_reward algorithm.kl_coef"),
    ({"kl_reward_clip": 1.0}, "kl_reward_clip algorithm.kl_in_reward"),
    ({"reference_every": 2}, "reference_every algorithm.kl_coef"),
    ({"reference_offload": True}, "reference_offload algorithm.kl_coef"),
    (
      {"kl_coef": 0.1, "reference_decay": 0.9},
      "reference_decay algorithm.reference_every",
    ),
    ({"loss": "sapo", "clip_low": 0.1}, "clip_low algorithm.loss"),
    ({"loss": "reinforce", "clip_high": 0.3}, "clip_high algorithm.loss"),
    (
      COUPLED | {"behavior_weight_cap": 2.0},
      "behavior_weight_cap algorithm.behavior_weight_level",
    ),
    (
      COUPLED | {"behavior_weight_cap_mode": Mode.TRUNCATE},
      "behavior_weight_cap_mode truncate algorithm.behavior_weight_level",
    ),
    (
      {"kl_estimator": sections.KlEstimator.K1},
      "kl_estimator k1 algorithm.kl_coef",
    ),
    (OWN | {"clip_low": 0.1}, "clip_low algorithm.loss"),
    (NOTHING | {"reward_bias": 0.5}, "reward_bias algorithm.advantage none"),
    (NOTHING | {"reward_scale": 2.0}, "reward_scale algorithm.advantage none"),
    (NOTHING | {"reward_clip": 3.0}, "reward_clip algorithm.advantage none"),
    (
      OWN | {"behavior_weight_level": Level.NONE},
      "behavior_weight_level algorithm.loss",
    ),
    (OWN | {"sequence_kl_bound": 0.1}, "sequence_kl_bound algorithm.loss"),
    (
      OWN | {"aggregation": sections.Aggregation.SEQUENCE_MEAN},
      "aggregation algorithm.loss",
    ),
  ],
)
def test_a_setting_that_nothing_reads_is_told(settings, names):
  config = test_algorithms.config_with(**settings)
  first, *others = names.split()
  config_checks.check(config)
  (note,) = notes(config)
  assert note.startswith(f"algorithm.{first}: ") and "\n" not in note
  assert all(other in note for other in others), note
  usual = getattr(sections.AlgorithmSection(), first)
  settled = unread_settings.settled(config)
  assert getattr(settled.algorithm, first) == usual
  assert getattr(config.algorithm, first) == settings[first] != usual
  assert not notes(settled)


@pytest.mark.parametrize(
  ("settings", "names"),
  [
    (
      COUPLED | {"proximal": sections.ProximalMode.LOGLINEAR},
      "proximal loglinear algorithm.loss reuse",
    ),
    (
      {"advantage": "my:advantage", "advantage_scale": BATCH_STD},
      "advantage_scale algorithm.advantage none",
    ),
  ],
)
def test_a_choice_that_its_partner_does_not_have_is_refused(settings, names):
  first, *others = names.split()
  with pytest.raises(sections.ConfigError) as caught:
    config_checks.check(test_algorithms.config_with(**settings))
  message = str(caught.value)
  assert message.startswith(f"algorithm.{first}: ") and "\n" not in message
  assert all(other in message for other in others), message


def test_a_control_that_is_off_has_no_settings():
  config = sections.Config()
  config.staleness_control.patience = 3
  (note,) = notes(config)
  assert note.startswith("staleness_control.patience: 3 has no effect")
  assert "staleness_control.maximum" in note
  config.staleness_control.maximum = 4
  assert not notes(config)


def test_an_average_of_penalties_alone_has_an_effect():
  for settings in ({"entropy_coef": 0.1}, {"kl_coef": 0.1}):
    made = OWN | settings | {"aggregation": sections.Aggregation.SEQUENCE_MEAN}
    assert not notes(test_algorithms.config_with(**made))


@pytest.mark.parametrize(
  "case",
  [
    *("two-sided truncation", "coupled ppo", "gspo", "cispo"),
    *("sapo", "reinforce"),
  ],
)
def test_a_setting_changes_the_loss_unless_it_is_told(case):
  made = policy_world.arrays()
  micro = policy_world.microbatch(made, policy_world.totals(made))

  def loss_of(section):
    config = sections.Config(algorithm=section)
    config.rollout.max_completion_tokens = policy_world.CONSTANT
    return float(algorithm_lib.policy_loss(config)(micro)[0])

  section = policy_world.section(case)
  unread = unread_settings.reasons(sections.Config(algorithm=section))
  usual = loss_of(section)
  for field, value in CHANGED.items():
    other = copy.copy(section)
    if getattr(section, field) == value:  # the case has it already
      value = getattr(sections.AlgorithmSection(), field)
    setattr(other, field, value)
    is_unread = f"algorithm.{field}" in unread
    assert (loss_of(other) == usual) is is_unread, field
