"""Walks over all settings of a config, and checks each of them by itself.

The bounds are wide. They exclude only values that cannot work on any machine,
because they do not fit a device's float32 or int32, a timer or an operating
system limit. A value that is merely unwise passes. What holds between settings
is in `run.config_checks`.
"""

from collections.abc import Iterator
import dataclasses
import difflib
import enum
import math
import struct
from typing import Any, NamedTuple

from jaxrl_async.config import refusals
from jaxrl_async.config import setting as setting_lib

_MAX_STOP_CHARACTERS = 1_000


class Field(NamedTuple):
  """A setting of a config.

  Attributes:
    path: names of its sections and its own, such as "train.num_steps".
    kind: its declared type.
    value: its value.
    known: what is known of it. Reasons of a section are those of its fields.
  """

  path: str
  kind: Any
  value: Any
  known: setting_lib.Setting


def walk(
  section: Any,
  prefix: str = "",
  of_section: setting_lib.Setting | None = None,
) -> Iterator[Field]:
  """Yield every setting of a section, in order."""
  for field in dataclasses.fields(section):
    kind, path = field.type, prefix + field.name
    value = getattr(section, field.name)
    known = field.metadata["setting"]
    if of_section is not None and (of_section.free or of_section.fixed):
      reasons = {"free": of_section.free, "fixed": of_section.fixed}
      known = dataclasses.replace(known, fixed_with_groups="", **reasons)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
      if not isinstance(value, kind):
        raise refusals.ConfigError(
          f"{path}: {refusals.shown(value)} is not a section"
        )
      yield from walk(value, path + ".", known)
    else:
      yield Field(path, kind, value, known)


def has_field(config: Any, path: str) -> bool:
  """Return whether a path leads to a field, or to an entry of a field."""
  return any(
    path == field.path or path.startswith((field.path + ".", field.path + "["))
    for field in walk(config)
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

  known = [field.path for field in walk(config)]
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
    raise refusals.ConfigError(no_field(config, path))
  kind = type(getattr(place, name))
  if isinstance(value, str) and issubclass(kind, enum.Enum):
    value = next((x for x in kind if x.value == value), value)
  setattr(place, name, value)


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
    raise refusals.ConfigError(
      f"{path}: {refusals.shown(value)} is not {wanted}"
    )


def check(config: Any) -> None:
  """Check the type and the range of every setting.

  Raises:
    ConfigError: one line that names the field and says what would be right.
  """
  found = list(walk(config))
  for field in found:
    check_type(field.path, field.kind, field.value)
    if field.kind in (int, float):
      _check_number(field)
    elif field.kind is str and field.known.choices:
      refusals.require_one_of(field.path, field.value, field.known.choices)
    elif isinstance(field.value, tuple):
      _check_entries(field)


def _check_number(field: Field) -> None:
  path, value, known = field.path, field.value, field.known
  # JAX adds a float of any size to an array, but fails for an integer that does
  # not fit into 32 bits.
  refusals.require(
    type(value) is float or abs(value) <= setting_lib.MAX_INT,
    path,
    f"{refusals.shown(value)} is too large for an integer"
    + (
      "; write it with a decimal point or an exponent, such as 1e30"
      if field.kind is float
      else f"; use at most {setting_lib.MAX_INT}"
    ),
  )
  refusals.require(
    value in known.also or _is_in_range(value, known),
    path,
    f"{refusals.shown(value)} is out of range; use {range_of(known)}",
  )
  refusals.require(
    field.kind is int
    or value == 0
    or setting_lib.MIN_FLOAT <= abs(value) <= setting_lib.MAX_FLOAT,
    path,
    f"{refusals.shown(value)} is out of range; use 0, or"
    f" {setting_lib.MIN_FLOAT} to {setting_lib.MAX_FLOAT}, which float32 can"
    " hold",
  )


def _is_in_range(value: int | float, known: setting_lib.Setting) -> bool:
  if known.low is not None and value < known.low:
    return False
  if known.below is not None:
    # Devices round to float32: 1 - 1e-9 would be 1 there.
    return value < known.below and _float32(value) < known.below
  return known.high is None or value <= known.high


def _float32(number: int | float) -> float:
  """Return the number as float32 holds it."""
  return struct.unpack("f", struct.pack("f", number))[0]


def range_of(known: setting_lib.Setting) -> str:
  """Return the range of a number in words."""
  also = "".join(f"{x:g}, or " for x in known.also)
  low = "" if known.low is None else f"{known.low:g}"
  if known.below is not None:
    return f"{also}{low} or more, and less than {known.below:g} in float32"
  if known.high is None:
    return f"{also}{low} or more"
  return f"{also}{low} to {known.high:,g}"


def _check_entries(field: Field) -> None:
  """Check the entries of a tuple."""
  path, most = field.path, field.known.most
  refusals.require(
    most is None or len(field.value) <= most,
    path,
    f"{len(field.value)} entries; use at most {most}",
  )
  if field.kind == tuple[int, ...]:
    for number in field.value:
      refusals.require(
        0 <= number <= setting_lib.MAX_INT,
        path,
        f"{refusals.shown(number)} is out of range; use 0 to"
        f" {setting_lib.MAX_INT}",
      )
  elif most is not None:
    for text in field.value:
      refusals.require(
        0 < len(text) <= _MAX_STOP_CHARACTERS and "\ufffd" not in text,
        path,
        f"{refusals.shown(text)} can never be found; use texts of 1 to"
        f" {_MAX_STOP_CHARACTERS} characters without U+FFFD",
      )
