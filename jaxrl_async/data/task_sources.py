"""The datasets that a task names: one, or the members of a mixture.

Nothing here imports a library of data, so that the checks are fast.
"""

import dataclasses
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.data.tables import uri as uri_lib

# What a member of a mixture has of its own, even if it does not name it.
_OWN = ("dataset", "params", "eval_dataset")
_WEIGHT = "weight"


def weight_of(task: sections.TaskSection, name: str) -> float:
  """Return the weight of a member."""
  member: Any = task.sources[name]
  return float(member[_WEIGHT])


def members_of(
  task: sections.TaskSection,
) -> dict[str, sections.TaskSection]:
  """Return the task of each member of a mixture; none without a mixture."""
  usual = sections.TaskSection(dataset="")
  members = {}
  for name in task.sources:
    given: Any = task.sources[name]
    settings = {key: getattr(usual, key) for key in _OWN} | dict(given.items())
    settings.pop(_WEIGHT, None)
    if "on_bad_row" in given:
      settings["on_bad_row"] = sections.OnBadRow(given["on_bad_row"])
    members[name] = dataclasses.replace(task, sources=usual.sources, **settings)
  return members


def _datasets_of(
  task: sections.TaskSection,
) -> dict[str, sections.TaskSection]:
  """Return the task of each dataset, by the path of its settings."""
  members = members_of(task).items()
  return {f"task.sources.{name}": each for name, each in members} or {
    "task": task
  }


def needs_chat(task: sections.TaskSection) -> str | None:
  """Return the field by which a task needs a chat template; None if none."""
  for path, each in _datasets_of(task).items():
    if each.chat:
      return f"{path}.chat"
    if each.fields.get("messages"):
      return f"{path}.fields"
  return None


def asks_reasoning_gym(task: sections.TaskSection) -> bool:
  """Return whether the training questions are made by reasoning-gym."""
  return any(
    uri_lib.parse(f"{path}.dataset", each.dataset).kind == uri_lib.REASONING_GYM
    for path, each in _datasets_of(task).items()
  )


def check(task: sections.TaskSection) -> None:
  """Check the names of the data, without reading any."""
  usual = sections.TaskSection()
  for name in _OWN if task.sources else ():
    value = getattr(task, name)
    sections.require(
      not value or value == getattr(usual, name),
      f"task.{name}",
      f"{sections.shown(value)} is of one dataset, but task.sources names"
      " several; leave it empty",
    )
  for path, each in _datasets_of(task).items():
    _check_dataset(path, each)


def _check_dataset(path: str, task: sections.TaskSection) -> None:
  uri = uri_lib.parse(f"{path}.dataset", task.dataset)
  for entry, column in task.fields.items():
    sections.require(
      isinstance(column, str) and entry not in ("index", "metadata", "source"),
      f"{path}.fields",
      f"{sections.shown(entry)} is set by the run, or {sections.shown(column)}"
      ' is no column; write {"question": "problem"}',
    )
  has_messages = bool(task.fields.get("messages"))
  sections.require(
    bool(task.fields.get("question", "question")) or has_messages,
    f"{path}.fields",
    "they name no question; name the column of one, or of messages",
  )
  if task.eval_dataset:
    other = uri_lib.parse(f"{path}.eval_dataset", task.eval_dataset)
    sections.require(
      uri.has_rows and other.has_rows,
      f"{path}.eval_dataset",
      f"{sections.shown(task.eval_dataset)} has to be files, as {path}.dataset"
      " then is; a dataset of reasoning-gym has held-out questions of its own",
    )
  sections.require(
    not task.system or task.chat or has_messages,
    f"{path}.system",
    f"{sections.shown(task.system)} is a message of a chat; set {path}.chat",
  )
