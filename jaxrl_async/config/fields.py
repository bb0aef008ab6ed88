"""Walks over all settings of a config, and checks each of them by itself.

The bounds are wide. They exclude only values that cannot work on any machine,
because they do not fit a device's float32 or int32, a timer or an operating
system limit. A value that is merely unwise passes. What holds between settings
is in `rules`.

A setting that nothing reads because of the others is told, so that nobody takes
the result for its own. It is no error: one side of a comparison may not read
what the other one varies.
"""

from collections.abc import Callable, Iterator
import copy
import dataclasses
import difflib
import enum
import json
import math
import re
import struct
from typing import Any, NamedTuple

from ml_collections import config_dict

from jaxrl_async.config import refusals
from jaxrl_async.config import setting as setting_lib

_MAX_STOP_CHARACTERS = 1_000


class Field(NamedTuple):
  """A setting of a config.

  Attributes:
    path: names of its sections and its own, such as "train.num_steps".
    kind: its declared type.
    value: its value.
    known: what is known of it, also from its sections.
    section: the one that holds it.
  """

  path: str
  kind: Any
  value: Any
  known: setting_lib.Setting
  section: Any


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
    if of_section is not None:
      known = _with_section(known, of_section)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
      if not isinstance(value, kind):
        raise refusals.ConfigError(
          f"{path}: {refusals.shown(value)} is not a section"
        )
      yield from walk(value, path + ".", known)
    else:
      yield Field(path, kind, value, known, section)


def _with_section(
  own: setting_lib.Setting, section: setting_lib.Setting
) -> setting_lib.Setting:
  """Return what is known of a setting, with what its section says of all."""
  changes: dict[str, Any] = {}
  if section.fixed:
    changes = {"fixed": section.fixed, "free": "", "fixed_with_groups": ""}
  elif section.free and not (own.free or own.fixed or own.fixed_with_groups):
    changes = {"free": section.free}
  if section.unread:
    changes["unread"] = section.unread + own.unread
  return dataclasses.replace(own, **changes) if changes else own


def plain(value: Any) -> Any:
  """Return a value of a config as JSON can hold it."""
  if dataclasses.is_dataclass(value):
    names = [field.name for field in dataclasses.fields(value)]
    return {name: plain(getattr(value, name)) for name in names}
  if isinstance(value, enum.Enum):
    return value.value
  if isinstance(value, config_dict.ConfigDict):
    value = value.to_dict()
  if isinstance(value, dict):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, tuple | list):
    return [plain(item) for item in value]
  return value


def unread(config: Any) -> dict[str, str]:
  """Return why nothing reads a field, by the path of each such field."""
  return {
    field.path: reason
    for field in walk(config)
    if (reason := _unread(field, config))
  }


def _unread(field: Field, config: Any) -> str:
  reasons = (why(field.section, config) for why in field.known.unread)
  return next(filter(None, reasons), "")


def settled(config: Any, note: Callable[[str], None] = lambda _: None) -> Any:
  """Return a config in which settings that nothing reads have their defaults.

  So code that looks at one of them without looking at the others is right too.

  Args:
    config: stays as it is.
    note: is called with a line about every setting that is changed.
  """
  made, usual = copy.deepcopy(config), type(config)()
  for field, default in zip(walk(config), walk(usual), strict=True):
    reason = _unread(field, config)
    if reason and field.value != default.value:
      set_at(made, field.path, default.value)
      value = plain(field.value)
      text = f"{value:g}" if type(value) is float else refusals.shown(value)
      if isinstance(field.value, enum.Enum):
        text = value
      note(f"{field.path}: {text} has no effect, because {reason}")
  return made


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
  elif kind is list:
    holds = type(value) is list and all(type(x) is str for x in value)
    holds, wanted = holds and len(value) > 0, "a list of names"
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
  for field in walk(config):
    _check_field(field)


def _check_field(field: Field) -> None:
  check_type(field.path, field.kind, field.value)
  if field.kind in (int, float):
    _check_number(field)
  elif field.kind is str and field.known.choices:
    refusals.require_one_of(field.path, field.value, field.known.choices)
  elif isinstance(field.value, tuple):
    _check_entries(field)
  elif field.kind is config_dict.ConfigDict:
    _check_json(field)
    if field.known.entries is not None:
      for name, entry in field.value.items():
        _check_entry(field, name, entry)


def _check_json(field: Field) -> None:
  """Check that config.json can store a field of free form unchanged."""
  try:
    values = plain(field.value)
    read = json.loads(json.dumps(values, allow_nan=False))
  except (TypeError, ValueError, RecursionError) as error:
    reason = str(error).partition("\n")[0]
    raise refusals.ConfigError(
      f"{field.path}: cannot be written as JSON ({reason}); use numbers, texts,"
      " lists and dicts"
    ) from error
  refusals.require(
    read == values,
    field.path,
    f"{refusals.shown(values)} would be read from JSON as"
    f" {refusals.shown(read)}",
  )


def _check_entry(field: Field, name: Any, entry: Any) -> None:
  """Check a section that a field of free form holds by name."""
  refusals.require(
    isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name) is not None,
    field.path,
    f"{refusals.shown(name)} is no name; use letters, digits and . _ -",
  )
  path = f"{field.path}.{name}"
  kind: Any = field.known.entries
  known = {each.name: each for each in dataclasses.fields(kind)}
  refusals.require(
    isinstance(entry, config_dict.ConfigDict),
    path,
    f"{refusals.shown(entry)} is not a ConfigDict of {', '.join(known)}",
  )
  for key, value in entry.items():
    refusals.require(
      key in known,
      path,
      f"there is no field {refusals.shown(key)}"
      f"{refusals.did_you_mean(str(key), known)}",
    )
    of = known[key]
    if isinstance(of.type, type) and issubclass(of.type, enum.Enum):
      value = next((x for x in of.type if x.value == value), value)
    of_setting = of.metadata["setting"]
    _check_field(Field(f"{path}.{key}", of.type, value, of_setting, entry))
  for key in field.known.needs:
    refusals.require(
      key in entry and entry[key] != "", path, f"it has no {key}"
    )


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
  elif field.known.choices:
    for text in field.value:
      refusals.require_one_of(path, text, field.known.choices)
    refusals.require(
      len(set(field.value)) == len(field.value),
      path,
      f"{refusals.shown(field.value)} has an entry twice",
    )
  elif most is not None:
    for text in field.value:
      refusals.require(
        0 < len(text) <= _MAX_STOP_CHARACTERS and "\ufffd" not in text,
        path,
        f"{refusals.shown(text)} can never be found; use texts of 1 to"
        f" {_MAX_STOP_CHARACTERS} characters without U+FFFD",
      )
