"""The config as JSON, as `config.json` and checkpoints hold it."""

import dataclasses
import enum
import json
import pathlib
import typing
from typing import Any

from ml_collections import config_dict

from jaxrl_async.config import sections
from jaxrl_async.storage import disk

NAME = "config.json"
# Rises when stored values mean something else than before. A field that was
# added does not raise it: it takes its default, which therefore has to be what
# runs did before there was the field. Format 0 carries no number.
FORMAT = 1
_FORMAT = "format"


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return to_dict(value)
  if isinstance(value, enum.Enum):
    return value.value
  if isinstance(value, config_dict.ConfigDict):
    value = value.to_dict()
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, tuple | list):
    return [_plain(item) for item in value]
  return value


def to_dict(section: Any) -> dict[str, Any]:
  """A config (or section) as JSON holds it: enums by value, tuples as lists."""
  return {
    field.name: _plain(getattr(section, field.name))
    for field in dataclasses.fields(section)
  }


def from_dict(values: dict[str, Any]) -> sections.Config:
  """The config that `to_dict` wrote, also after a trip through JSON.

  Fields that are missing did not exist yet and take their defaults.

  Raises:
    ConfigError: a field is unknown or of the wrong type.
  """

  def fill(section: Any, values: dict[str, Any], prefix: str) -> Any:
    fields = {field.name: field.type for field in dataclasses.fields(section)}
    for name in sorted(values.keys() - fields.keys()):
      raise sections.ConfigError(
        f"{prefix}{name}: not a field that this version knows; use the version"
        " that wrote it"
      )
    for name, kind in fields.items():
      if name not in values:
        continue
      path, value = prefix + name, values[name]
      if dataclasses.is_dataclass(kind):
        sections.require(
          isinstance(value, dict), path, f"{value!r} is not a section"
        )
        value = fill(getattr(section, name), value, path + ".")
      elif kind is config_dict.ConfigDict and isinstance(value, dict):
        value = config_dict.ConfigDict(value)
      elif typing.get_origin(kind) is tuple and isinstance(value, list):
        value = tuple(value)
      elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        value = next((x for x in kind if x.value == value), value)
      if not dataclasses.is_dataclass(kind):
        sections.check_type(path, kind, value)
      setattr(section, name, value)
    return section

  return fill(sections.Config(), values, "")


def differences(
  a: sections.Config, b: sections.Config
) -> dict[str, tuple[Any, Any]]:
  """Both values of each field that differs, by its path."""
  return {
    path: (value, other)
    for (path, _, value), (_, _, other) in zip(
      sections.leaves(a), sections.leaves(b), strict=True
    )
    if _plain(value) != _plain(other)
  }


def read(workdir: pathlib.Path) -> sections.Config | None:
  """The config of a workdir, None without a config.json.

  Raises:
    ConfigError: config.json is something else, or of a newer version.
  """
  path = workdir / NAME
  try:
    values = json.loads(path.read_bytes())
  except FileNotFoundError:
    return None
  except (OSError, ValueError, RecursionError) as error:
    reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
    raise sections.ConfigError(
      f"workdir: {path} cannot be read ({reason}); it is damaged or not a"
      " run's: move it away, or use another workdir"
    ) from error
  try:
    return from_stored(values)
  except ValueError as error:
    raise sections.ConfigError(
      f"workdir: {path} is not the config of a run of this version ({error})"
    ) from error


def to_stored(wanted: sections.Config) -> dict[str, Any]:
  """The config as it is stored, with the number of its format."""
  return {_FORMAT: FORMAT, **to_dict(wanted)}


def from_stored(values: Any) -> sections.Config:
  """The config that `to_stored` wrote, in this format or an earlier one.

  Raises:
    ConfigError: it is something else, or of a newer version.
  """
  sections.require(isinstance(values, dict), _FORMAT, "it is not an object")
  values = dict(values)
  number = values.pop(_FORMAT, 0)
  sections.check_type(_FORMAT, int, number)
  sections.require(
    number <= FORMAT,
    _FORMAT,
    f"{number} is of a newer version; this one knows {FORMAT}",
  )
  # An empty object, or another program's that shares no name, is not one.
  sections.require("algorithm" in values, "algorithm", "it is missing")
  return from_dict(values)


def write(wanted: sections.Config, workdir: pathlib.Path) -> None:
  """Writes config.json, all of it or none."""
  path = workdir / NAME
  incomplete = path.with_suffix(".incomplete")
  with disk.writing(path):
    workdir.mkdir(parents=True, exist_ok=True)
    incomplete.write_text(json.dumps(to_stored(wanted), indent=2) + "\n")
    incomplete.replace(path)
