"""Checked values of the objects in config.json."""

from collections.abc import Mapping
from typing import Any

from jaxrl_async.config import sections

# Far beyond any model.
_MAX_SIZE = 2**24
# The range that float32 can compute with.
_SMALLEST, _LARGEST = 1e-30, 1e30


def flag(settings: Mapping[str, Any], name: str) -> bool:
  """Return a boolean setting; null and absent mean False."""
  value = settings.get(name)
  if not isinstance(value, bool | None):
    raise ValueError(f"{name} is {sections.shown(value)}, not true or false")
  return bool(value)


def number(
  settings: Mapping[str, Any],
  name: str,
  kind: type,
  default: Any = None,
  *,
  least: int = 1,
  most: int = _MAX_SIZE,
) -> Any:
  """Return a positive number; null means absent.

  Args:
    settings: object that holds the number.
    name: of the entry.
    kind: int or float.
    default: used if the entry is absent; None makes absence an error.
    least: smallest allowed int.
    most: largest allowed int.
  """
  value = settings.get(name)
  value = default if value is None else value
  if value is None:
    raise ValueError(f"{name} is missing")
  is_number = isinstance(value, int if kind is int else int | float)
  smallest = least if kind is int else 0
  # The comparison is False for NaN too.
  if isinstance(value, bool) or not is_number or not value >= smallest:
    raise ValueError(
      f"{name} is {sections.shown(value)}, not a positive {kind.__name__}"
    )
  if kind is int:
    if value > most:
      raise ValueError(
        f"{name} is {sections.shown(value)}; at most {most} is supported"
      )
  elif not _SMALLEST <= value <= _LARGEST:
    raise ValueError(
      f"{name} is {sections.shown(value)}, not a positive {kind.__name__}"
      " that can be computed with"
    )
  return kind(value)
