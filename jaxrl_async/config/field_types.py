"""The types and values of a config's fields, whichever sections it has."""

from collections.abc import Iterator
import dataclasses
import difflib
import enum
import math
from typing import Any

from jaxrl_async.config import sections


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
  """Yield path, declared type and value of every field, in order."""
  for field in dataclasses.fields(section):
    kind, path = field.type, prefix + field.name
    value = getattr(section, field.name)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
      if not isinstance(value, kind):
        raise sections.ConfigError(
          f"{path}: {sections.shown(value)} is not a section"
        )
      yield from leaves(value, path + ".")
    else:
      yield path, kind, value


def check_type(path: str, kind: Any, value: Any) -> None:
  """Raise a ConfigError unless the value is of the field's declared type."""
  if kind is int:
    holds, wanted = type(value) is int, "an integer"
  elif kind is float:
    # Integers need no check: they are finite, and `isfinite` overflows for huge
    # ones.
    is_finite = type(value) is float and math.isfinite(value)
    holds = is_finite or type(value) is int
    wanted = "a finite number"
  elif kind == tuple[int, ...]:
    holds = type(value) is tuple and all(type(x) is int for x in value)
    wanted = "a tuple of integers, such as (64, 128)"
  elif kind == tuple[str, ...]:
    holds = type(value) is tuple and all(type(x) is str for x in value)
    wanted = 'a tuple of names, such as ("data", "fsdp")'
  elif issubclass(kind, enum.Enum):
    wanted = "one of " + ", ".join(member.value for member in kind)
    holds = isinstance(value, kind)
  else:
    holds, wanted = isinstance(value, kind), f"a {kind.__name__}"
  if not holds:
    raise sections.ConfigError(
      f"{path}: {sections.shown(value)} is not {wanted}"
    )


def has_field(config: Any, path: str) -> bool:
  """Return whether a path leads to a field, or to an entry of a field."""
  return any(
    path == known or path.startswith((known + ".", known + "["))
    for known, _, _ in leaves(config)
  )


def no_field(config: Any, path: str, prefix: str = "") -> str:
  """Return what to say of a path that leads to no field of a config.

  It names fields of the same or of a similar name, in any section.

  Args:
    config: the config.
    path: the path.
    prefix: what the user writes before a path.
  """

  def name_of(path: str) -> str:
    return path.rpartition(".")[2]

  known = [known for known, _, _ in leaves(config)]
  name, names = name_of(path), {name_of(x) for x in known}
  alike = difflib.get_close_matches(name, names, cutoff=0.7)
  fields = [x for x in known if name_of(x) in alike]
  found = difflib.get_close_matches(path, fields, n=3, cutoff=0.0)
  text = f"{prefix}{path}: there is no such field"
  if found:
    text += f"; did you mean {' or '.join(prefix + x for x in found)}?"
  return text


def set_at(config: Any, path: str, value: Any) -> None:
  """Set the field at a path such as "train.num_steps".

  Args:
    config: the config, which is changed.
    path: the names of the sections and of the field.
    value: of the field; that of an enum may be given as text.

  Raises:
    ConfigError: there is no such field.
  """
  *parents, name = path.split(".")
  place: Any = config
  for parent in parents:
    place = getattr(place, parent, None)
  if not hasattr(place, name):
    raise sections.ConfigError(no_field(config, path))
  kind = type(getattr(place, name))
  if isinstance(value, str) and issubclass(kind, enum.Enum):
    value = next((x for x in kind if x.value == value), value)
  setattr(place, name, value)
