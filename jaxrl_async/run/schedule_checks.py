"""Checks of the names in schedules, before any import.

Those of `algorithm.schedules` count train steps, and `rate_schedule` of an
optimizer counts updates. `schedules` checks their values.
"""

from typing import Any

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections
from jaxrl_async.run import unread_settings

# The fields that may have a schedule.
_SCHEDULED = (
  "clip_low",
  "clip_high",
  "dual_clip",
  "sapo_positive",
  "sapo_negative",
  "behavior_weight_floor",
  "behavior_weight_cap",
  "sequence_kl_bound",
  "second_moment_bound",
  "kl_coef",
  "kl_reward_clip",
  "entropy_coef",
  "distill_coef",
  "gamma",
  "gae_lambda",
  "reward_bias",
  "reward_scale",
  "reward_clip",
  "value_coef",
  "value_clip",
)
# Of numbers that a reader may look for: why they have no schedule.
_NOT_SCHEDULED = {
  "learning_rate": "rate_schedule of its optimizer is its schedule",
  "max_staleness": "staleness_control moves it",
  "temperature": "stored logprobs are of tokens drawn at it",
  "reference_decay": "the stored reference is an average with that weight",
  "normalize_decay": "the stored critic's unit is an average with that weight",
}
# Coefficients that a schedule may make 0. If the field itself is 0, the loss
# lacks a term.
COEFFICIENTS = ("kl_coef", "distill_coef", "entropy_coef")
# Fields of which 0 means that there is no bound. No schedule may reach it.
NEVER_ZERO = (
  "dual_clip",
  "sequence_kl_bound",
  "second_moment_bound",
  "kl_reward_clip",
  "reward_clip",
  "value_clip",
)
# Fields of which 0 means that the loss lacks a term or a bound.
_OFF_AT_ZERO = (*NEVER_ZERO, *COEFFICIENTS)
# Schedules have numbers, texts and tables of numbers as arguments.
_ARGUMENTS = (bool, int, float, str, dict)
# The sections with an optimizer.
TRAINED = ("warm_start", "preference", "train", "critic")


def check(config: sections.Config) -> None:
  """Check the form of each schedule, and that something reads its field.

  Raises:
    ConfigError: one line that names the field.
  """
  path, unread = "algorithm.schedules", unread_settings.reasons(config)
  for field, entry in config.algorithm.schedules.to_dict().items():
    sections.require(
      field in _SCHEDULED,
      path,
      f"{sections.shown(field)} has none"
      f" ({_NOT_SCHEDULED.get(field, 'it is not a number of the loss')}); use"
      f" one of {', '.join(_SCHEDULED)}",
    )
    _check_entry(f"{path}: {field}", entry)
    name = _name(config, field)
    sections.require(
      field not in _OFF_AT_ZERO or getattr(owner(config, field), field) != 0,
      path,
      f"{field}: {name}=0 leaves it out of the loss, with any schedule; use"
      f" another {name}, and an init_value of 0 if it is to start there",
    )
    reason = unread.get(name, "")
    sections.require(
      not reason, path, f"{field}: it has no effect, because {reason}"
    )
  for name in TRAINED:
    entry = getattr(config, name).optimizer.rate_schedule.to_dict()
    if entry:
      _check_entry(f"{name}.optimizer.rate_schedule", entry)


def _check_entry(path: str, entry: Any) -> None:
  """Check that an entry names a schedule, and has arguments of its types."""
  sections.require(
    isinstance(entry, dict) and "schedule" in entry,
    path,
    f"{sections.shown(entry)} names no schedule; use an entry like"
    ' {"schedule": "linear_schedule", "end_value": 0.1,'
    ' "transition_steps": 100}',
  )
  sections.require(
    entry["schedule"] in algorithm_section.SCHEDULES,
    path,
    f"{sections.shown(entry['schedule'])} is not one of"
    f" {', '.join(algorithm_section.SCHEDULES)}",
  )
  for name, value in entry.items():
    sections.require(
      isinstance(value, _ARGUMENTS),
      path,
      f"{sections.shown(name)} is {sections.shown(value)}; use a number, a text"
      " or a ConfigDict of numbers",
    )


def owner(
  config: sections.Config, field: str
) -> sections.AlgorithmSection | sections.CriticSection:
  """Return the section that a field of `algorithm.schedules` belongs to."""
  return config.critic if hasattr(config.critic, field) else config.algorithm


def _name(config: sections.Config, field: str) -> str:
  """Return the name of such a field with that of its section."""
  is_of_critic = owner(config, field) is config.critic
  return f"{'critic' if is_of_critic else 'algorithm'}.{field}"
