"""Fields of the algorithm and the critic that follow a schedule of Optax.

`schedule_checks` checks names before anything slow is imported. Here the
schedules are made, and tried at the steps of the run, those of learning rates
too.
"""

from collections.abc import Callable, Iterator
import copy
from typing import Any, TypeVar

import jax
from ml_collections import config_dict
import numpy as np

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.run import algorithm_checks
from jaxrl_async.run import schedule_checks
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
  scheduled = _of(section, entries)

  def at(step: Any) -> _Section:
    now = copy.copy(section)
    for field, schedule in scheduled.items():
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
  of_run = num_steps * (
    config.algorithm.num_minibatches * config.algorithm.num_epochs
  )
  for name in schedule_checks.TRAINED:
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
      _check_rate(config, name, update, value)


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
  setattr(schedule_checks.owner(there, field), field, value)
  reason = ""
  kind = schedule_checks.kinds()[field]
  if value == 0 and kind is setting_lib.Schedule.BOUND:
    reason = "0 would switch it off, which no schedule can do"
  try:
    fields_lib.check(there)
    # A coefficient of 0 leaves its term out only if the field itself is 0.
    if kind is not setting_lib.Schedule.COEFFICIENT or value:
      algorithm_checks.check(there)
  except sections.ConfigError as error:
    reason = str(error)
  sections.require(
    not reason,
    _PATH,
    f"{field} becomes {value:g} at train step {step}, and {reason}",
  )


def _check_rate(
  config: sections.Config, name: str, update: int, value: float
) -> None:
  """Check a learning rate as if it were that of the config."""
  there = copy.deepcopy(config)
  getattr(there, name).optimizer.learning_rate = value
  try:
    fields_lib.check(there)
    algorithm_checks.check_optimizers(there)
  except sections.ConfigError as error:
    raise sections.ConfigError(
      f"{name}.optimizer.rate_schedule: it becomes {value:g} at update"
      f" {update}, and {error}"
    ) from error
