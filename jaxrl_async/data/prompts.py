"""Prompts: the items of a source in the run's template, as tokens.

A stream returns the prompts of one split in order, from a position that can be
saved. This module works with every source; see `source` for the interface.
"""

from collections.abc import Generator, Mapping
import contextlib
import dataclasses
import itertools
import string
import time
from typing import Any

from jaxtyping import Int32
import numpy as np

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import source as source_lib
from jaxrl_async.data import worked_solutions
from jaxrl_async.rewards import extraction
from jaxrl_async.text import tokenizer as tokenizer_lib

# After this many items in a row without a usable prompt, there are no more.
_MAX_BARREN = 2_000
# The same after this many tokens of prompts that are too long. Otherwise a long
# template would be tokenized two thousand times before the error is raised.
_MAX_BARREN_TOKENS = 5_000_000
# The limit for checks before the start, which must not wait long for a slow
# dataset.
_MAX_BARREN_CHECKED = 200


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
  """The source of all prompts of a run.

  Attributes:
    items: the source of the questions.
    task: the section with the template and the number of processes that may
      make items.
    tokenizer: the policy's tokenizer.
    seed: seed of the run.
    max_prompt_tokens: longest prompt that fits. Longer ones are skipped.
  """

  items: source_lib.Source
  task: sections.TaskSection
  tokenizer: tokenizer_lib.Tokenizer
  seed: int
  max_prompt_tokens: int

  def prompt(self, split: str, item: dict[str, Any]) -> types.Prompt:
    """Return the prompt of an item, without checking its length.

    Raises:
      sections.ConfigError: the item lacks an entry, or its prompt cannot be
        filled in or tokenized.
    """
    name = self.items.name
    if missing := {"index", "question"} - item.keys():
      raise sections.ConfigError(
        f"task.dataset: an item of {name} has no {sorted(missing)[0]!r}"
      )
    text = render(self.task.template, item, name)
    prompt_id = f"{name}/{split}/{item['index']}"
    try:
      tokens = self.tokenizer.encode_prompt(text)
    except ValueError as error:
      raise sections.ConfigError(
        f"task.dataset: {prompt_id} cannot be tokenized: {error}"
      ) from error
    return types.Prompt(prompt_id=prompt_id, tokens=tokens, item=item)


