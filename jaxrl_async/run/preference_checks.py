"""Checks of the settings of training on preferences, before any slow import."""

from typing import Any

from jaxrl_async.config import preference_section
from jaxrl_async.config import sections
from jaxrl_async.data import worked_solutions
from jaxrl_async.data.tables import uri as uri_lib
from jaxrl_async.models import configs
from jaxrl_async.run import config_checks


def check(config: sections.Config) -> None:
  """Check a config of `launch/prefer.py`, as `config_checks.check` does.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  config_checks.check(config)
  section = config.preference
  others = "reward_loss", "steps", "labels"
  _check_usual(section, others, "launch/reward_model.py")
  sections.require(
    section.loss is sections.PreferenceLoss.DPO or not section.label_smoothing,
    "preference.label_smoothing",
    f"{section.label_smoothing:g} is a setting of DPO, but preference.loss is"
    f" {section.loss.value}; use 0",
  )
  check_start(config)
  check_pairs(config)


def check_reward_model(config: sections.Config) -> None:
  """Check a config of `launch/reward_model.py`.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  config_checks.check(config)
  section = config.preference
  _check_usual(
    section,
    ("loss", "beta", "label_smoothing", "length_normalised"),
    "launch/prefer.py",
  )
  check_start(config)
  if section.reward_loss is sections.RewardLoss.BRADLEY_TERRY:
    check_pairs(config)
    return
  sections.require(
    section.steps != section.labels,
    "preference.labels",
    f"{sections.shown(section.labels)} is preference.steps too; name another"
    " column",
  )
  sections.require(
    bool(config.task.sources)
    or uri_lib.parse("task.dataset", config.task.dataset).has_rows,
    "preference.reward_loss",
    f"{section.reward_loss.value} needs a column of steps (preference.steps),"
    f" but task.dataset {sections.shown(config.task.dataset)} is a generator"
    " without any; name a dataset in files",
  )


def _check_usual(
  section: sections.PreferenceSection, names: tuple[str, ...], program: str
) -> None:
  """Check that settings which another program reads are the usual ones."""
  usual = sections.PreferenceSection()
  for name in names:
    value, default = getattr(section, name), getattr(usual, name)
    sections.require(
      value == default,
      f"preference.{name}",
      f"{_shown(value)} has no effect here, because only {program} reads it;"
      f" use {_shown(default)}",
    )


def _shown(value: Any) -> str:
  return str(getattr(value, "value", value))


def check_start(config: sections.Config) -> None:
  """Check what is trained, from what, and with which optimizer.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  section, warm_start = config.preference, config.warm_start
  sections.require(
    bool(warm_start.checkpoint) or config.model.name not in configs.MODELS,
    "warm_start.checkpoint",
    f"it is empty, and model.name {sections.shown(config.model.name)} has no"
    " weights; name those that launch/sft.py wrote to WORKDIR/params, or a"
    " pretrained model",
  )
  sections.require(
    bool(warm_start.checkpoint) or not warm_start.num_steps,
    "warm_start.num_steps",
    f"{warm_start.num_steps}, but this program makes no warm start; use 0, or"
    " name the result of launch/sft.py in warm_start.checkpoint",
  )
  sections.require(
    not config.model.lora.rank
    or section.optimizer.name is sections.OptimizerName.ADAMW,
    "preference.optimizer.name",
    f"{section.optimizer.name.value} cannot train adapters (model.lora.rank);"
    " use adamw",
  )
  sections.require(
    section.eval_every > 0 or not section.patience,
    "preference.patience",
    f"{section.patience} has no effect without measurements"
    " (preference.eval_every is 0); use 0, or measure",
  )
  rows = config.train.rows_per_microbatch
  sections.require(
    section.rows_per_batch % rows == 0,
    "preference.rows_per_batch",
    f"{section.rows_per_batch} is no multiple of train.rows_per_microbatch"
    f" {rows}; use one",
  )


def check_pairs(config: sections.Config) -> None:
  """Check that the data may have pairs; each row is looked at later.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  section, task = config.preference, config.task
  worked_solutions.check_pair(section)
  sections.require(
    section.rejected not in worked_solutions.SOLVERS
    or config.warm_start.corrupted_frac > 0,
    "preference.rejected",
    f"{sections.shown(section.rejected)} makes no mistakes, because"
    " warm_start.corrupted_frac is 0, so that right solutions would be"
    " rejected; use more than 0 there, such as 0.5",
  )
  if task.sources or uri_lib.parse("task.dataset", task.dataset).has_rows:
    return
  for side in preference_section.SIDES:
    name = getattr(section, side)
    sections.require(
      not name.startswith(f"{worked_solutions.FIELD}:"),
      f"preference.{side}",
      f"{sections.shown(name)} is a column, but task.dataset"
      f" {sections.shown(task.dataset)} is a generator without pairs; name a"
      " dataset in files, or solvers in preference.chosen and"
      " preference.rejected",
    )
