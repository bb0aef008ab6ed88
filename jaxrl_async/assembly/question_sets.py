"""The questions of an evaluation: those of a dataset, all or the first ones."""

import contextlib
import copy
import dataclasses
from typing import Any

from ml_collections import config_dict

from jaxrl_async import types
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import held_out
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.text import tokenizer as tokenizer_lib

ANY_LENGTH = 2**31 - 1
HELD_OUT = "held_out"  # the name of the questions that a run holds out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
  """The questions of one evaluation.

  Attributes:
    prompts: those that fit, in order.
    num_too_long: number of questions that do not fit and are left out.
    versions: versions of the files or the code that they come from.
  """

  prompts: list[types.Prompt]
  num_too_long: int
  versions: dict[str, str]


def task_of(config: sections.Config, dataset: str) -> sections.Config:
  """Return a copy of a config whose held-out questions are all of a dataset.

  Args:
    config: names the columns and the template.
    dataset: as `task.dataset`.
  """
  changed = copy.deepcopy(config)
  task = changed.task
  if dataset != task.dataset:
    task.params = config_dict.ConfigDict()
    task.sources = config_dict.ConfigDict()
  task.dataset = dataset
  # Files have no held-out rows of their own here: all of them are asked.
  task.eval_dataset = dataset if is_of_rows(dataset) else ""
  return changed


def is_of_rows(dataset: str) -> bool:
  """Return whether a dataset consists of stored rows and is not generated."""
  kind, has_colon, _ = dataset.partition(":")
  return bool(has_colon) and kind != "reasoning_gym"


def of_set(config: sections.Config, name: str) -> sections.Config:
  """Return a copy of a config whose evaluation is a set of `eval.sets`."""
  entries: Any = config.eval.sets[name]
  changed = task_of(config, entries.dataset)
  for field in ("params", "fields", "template"):
    if field in entries:
      setattr(changed.task, field, entries[field])
  changed.eval.num_items = entries.get("num_items", 0)
  changed.eval.samples = entries.get("samples", 1)
  changed.eval.sets = config_dict.ConfigDict()
  return changed


def of_run(setup: setup_lib.Setup, name: str) -> tuple[Questions, int]:
  """Return the questions of a set of `eval.sets`, and the answers to each.

  Raises:
    ConfigError: as `read`; the message begins with the set.
  """
  config = of_set(setup.config, name)
  try:
    questions = read(
      config,
      setup.tokenizer,
      num_items=config.eval.num_items,
      max_prompt_tokens=config.rollout.max_prompt_tokens,
    )
  except sections.ConfigError as error:
    raise sections.ConfigError(f"eval.sets: {name}: {error}") from error
  return questions, config.eval.samples


def read(
  config: sections.Config,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  num_items: int,
  max_prompt_tokens: int = ANY_LENGTH,
) -> Questions:
  """Return the first held-out questions of a config's dataset, or all.

  Args:
    config: names the dataset, its columns and the template.
    tokenizer: of the policy.
    num_items: number of questions; 0 is all of a dataset of rows, and as many
      as by default of one that is generated.
    max_prompt_tokens: longer prompts are left out and counted.

  Raises:
    ConfigError: the dataset cannot be read, has too few questions, or none that
      fits.
  """
  source = _prompt_source(config, tokenizer, max_prompt_tokens)
  if isinstance(source.items, gym.ReasoningGym):
    return held_out_of(
      config,
      tokenizer,
      num_items=num_items or sections.EvalSection().num_items,
      max_prompt_tokens=max_prompt_tokens,
    )
  fitting, num_too_long = [], 0
  for item in _one_pass(source.items, num_items):
    prompt = source.prompt(source_lib.Split.EVAL, item)
    if len(prompt.tokens) <= max_prompt_tokens:
      fitting.append(prompt)
    else:
      num_too_long += 1
  sections.require(
    bool(fitting),
    "rollout.max_prompt_tokens",
    f"{max_prompt_tokens}, but all {num_too_long} prompts of"
    f" {source.items.name} are longer",
  )
  return Questions(
    prompts=fitting,
    num_too_long=num_too_long,
    versions=dict(source.items.versions),
  )


def held_out_of(
  config: sections.Config,
  tokenizer: tokenizer_lib.Tokenizer,
  *,
  num_items: int,
  max_prompt_tokens: int = 0,
) -> Questions:
  """Return the held-out questions that a run of the config evaluates.

  Each of them is there once, and those that are too long are not counted.

  Args:
    config: of the run.
    tokenizer: of the policy.
    num_items: number of questions.
    max_prompt_tokens: longest prompt; 0 is that of the config.

  Raises:
    ConfigError: the dataset cannot be used, or has too few questions.
  """
  most = max_prompt_tokens or config.rollout.max_prompt_tokens
  source = _prompt_source(config, tokenizer, most)
  source.items.check()
  return Questions(
    prompts=held_out.make(source, num_items),
    num_too_long=0,
    versions=dict(source.items.versions),
  )


def _prompt_source(
  config: sections.Config,
  tokenizer: tokenizer_lib.Tokenizer,
  max_prompt_tokens: int,
) -> prompts.PromptSource:
  template = setup_lib.chat_template_of(config)
  return prompts.PromptSource(
    items=setup_lib.source_of(config, tokenizer),
    task=config.task,
    tokenizer=tokenizer,
    seed=config.seed,
    max_prompt_tokens=max_prompt_tokens,
    chat_template=template,
    tools=setup_lib.tools_of(config.task, tokenizer, template),
  )


def _one_pass(
  source: source_lib.Source, num_items: int
) -> list[dict[str, Any]]:
  """Return the items of the evaluation split, each once and in order."""
  items: dict[int, dict[str, Any]] = {}
  stream = source.open(source_lib.Split.EVAL, 0, num_workers=1)
  with contextlib.closing(stream):
    while not num_items or len(items) < num_items:
      item = stream.next()
      if item is None:
        continue
      if item["index"] in items:
        break  # the second pass
      items[item["index"]] = item
  sections.require(
    len(items) >= num_items,
    "dataset",
    f"{source.name} has only {len(items)} of {num_items} questions (num_items)",
  )
  return list(items.values())