class PromptStream:
  """A split's prompts in order, from a position that can be saved.

  Prompts that do not fit are skipped and counted, never truncated. The position
  is the one after the last prompt that `next` returned, however many items the
  source has made ahead.

  Threads: a stream belongs to one thread, the one that admits groups. Its state
  may be saved only while that thread does not use it.
  """

  def __init__(
    self,
    source: PromptSource,
    split: str,
    *,
    num_workers: int = 0,
    max_barren: int = _MAX_BARREN,
  ):
    """Create a stream, which makes no items before its first use or `prefetch`.

    Args:
      source: the run's source of prompts.
      split: a split of the source.
      num_workers: how many processes may make items at the same time. 0 means
        `task.question_workers`.
      max_barren: number of items in a row without a prompt that fits, after
        which an error is raised.

    Raises:
      sections.ConfigError: the source has no such split.
    """
    name, splits = source.items.name, source.items.splits
    sections.require(
      split in splits,
      "task.dataset",
      f"{name} has no split {str(split)!r}, only {', '.join(splits)}",
    )
    self._source = source
    self._split = split
    self._num_workers = num_workers or source.task.question_workers
    self._max_barren = max_barren
    self._items: source_lib.ItemStream | None = None
    self.restore({"next_index": 0, "num_too_long": 0})

  @property
  def num_too_long(self) -> int:
    """Number of prompts that were skipped before the current position."""
    return self._place["num_too_long"]

  def prefetch(self) -> None:
    """Let the source start to make items, without waiting for them."""
    if self._items is None:
      self._items = self._source.items.open(
        self._split,
        self._place["next_index"],
        num_workers=self._num_workers,
      )

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether a prompt is ready, after waiting up to `timeout_s`.

    Raises:
      sections.ConfigError: many items in a row had no prompt that fits, or the
        task cannot be used.
      source.SourceError: the source failed.
    """
    self.prefetch()
    assert self._items is not None
    deadline = time.monotonic() + timeout_s
    while self._ahead is None:
      left_s = max(0.0, deadline - time.monotonic())
      if not self._items.is_ready(left_s):
        return False
      self._look_at(self._items.next())
    return True

  def next(self) -> types.Prompt:
    """Wait for the next prompt that fits and return it.

    It raises the same errors as `is_ready`.
    """
    while not self.is_ready(timeout_s=60.0):
      pass
    assert self._ahead is not None
    prompt, self._ahead = self._ahead, None
    self._place = dict(self._seen)
    self._num_barren = self._num_barren_tokens = 0
    self._shortest = None
    return prompt

  def state(self) -> dict[str, int]:
    """Return the position of the stream, for a checkpoint."""
    return dict(self._place)

  def restore(self, state: Mapping[str, int]) -> None:
    """Continue with the same prompts from a position that `state` returned."""
    self.close()
    names = ("next_index", "num_too_long")
    self._place = {name: state[name] for name in names}
    # The position after the last item that was looked at. `_ahead` is the
    # prompt of this item, if it fits and `next` has not returned it yet.
    self._seen = dict(self._place)
    self._ahead: types.Prompt | None = None
    self._num_barren = self._num_barren_tokens = 0
    self._shortest: int | None = None

  def close(self) -> None:
    """Close the source's stream. The next use opens another one."""
    if self._items is not None:
      self._items.close()
      self._items = None

  def _look_at(self, item: dict[str, Any] | None) -> None:
    max_tokens = self._source.max_prompt_tokens
    self._seen["next_index"] += 1
    self._num_barren += 1
    if item is not None:
      prompt = self._source.prompt(self._split, item)
      length = len(prompt.tokens)
      if length <= max_tokens:
        self._ahead = prompt
        return
      self._seen["num_too_long"] += 1
      self._num_barren_tokens += length
      self._shortest = min(self._shortest or length, length)
    if (
      self._num_barren < self._max_barren
      and self._num_barren_tokens < _MAX_BARREN_TOKENS
    ):
      return
    name = self._source.items.name
    if self._shortest is not None:
      raise sections.ConfigError(
        f"rollout.max_prompt_tokens: {max_tokens}, but the"
        f" shortest prompt of {self._num_barren} items of {name} has"
        f" {self._shortest} tokens"
      )
    raise sections.ConfigError(
      f"task.dataset: none of {self._max_barren} items of {name} is a"
      f" question of the split {self._split}; it has too few questions"
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class WorkedExample:
  """A prompt and its worked solution.

  Attributes:
    prompt_tokens: token ids of the filled-in template.
    completion_tokens: token ids of the solution and the end of sequence.
  """

  prompt_tokens: Int32[np.ndarray, "P"]
  completion_tokens: Int32[np.ndarray, "C"]


def worked_examples(
  source: PromptSource,
  warm_start: sections.WarmStartSection,
  *,
  max_tokens: int,
) -> Generator[WorkedExample, None, None]:
  """Yield `num_examples` worked solutions of the warm-start split.

  A question may occur several times, with the same or with other mistakes in
  its solution. Repetitions are not removed, because that would remove mostly
  right solutions, which are all equal for a question. Example n depends only on
  the seed and n.

  Raises:
    sections.ConfigError: prompt and solution are longer than `max_tokens`.
  """
  stream = PromptStream(source, source_lib.Split.WARM_START)
  with contextlib.closing(stream):
    for _ in range(warm_start.num_examples):
      yield _worked_example(source, stream, warm_start, max_tokens)


def _worked_example(
  source: PromptSource,
  stream: PromptStream,
  warm_start: sections.WarmStartSection,
  max_tokens: int,
) -> WorkedExample:
  prompt = stream.next()
  # The seed depends on the position in the stream and not on the item, so that
  # a second pass over a small dataset makes other mistakes.
  rng = np.random.default_rng((source.seed, stream.state()["next_index"]))
  solver = worked_solutions.SOLVERS[warm_start.solver]
  solution = solver(prompt.item, rng, warm_start.corrupted_frac)
  completion = np.append(
    source.tokenizer.encode(solution), np.int32(source.tokenizer.eos_id)
  )
  length = len(prompt.tokens) + len(completion)
  if length > max_tokens:
    raise sections.ConfigError(
      f"train.tokens_per_row: {max_tokens}, but the worked solution of"
      f" {prompt.prompt_id} has {length} tokens with its prompt; use more"
    )
  return WorkedExample(
    prompt_tokens=prompt.tokens, completion_tokens=completion
  )


def render(template: str, item: Mapping[str, Any], source_name: str) -> str:
  """Fill in the template with the question and the item's metadata.

  Args:
    template: the template; see `sections.TaskSection`.
    item: the item; see `source`.
    source_name: name of the source, for messages.

  Raises:
    sections.ConfigError: the template uses a field that the item does not have,
      or it cannot be filled in.
  """
  fields = {**item.get("metadata", {}), "question": item["question"]}
  try:
    wanted = [name for _, name, _, _ in string.Formatter().parse(template)]
    for name in wanted:
      # "a.b" and "a[0]" look into the field a.
      root = (name or "question").partition(".")[0].partition("[")[0]
      if root not in fields:
        raise sections.ConfigError(
          f"task.template: {source_name} has no field {root!r}"
          f"{sections.did_you_mean(root, map(str, fields))}"
        )
    return string.Formatter().vformat(template, (), fields)
  except sections.ConfigError:
    raise
  except (ValueError, LookupError, AttributeError, TypeError) as error:
    raise sections.ConfigError(
      f"task.template: {template!r} cannot be filled in: {error}"
    ) from error


def validate_task(source: PromptSource) -> None:
  """Check source, template and alphabet on a few prompts.

  Raises:
    sections.ConfigError: one of them is wrong. The message says what to change.
  """
  source.items.check()
  PromptStream(source, source_lib.Split.EVAL)  # raises if the split is missing
  stream = PromptStream(
    source, source_lib.Split.TRAIN, max_barren=_MAX_BARREN_CHECKED
  )
  with contextlib.closing(stream):
    try:
      for _ in range(4):
        source_lib.stored(stream.next().item, source.items.name)
    except source_lib.SourceError as error:
      raise sections.ConfigError(str(error)) from error


def validate_warm_start(
  source: PromptSource,
  warm_start: sections.WarmStartSection,
  *,
  max_tokens: int,
) -> None:
  """Check that the solver solves this task, in a form that can be scored.

  The first 100 examples are checked against `max_tokens`. The others are
  checked when they are made.

  Raises:
    sections.ConfigError: a check failed. The message says what to change.
  """
  if warm_start.solver not in worked_solutions.SOLVERS:
    raise sections.ConfigError(
      f"warm_start.solver: {warm_start.solver!r} does not exist"
      f"{sections.did_you_mean(warm_start.solver, worked_solutions.SOLVERS)}"
    )
  task = source.task
  stream = PromptStream(
    source, source_lib.Split.WARM_START, max_barren=_MAX_BARREN_CHECKED
  )
  with contextlib.closing(stream):
    item = stream.next().item
  solver = worked_solutions.SOLVERS[warm_start.solver]
  try:
    solution = solver(item, np.random.default_rng(source.seed), 0.0)
  except (LookupError, ValueError, TypeError, AttributeError) as error:
    raise sections.ConfigError(
      f"warm_start.solver: {warm_start.solver!r} cannot solve"
      f" {source.items.name}"
    ) from error
  answer = extraction.extract_answer(solution, task.answer_prefix)
  if answer != item.get("answer"):
    raise sections.ConfigError(
      f"task.answer_prefix: {task.answer_prefix!r} finds {answer!r} in a right "
      f"solution of the solver {warm_start.solver!r}, {solution!r}"
    )
  examples = worked_examples(source, warm_start, max_tokens=max_tokens)
  with contextlib.closing(examples):
    for _ in itertools.islice(examples, 100):
      pass
