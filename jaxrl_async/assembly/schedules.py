"""Settings of the algorithm and the critic that follow a schedule of Optax.

`config.rules` checks their names before anything slow is imported. Here the
schedules are made, and tried at the steps of the run; those of learning rates
too.
"""

from collections.abc import Callable, Iterator
import copy
from typing import Any, TypeVar

import jax
from ml_collections import config_dict
import numpy as np

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import rules
from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.training import optax_schedules

_Section = TypeVar(
  "_Section", sections.AlgorithmSection, sections.CriticSection
)
_PATH = "algorithm.schedules"
_MAX_TRIED = 10_000  # steps at which a schedule is tried


def make(config: sections.Config) -> dict[str, optax_schedules.Schedule]:
  """Return the schedule of each field that has one.

  Raises:
    ConfigError: Optax does not take the arguments of a schedule.
  """
  entries = config.algorithm.schedules
  return _of(config.algorithm, entries) | _of(config.critic, entries)


def _of(
  section: Any, entries: config_dict.ConfigDict
) -> dict[str, optax_schedules.Schedule]:
  """Return the schedules of a section's own fields."""
  return {
    field: optax_schedules.of_entry(
      f"{_PATH}: {field}", getattr(section, field), entry
    )
    for field, entry in entries.to_dict().items()
    if hasattr(section, field)
  }


def at_step(
  section: _Section, entries: config_dict.ConfigDict, *, on_host: bool = False
) -> Callable[[Any], _Section]:
  """Return what gives a section with the numbers of a train step.

  Args:
    section: of the algorithm, or of the critic.
    entries: `algorithm.schedules`. Those of fields that the section does not
      have are passed over.
    on_host: the values are numbers in place of arrays.
  """
  found = _of(section, entries)

  def at(step: Any) -> _Section:
    now = copy.copy(section)
    for field, schedule in found.items():
      value = schedule(step)
      setattr(now, field, float(value) if on_host else value)
    return now

  return at


def check(config: sections.Config) -> None:
  """Check that each schedule stays within its field's bounds in the run.

  If there are very many steps, a schedule is tried at some of them only.

  Raises:
    ConfigError: one line that names the field, and the step.
  """
  num_steps = config.train.num_steps
  for field, schedule in make(config).items():
    for step, value in _tried(f"{_PATH}: {field}", schedule, num_steps):
      _check_value(config, field, step, value)
  section = config.algorithm
  of_run = num_steps * section.num_minibatches * section.num_epochs
  for name in rules.TRAINED:
    optimizer = getattr(config, name).optimizer
    if not optimizer.rate_schedule:
      continue
    path = f"{name}.optimizer.rate_schedule"
    schedule = optax_schedules.of_entry(
      path, optimizer.learning_rate, optimizer.rate_schedule.to_dict()
    )
    num_updates = of_run
    if name in ("warm_start", "preference"):
      num_updates = getattr(config, name).num_steps
    for update, value in _tried(path, schedule, num_updates):
      there = copy.deepcopy(config)
      getattr(there, name).optimizer.learning_rate = value
      reason = _refusal(there)
      message = f"it becomes {value:g} at update {update}, and {reason}"
      sections.require(not reason, path, message)


def _tried(
  path: str, schedule: optax_schedules.Schedule, num_steps: int
) -> Iterator[tuple[int, float]]:
  """Yield the steps where a schedule is not finite, least and greatest."""
  count = min(max(num_steps, 1), _MAX_TRIED)
  steps = np.linspace(0, max(num_steps - 1, 0), count)
  steps = np.unique(steps.astype(np.int32))
  try:
    values = np.asarray(jax.vmap(schedule)(steps))
  except optax_schedules.ERRORS as error:
    raise optax_schedules.refusal(path, error) from error
  for at in (
    np.argmax(~np.isfinite(values)),
    np.argmin(values),
    np.argmax(values),
  ):
    yield int(steps[at]), float(values[at])


def _check_value(
  config: sections.Config, field: str, step: int, value: float
) -> None:
  """Check a value of a field as if the config had it, and no schedules."""
  there = copy.deepcopy(config)
  there.algorithm.schedules = config_dict.ConfigDict()
  is_of_critic = hasattr(there.critic, field)
  setattr(there.critic if is_of_critic else there.algorithm, field, value)
  kind = rules.schedules()[field]
  # A coefficient of 0 leaves its term out only if the field itself is 0.
  is_zero = value == 0 and kind is setting_lib.Schedule.COEFFICIENT
  reason = _refusal(there, has_rules=not is_zero)
  if value == 0 and kind is setting_lib.Schedule.BOUND:
    reason = "0 would switch it off, which no schedule can do"
  sections.require(
    not reason,
    _PATH,
    f"{field} becomes {value:g} at train step {step}, and {reason}",
  )


def _refusal(config: sections.Config, has_rules: bool = True) -> str:
  """Return why a config is refused, "" if it is not."""
  try:
    fields_lib.check(config)
    if has_rules:
      rules.check(config)
  except sections.ConfigError as error:
    return str(error)
  return ""
