"""The datasets that a task names, and the settings of a mixture's members.

Nothing here imports a library of data, so that the checks are fast.
"""

import dataclasses
import re
from typing import Any

from ml_collections import config_dict

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.data.tables import uri as uri_lib

_NAME = re.compile(r"[\w.-]{1,64}")
# The settings of a task that a member of a mixture has of its own, even if it
# does not name them, and those that it takes from the task unless it does.
_OWN = ("dataset", "params", "eval_dataset")
_INHERITED = (
  "eval_percent",
  "fields",
  "on_bad_row",
  "template",
  "chat",
  "system",
)
_WEIGHT = "weight"


def _given(task: sections.TaskSection) -> dict[str, Any]:
  """Return the settings of each member as they were given, of any type."""
  return {name: task.sources[name] for name in task.sources}


def weight_of(task: sections.TaskSection, name: str) -> float:
  """Return the weight of a member."""
  return float(_given(task)[name][_WEIGHT])


def members_of(
  task: sections.TaskSection,
) -> dict[str, sections.TaskSection]:
  """Return the task of each member of a mixture; none without a mixture."""
  defaults = sections.TaskSection(dataset="")
  members = {}
  for name, given in _given(task).items():
    settings = {key: getattr(defaults, key) for key in _OWN}
    settings |= {key: value for key, value in given.items() if key != _WEIGHT}
    if "on_bad_row" in given:
      settings["on_bad_row"] = sections.OnBadRow(given["on_bad_row"])
    members[name] = dataclasses.replace(
      task, sources=defaults.sources, **settings
    )
  return members


def needs_chat(task: sections.TaskSection) -> str | None:
  """Return the field by which a task needs a chat template; None if none."""
  members = members_of(task)
  tasks = {f"task.sources.{name}": each for name, each in members.items()}
  for path, each in (tasks or {"task": task}).items():
    if each.chat:
      return f"{path}.chat"
    if each.fields.get("messages"):
      return f"{path}.fields"
  return None


def asks_reasoning_gym(task: sections.TaskSection) -> bool:
  """Return whether the training questions are made by reasoning-gym.

  Raises:
    ConfigError: the name of a dataset is wrong.
  """
  tasks = members_of(task) or {"task": task}
  return any(
    uri_lib.parse(f"{path}.dataset", each.dataset).kind == uri_lib.REASONING_GYM
    for path, each in tasks.items()
  )


def check(task: sections.TaskSection) -> None:
  """Check the names of the data, without reading any.

  Raises:
    ConfigError: one line that names the field.
  """
  if not task.sources:
    sections.require(
      bool(task.dataset), "task.dataset", "it is empty; name a dataset"
    )
    _check_dataset("task", task)
    return
  default = sections.TaskSection()
  for name in ("dataset", "params", "eval_dataset"):
    value = getattr(task, name)
    sections.require(
      not value or value == getattr(default, name),
      f"task.{name}",
      f"{sections.shown(value)} is of one dataset, but task.sources names"
      " several; leave it empty",
    )
  for name, given in _given(task).items():
    _check_member(name, given)
  for name, member in members_of(task).items():
    _check_dataset(f"task.sources.{name}", member)


def _check_member(name: Any, given: Any) -> None:
  """Check the names and types of a member's settings."""
  sections.require(
    isinstance(name, str) and bool(_NAME.fullmatch(name)),
    "task.sources",
    f"{sections.shown(name)} is no name of a source; use letters, digits and"
    " . _ -",
  )
  path = f"task.sources.{name}"
  sections.require(
    isinstance(given, config_dict.ConfigDict),
    path,
    f"{sections.shown(given)} is no source; write"
    ' {"dataset": "jsonl:a.jsonl", "weight": 1.0}',
  )
  known = (*_OWN, *_INHERITED, _WEIGHT)
  kinds = {f.name: f.type for f in dataclasses.fields(sections.TaskSection)}
  for key, value in given.items():
    sections.require(
      key in known,
      f"{path}.{sections.shown(key)[1:-1]}",
      f"a source has no such setting{sections.did_you_mean(str(key), known)}",
    )
    if key == "on_bad_row":
      options = [member.value for member in sections.OnBadRow]
      value = getattr(value, "value", value)
      sections.require(
        value in options,
        f"{path}.{key}",
        f"{sections.shown(value)} is not one of {', '.join(options)}",
      )
    elif key != _WEIGHT:
      fields_lib.check_type(f"{path}.{key}", kinds[key], value)
  for key in ("dataset", _WEIGHT):
    sections.require(
      key in given,
      path,
      f"it has no {key}; a source has a dataset and a weight",
    )
  weight = given[_WEIGHT]
  sections.require(
    type(weight) in (int, float) and 1e-3 <= weight <= 1e6,
    f"{path}.{_WEIGHT}",
    f"{sections.shown(weight)} is out of range; use 0.001 to 1,000,000",
  )
  percent = given.get("eval_percent", 1)
  sections.require(
    1 <= percent <= 99,
    f"{path}.eval_percent",
    f"{sections.shown(percent)} is out of range; use 1 to 99",
  )


def _check_dataset(path: str, task: sections.TaskSection) -> None:
  uri = uri_lib.parse(f"{path}.dataset", task.dataset)
  for entry, column in task.fields.items():
    sections.require(
      isinstance(entry, str) and isinstance(column, str),
      f"{path}.fields",
      f"{sections.shown(column)} is no name of a column; write"
      ' {"question": "problem"}',
    )
    sections.require(
      entry not in ("index", "metadata", "source"),
      f"{path}.fields",
      f"{entry!r} is set by the run; name another entry",
    )
  sections.require(
    bool(task.fields.get("question", "question"))
    or bool(task.fields.get("messages")),
    f"{path}.fields",
    "they name no question; name the column of one, or of messages",
  )
  if task.eval_dataset:
    sections.require(
      uri.has_rows,
      f"{path}.eval_dataset",
      "a dataset of reasoning-gym has held-out questions of its own; leave it"
      " empty",
    )
    other = uri_lib.parse(f"{path}.eval_dataset", task.eval_dataset)
    sections.require(
      other.has_rows,
      f"{path}.eval_dataset",
      f"{sections.shown(task.eval_dataset)} has no rows; use files, as"
      " task.dataset does",
    )
  sections.require(
    not task.system or task.chat or bool(task.fields.get("messages")),
    f"{path}.system",
    f"{sections.shown(task.system)} is a message of a chat; set {path}.chat",
  )
