"""Checks of the names in schedules, before any import.

Those of `algorithm.schedules` count train steps, and `rate_schedule` of an
optimizer counts updates. `schedules` checks their values.
"""

from typing import Any

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.run import unread_settings

# Of numbers that a reader may look for: why they have no schedule.
_NOT_SCHEDULED = {
  "learning_rate": "rate_schedule of its optimizer is its schedule",
  "max_staleness": "staleness_control moves it",
  "temperature": "stored logprobs are of tokens drawn at it",
  "reference_decay": "the stored reference is an average with that weight",
  "normalize_decay": "the stored critic's unit is an average with that weight",
}
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
  scheduled = kinds()
  for field, entry in config.algorithm.schedules.to_dict().items():
    sections.require(
      field in scheduled,
      path,
      f"{sections.shown(field)} has none"
      f" ({_NOT_SCHEDULED.get(field, 'it is not a number of the loss')}); use"
      f" one of {', '.join(scheduled)}",
    )
    _check_entry(f"{path}: {field}", entry)
    name = _name(config, field)
    sections.require(
      scheduled[field] is setting_lib.Schedule.FREE
      or getattr(owner(config, field), field) != 0,
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


def kinds() -> dict[str, setting_lib.Schedule]:
  """Return the fields that may have a schedule, by name."""
  usual = sections.Config()
  return {
    name: field.known.schedule
    for section in (usual.algorithm, usual.critic)
    for field in fields_lib.walk(section)
    if field.known.schedule is not setting_lib.Schedule.NONE
    for name in [field.path]
  }


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
