"""The config as JSON, the form in which config.json and checkpoints hold it."""

import dataclasses
import enum
import json
import pathlib
import typing
from typing import Any

from ml_collections import config_dict

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.storage import disk

NAME = "config.json"
# Incremented when the meaning of stored values changes.
FORMAT = 1
_FORMAT = "format"


class TornError(sections.ConfigError):
  """config.json is not JSON, as a loss of power may leave it."""


def from_dict(values: dict[str, Any]) -> sections.Config:
  """Return the config that `fields.plain` wrote, before or after JSON.

  Raises:
    ConfigError: a field is unknown, missing or of the wrong type.
  """

  def fill(section: Any, values: dict[str, Any], prefix: str) -> Any:
    fields = {field.name: field.type for field in dataclasses.fields(section)}
    for name in sorted(values.keys() - fields.keys()):
      raise sections.ConfigError(
        f"{prefix}{name}: unknown in this version; use the version"
        " that wrote it"
      )
    for name, kind in fields.items():
      path = prefix + name
      sections.require(
        name in values, path, "it is missing; use the version that wrote it"
      )
      value = values[name]
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
        fields_lib.check_type(path, kind, value)
      setattr(section, name, value)
    return section

  return fill(sections.Config(), values, "")


def differences(
  a: sections.Config, b: sections.Config
) -> dict[str, tuple[Any, Any]]:
  """Return both values of each field that differs, keyed by its path."""
  return {
    x.path: (x.value, y.value)
    for x, y in zip(fields_lib.walk(a), fields_lib.walk(b), strict=True)
    if fields_lib.plain(x.value) != fields_lib.plain(y.value)
  }


def read(workdir: pathlib.Path) -> sections.Config | None:
  """Return the config of a workdir, or None if it has no config.json.

  Raises:
    TornError: config.json is not JSON.
    ConfigError: it is not a config, or was written by another version.
  """
  path = workdir / NAME
  try:
    values = json.loads(path.read_bytes())
  except FileNotFoundError:
    return None
  except (OSError, ValueError, RecursionError) as error:
    is_torn = not isinstance(error, OSError)
    reason = "it is not JSON" if is_torn else error.strerror
    raise (TornError if is_torn else sections.ConfigError)(
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
  """Return the config as it is stored, with the number of its format."""
  return {_FORMAT: FORMAT, **fields_lib.plain(wanted)}


def from_stored(values: Any) -> sections.Config:
  """Return the config that `to_stored` wrote.

  Raises:
    ConfigError: it is not a config, or was written by another version.
  """
  sections.require(isinstance(values, dict), _FORMAT, "it is not an object")
  values = dict(values)
  number = values.pop(_FORMAT, None)
  sections.require(
    number == FORMAT,
    _FORMAT,
    f"{sections.shown(number)} is of another version; this one knows {FORMAT}",
  )
  return from_dict(values)


def write(wanted: sections.Config, workdir: pathlib.Path) -> None:
  """Write config.json atomically."""
  path = workdir / NAME
  with disk.writing(path):
    workdir.mkdir(parents=True, exist_ok=True)
  disk.replace_text(path, json.dumps(to_stored(wanted), indent=2) + "\n")
