"""The held-out questions of a run, which are kept in its workdir.

They depend only on the config. They are stored because some datasets need a
second for each question, so that making them at each start would take minutes.
"""

from collections.abc import Callable
import contextlib
import json
import math
import os
import pathlib
import time
from typing import Any

from jaxrl_async import types
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.storage import disk
from jaxrl_async.storage import item_json

# Nothing else runs while the questions are made, but each process takes memory.
_MAX_PROCESSES = 16
# After this many repeated questions in a row, the split has no other ones.
_MAX_REPEATED = 2_000


class _UnusableError(ValueError):
  """The file's questions cannot be used by the run, for the reason given."""


def make(
  source: prompts.PromptSource,
  num_items: int,
  on_progress: Callable[[int], None] = lambda num_made: None,
  *,
  patience_s: float = math.inf,
) -> list[types.Prompt]:
  """Return the first prompts of the evaluation split, each question once.

  Args:
    on_progress: called several times a second with the number made so far.
    patience_s: if the questions are not made in so many seconds, there are none
      in the result. A source of finite data knows at once whether it has them.

  Raises:
    sections.ConfigError: the split has fewer distinct questions.
  """
  _check_known_number(source.items, num_items)
  stream = prompts.PromptStream(
    source,
    source_lib.Split.EVAL,
    num_workers=max(
      source.task.question_workers, min(os.cpu_count() or 1, _MAX_PROCESSES)
    ),
  )
  end_s = time.monotonic() + patience_s
  found: dict[str, types.Prompt] = {}
  num_repeated = 0
  with contextlib.closing(stream):
    while len(found) < num_items:
      on_progress(len(found))
      if time.monotonic() > end_s:
        return []
      if not stream.is_ready(timeout_s=0.2):
        continue
      prompt = stream.next()
      if prompt.item["question"] not in found:
        found[prompt.item["question"]] = prompt
        num_repeated = 0
      elif (num_repeated := num_repeated + 1) == _MAX_REPEATED:
        raise sections.ConfigError(
          f"eval.num_items: {num_items}, but {source.items.name} has about "
          f"{len(found)} distinct held-out questions"
        )
  on_progress(num_items)
  return list(found.values())


def _check_known_number(items: source_lib.Source, num_items: int) -> None:
  if not isinstance(items, source_lib.Counted):
    return
  number = items.num_questions(source_lib.Split.EVAL)
  if number is not None and number < num_items:
    raise sections.ConfigError(
      f"eval.num_items: {num_items}, but {items.name} has {number} distinct"
      f" held-out questions; use {number} or fewer, or more rows"
    )


def load_or_make(
  path: pathlib.Path,
  source: prompts.PromptSource,
  num_items: int,
  *,
  note: Callable[[str], None],
  on_progress: Callable[[int], None],
  is_kept: bool = True,
) -> list[types.Prompt]:
  """Return the held-out prompts from the file, or make them and write it.

  They are made again if something that they depend on has changed, or if the
  file is damaged.

  Args:
    note: called with a message if stored questions cannot be used, or if the
      file cannot be written. Neither ends the run.
  """
  task = source.task
  made_from = {
    "dataset": source.items.name,
    "params": item_json.encode(dict(source.items.params)),
    "template": task.template,
    "tokenizer": source.tokenizer.digest(),
    "seed": source.seed,
    "max_prompt_tokens": source.max_prompt_tokens,
    "num_items": num_items,
    **({"chat": task.chat, "system": task.system} if task.chat else {}),
    **({"sources": fields_lib.plain(task)["sources"]} if task.sources else {}),
    **source.items.versions,
  }
  try:
    items = _read(path, made_from)
  except FileNotFoundError:
    pass
  except _UnusableError as error:
    note(f"{path}: the held-out questions are made again: {error}")
  else:
    return [source.prompt(source_lib.Split.EVAL, item) for item in items]
  made = make(source, num_items, on_progress)
  if not is_kept:
    return made
  try:
    _write(path, made_from, [prompt.item for prompt in made])
  except OSError as error:
    note(f"{path}: the held-out questions cannot be kept: {error}")
  return made


def _read(path: pathlib.Path, made_from: dict[str, Any]) -> list[Any]:
  try:
    stored = json.loads(path.read_text())
    before, items = dict(stored["made_from"]), item_json.decode(stored["items"])
  except (ValueError, LookupError, TypeError) as error:
    raise _UnusableError("the file is damaged") from error
  changed = [name for name in made_from if before.get(name) != made_from[name]]
  if changed:
    raise _UnusableError(f"{', '.join(changed)} changed")
  return items


def _write(
  path: pathlib.Path, made_from: dict[str, Any], items: list[Any]
) -> None:
  """Write the whole file, or leave the old one as it was."""
  stored = {"made_from": made_from, "items": item_json.encode(items)}
  path.parent.mkdir(parents=True, exist_ok=True)
  disk.replace_text(path, json.dumps(stored))
