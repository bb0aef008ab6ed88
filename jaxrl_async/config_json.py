"""The config as JSON: what `config.json` holds, and what a resume compares."""

import dataclasses
import enum
import json
import pathlib
import typing
from typing import Any

from ml_collections import config_dict

from jaxrl_async import config
from jaxrl_async import storage

# Fields a workdir may be continued with although they differ.
MAY_CHANGE_ON_RESUME = ("train.num_steps:", "eval.every:", "run.")


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


def from_dict(values: dict[str, Any]) -> config.Config:
  """The config that `to_dict` wrote, also after a trip through JSON.

  Raises:
    ConfigError: a field is missing, unknown or of the wrong type.
  """

  def fill(section: Any, values: dict[str, Any], prefix: str) -> Any:
    fields = {field.name: field.type for field in dataclasses.fields(section)}
    for name in sorted(fields.keys() ^ values.keys()):
      known = "missing" if name in fields else "not a field of the config"
      raise config.ConfigError(f"{prefix}{name}: {known}")
    for name, kind in fields.items():
      path, value = prefix + name, values[name]
      if dataclasses.is_dataclass(kind):
        config.require(
          isinstance(value, dict), path, f"{value!r} is not a section"
        )
        value = fill(getattr(section, name), value, path + ".")
      elif kind is config_dict.ConfigDict and isinstance(value, dict):
        value = config_dict.ConfigDict(value)
      elif typing.get_origin(kind) is tuple and isinstance(value, list):
        value = tuple(value)
      elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        known = {member.value: member for member in kind}
        value = known.get(value, value)
      if not dataclasses.is_dataclass(kind):
        config.check_type(path, kind, value)
      setattr(section, name, value)
    return section

  return fill(config.Config(), values, "")


def differences(a: config.Config, b: config.Config) -> list[str]:
  """Fields that differ, as "algorithm.group_size: 16 and 8"."""
  return [
    f"{path}: {value} and {other}"
    for (path, _, value), (_, _, other) in zip(
      config.leaves(a), config.leaves(b), strict=True
    )
    if _plain(value) != _plain(other)
  ]


def check_resumable(
  stored: config.Config, wanted: config.Config, workdir: str
) -> None:
  """Refuse a workdir that holds another config.

  Raises:
    ConfigError: names the fields that differ and may not.
  """
  found = [
    text
    for text in differences(stored, wanted)
    if not text.startswith(MAY_CHANGE_ON_RESUME)
  ]
  if found:
    raise config.ConfigError(
      f"workdir: {workdir} holds another config ({'; '.join(found)}); use an"
      " empty one, or the stored values"
    )


def check_workdir(wanted: config.Config, workdir: pathlib.Path) -> None:
  """Checks that the config.json there, if there is one, allows to go on.

  Raises:
    ConfigError: the workdir holds another config.
  """
  path = workdir / "config.json"
  if path.exists():
    try:
      values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
      raise config.ConfigError(
        f"workdir: {path} is damaged ({error}); remove it to go on with the"
        " config given now"
      ) from error
    stored = from_dict(values)
    check_resumable(stored, wanted, str(workdir))


def write(wanted: config.Config, workdir: pathlib.Path) -> None:
  """Writes config.json, all of it or none."""
  path = workdir / "config.json"
  incomplete = path.with_suffix(".incomplete")
  with storage.writing(path):
    workdir.mkdir(parents=True, exist_ok=True)
    incomplete.write_text(json.dumps(to_dict(wanted), indent=2) + "\n")
    incomplete.replace(path)
