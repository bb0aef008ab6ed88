"""Schedules of Optax as schedules that a config names, with their arguments."""

from collections.abc import Callable, Mapping
import inspect
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float
import optax

from jaxrl_async.config import sections

# Makes a value of a number of steps.
Schedule = Callable[[Any], Float[Array, ""]]

# What a wrong argument leads to inside Optax.
ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


def of_entry(path: str, value: float, entry: Mapping[str, Any]) -> Schedule:
  """Return the schedule that an entry of a config describes.

  Args:
    value: of the field that has the schedule. Unless the entry says otherwise,
      a schedule with a peak rises from 0 to this value, and any other starts
      with it.
    entry: `schedule`, a name of `algorithm_section.SCHEDULES`, and arguments.
  """
  arguments = {
    name: _boundaries(path, x) if isinstance(x, dict) else x
    for name, x in entry.items()
    if name != "schedule"
  }
  function = getattr(optax.schedules, entry["schedule"])
  parameters = inspect.signature(function).parameters
  has_peak = "peak_value" in parameters
  usual = {"peak_value": value, "init_value": 0.0 if has_peak else value}
  arguments = {
    name: x for name, x in usual.items() if name in parameters
  } | arguments
  for name in arguments:
    sections.require(
      name in parameters,
      path,
      f"{entry['schedule']} has no argument {sections.shown(name)}"
      f"{sections.did_you_mean(str(name), parameters)}",
    )
  try:
    found = function(**arguments)
  except ERRORS as error:
    raise refusal(path, error) from error

  def schedule(step: Any) -> Float[Array, ""]:
    # Optax multiplies its int32 count by floats.
    with jax.numpy_dtype_promotion("standard"):
      return jnp.asarray(found(step), jnp.float32)

  return schedule


def _boundaries(path: str, scales: dict[Any, Any]) -> dict[int, Any]:
  """Return scales by step; as names in JSON, the steps are texts."""
  try:
    return {int(step): scale for step, scale in scales.items()}
  except ValueError as error:
    raise refusal(path, error) from error


def refusal(path: str, error: Exception) -> sections.ConfigError:
  """Return the refusal of an entry that led to an error inside Optax."""
  reason = " ".join(str(error).split())[:200]
  return sections.ConfigError(f"{path}: Optax refuses it ({reason})")
