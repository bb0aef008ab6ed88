"""Settings without an effect: they are told, and do have none."""

import copy
import re

import policy_world
import pytest
import test_rules

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import config_checks
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections

GAE, OWN, COUPLED = test_rules.GAE, test_rules.OWN, test_rules.COUPLED
NOTHING = test_rules.NOTHING
line, config_of = test_rules.line, test_rules.config_of


@pytest.mark.parametrize(
  ("settings", "note"),
  [
    ({"algorithm.sapo_positive": 2.0}, "2 ...algorithm.loss) has no gate"),
    ({"transfer.directory": "/tmp"}, "'/tmp' ...copied from device to device"),
    (
      {"algorithm.dual_clip": 3.0, "algorithm.loss": "gspo"},
      "3 has no effect, because 'gspo' (algorithm.loss) has no second clip",
    ),
    (
      {"algorithm.aggregation_tokens": 8},
      "8 ...algorithm.aggregation...sequence_sum",
    ),
    (
      {
        "algorithm.behavior_weight_floor": 0.5,
        "algorithm.behavior_weight_level": "none",
      },
      "0.5 ...algorithm.behavior_weight_level is none",
    ),
    ({"algorithm.gamma": 0.9}, "0.9 ...gae...algorithm.advantage is group"),
    ({"algorithm.kl_in_reward": True}, "True ...algorithm.kl_coef is 0"),
    ({"algorithm.kl_reward_clip": 1.0}, "1 ...algorithm.kl_in_reward is False"),
    ({"algorithm.reference_every": 2}, "2 ...algorithm.kl_coef is 0"),
    (
      {"algorithm.reference_decay": 0.9, "algorithm.kl_coef": 0.1},
      "0.9 ...algorithm.reference_every is 0",
    ),
    (
      {"algorithm.clip_low": 0.1, "algorithm.loss": "sapo"},
      "0.1 ...'sapo' (algorithm.loss) has no clip",
    ),
    (
      {"algorithm.behavior_weight_cap_mode": "truncate"} | COUPLED,
      "truncate ...algorithm.behavior_weight_level is none",
    ),
    ({"algorithm.kl_estimator": "k1"}, "k1 ...algorithm.kl_coef is 0"),
    ({"algorithm.clip_low": 0.1} | OWN, "0.1 ...'my:loss' (algorithm.loss)"),
    ({"algorithm.reward_scale": 2.0} | NOTHING, "2 ...algorithm.advantage is "),
    ({"algorithm.sequence_kl_bound": 0.1} | OWN, "0.1 ...own corrections"),
    ({"algorithm.aggregation": "sequence_mean"} | OWN, "...its own average"),
    ({"critic.value_coef": 0.1}, "0.1 ...no critic without gae"),
    ({"staleness_control.patience": 3}, "3 ...staleness_control.maximum is 0"),
    ({"warm_start.patience": 2}, "2 ...nothing is measured"),
    (
      {"preference.label_smoothing": 0.1, "preference.loss": "ipo"},
      "0.1 ...ipo (preference.loss)",
    ),
    (
      {"train.decay": 0.1, "train.optimizer.rate_schedule": line(0.1)},
      "0.1 ...rate_schedule says how the rate changes",
    ),
    (
      {
        "train.optimizer.warmup_steps": 3,
        "train.optimizer.rate_schedule": line(0.1),
      },
      "3 ...rate_schedule says how the rate changes",
    ),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_setting_that_nothing_reads_is_told(settings, note):
  config, notes = config_of(settings), []
  path = next(iter(settings))
  config_checks.check(config)
  settled = fields_lib.settled(config, notes.append)
  pattern = re.escape(f"{path}: {note}").replace(r"\.\.\.", ".*")
  assert len(notes) == 1 and re.match(pattern, notes[0]), notes
  assert "\n" not in notes[0]

  def value_in(config):
    found = {field.path: field.value for field in fields_lib.walk(config)}
    return found[path]

  assert value_in(settled) == value_in(sections.Config()) != value_in(config)
  assert fields_lib.settled(settled, notes.append) == settled
  assert len(notes) == 1


@pytest.mark.parametrize(
  "settings",
  [
    OWN | {"algorithm.entropy_coef": 0.1},
    OWN | {"algorithm.kl_coef": 0.1},
    # The critic's rate has the decay of the policy's.
    GAE | {"train.decay": 0.1, "train.optimizer.rate_schedule": line(0.1)},
    {"staleness_control.patience": 3, "staleness_control.maximum": 4},
  ],
)
def test_what_something_reads_is_not_told(settings):
  settings |= {"algorithm.aggregation": "sequence_mean"}
  fields_lib.settled(config_of(settings), pytest.fail)


# Other values of each field that a loss reads, beyond the bound of some token.
CHANGED = {
  "clip_low": 0.1,
  "clip_high": 0.1,
  "dual_clip": 1.5,
  "sapo_positive": 3.0,
  "sapo_negative": 3.0,
  "behavior_weight_level": sections.BehaviorWeightLevel.SEQUENCE_MEAN,
  "behavior_weight_floor": 0.9,
  "behavior_weight_cap": 1.15,
  "behavior_weight_cap_mode": sections.BehaviorWeightCapMode.TRUNCATE,
  "second_moment_bound": policy_world.SECOND_MOMENT,
  "sequence_kl_bound": 0.1,
  "aggregation": sections.Aggregation.SEQUENCE_MEAN,
  "aggregation_tokens": 3,
  "kl_estimator": sections.KlEstimator.K2,
}


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
  unread = fields_lib.unread(sections.Config(algorithm=section))
  usual = loss_of(section)
  for field, value in CHANGED.items():
    other = copy.copy(section)
    if getattr(section, field) == value:  # the case has it already
      value = getattr(sections.AlgorithmSection(), field)
    setattr(other, field, value)
    is_unread = f"algorithm.{field}" in unread
    assert (loss_of(other) == usual) is is_unread, field
