"""Fields of the algorithm and the critic that follow a schedule of Optax.

`algorithm_checks` checks their names before anything slow is imported. Here the
schedules are made, and tried at the steps of the run.
"""

from collections.abc import Callable
import copy
import inspect
from typing import Any, TypeVar

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float
from ml_collections import config_dict
import numpy as np
import optax

from jaxrl_async.config import bounds
from jaxrl_async.config import sections
from jaxrl_async.run import algorithm_checks

# Makes a value of the number of completed train steps.
Schedule = Callable[[Any], Float[Array, ""]]

_Section = TypeVar(
  "_Section", sections.AlgorithmSection, sections.CriticSection
)
_PATH = "algorithm.schedules"
_MAX_TRIED = 10_000  # steps at which a schedule is tried
# What a wrong argument leads to inside Optax.
_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def make(config: sections.Config) -> dict[str, Schedule]:
  """Return the schedule of each field that has one.

  Raises:
    ConfigError: Optax does not take the arguments of a schedule.
  """
  entries = config.algorithm.schedules
  return _of(config.algorithm, entries) | _of(config.critic, entries)


def _of(section: Any, entries: config_dict.ConfigDict) -> dict[str, Schedule]:
  """Return the schedules of a section's own fields."""
  return {
    field: _schedule(field, getattr(section, field), entry)
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


def _schedule(field: str, value: float, entry: dict[str, Any]) -> Schedule:
  """Return a schedule; it starts with the field's own value by default."""
  arguments = {
    name: _boundaries(field, x) if isinstance(x, dict) else x
    for name, x in entry.items()
    if name != "schedule"
  }
  function = getattr(optax.schedules, entry["schedule"])
  parameters = inspect.signature(function).parameters
  if "init_value" in parameters:
    arguments.setdefault("init_value", value)
  for name in arguments:
    sections.require(
      name in parameters,
      _PATH,
      f"{field}: {entry['schedule']} has no argument {sections.shown(name)}"
      f"{sections.did_you_mean(str(name), parameters)}",
    )
  try:
    found = function(**arguments)
  except _ERRORS as error:
    raise _refusal(field, error) from error

  def schedule(step: Any) -> Float[Array, ""]:
    # Optax multiplies its int32 count by floats.
    with jax.numpy_dtype_promotion("standard"):
      return jnp.asarray(found(step), jnp.float32)

  return schedule


def _boundaries(field: str, scales: dict[Any, Any]) -> dict[int, Any]:
  """Return scales by step; as names in JSON, the steps are texts."""
  try:
    return {int(step): scale for step, scale in scales.items()}
  except ValueError as error:
    raise _refusal(field, error) from error


def _refusal(field: str, error: Exception) -> sections.ConfigError:
  reason = " ".join(str(error).split())[:200]
  return sections.ConfigError(f"{_PATH}: {field}: Optax refuses it ({reason})")


def check(config: sections.Config) -> None:
  """Check that each schedule stays within its field's bounds in the run.

  If there are very many train steps, a schedule is tried at some of them only.

  Raises:
    ConfigError: one line that names the field, and the step.
  """
  last = config.train.num_steps - 1
  count = min(config.train.num_steps, _MAX_TRIED)
  steps = np.unique(np.linspace(0, last, count).astype(np.int32))
  for field, schedule in make(config).items():
    try:
      values = np.asarray(jax.vmap(schedule)(steps))
    except _ERRORS as error:
      raise _refusal(field, error) from error
    worst = np.argmax(~np.isfinite(values))
    _check_value(config, field, int(steps[worst]), float(values[worst]))
    for at in (np.argmin(values), np.argmax(values)):
      _check_value(config, field, int(steps[at]), float(values[at]))


def _check_value(
  config: sections.Config, field: str, step: int, value: float
) -> None:
  """Check a value of a field as if the config had it, and no schedules."""
  there = copy.deepcopy(config)
  there.algorithm.schedules = config_dict.ConfigDict()
  setattr(algorithm_checks.owner(there, field), field, value)
  reason = ""
  if value == 0 and field in algorithm_checks.NEVER_ZERO:
    reason = "0 would switch it off, which no schedule can do"
  try:
    bounds.check(there)
    # A coefficient of 0 leaves its term out only if the field itself is 0.
    if field not in algorithm_checks.COEFFICIENTS or value:
      algorithm_checks.check(there)
  except sections.ConfigError as error:
    reason = str(error)
  sections.require(
    not reason,
    _PATH,
    f"{field} becomes {value:g} at train step {step}, and {reason}",
  )
