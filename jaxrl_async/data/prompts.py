"""Prompts: the items of a source in the run's template, as tokens.

A stream returns the prompts of one split in order, from a position that can be
saved. This module works with every source; see `source` for the interface.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import dataclasses
import time
from typing import Any

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import columns as columns_lib
from jaxrl_async.data import rendering
from jaxrl_async.data import source as source_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

# After this many items in a row without a usable prompt, there are no more.
_MAX_BARREN = 2_000
# The same after this many tokens of prompts that are too long. Otherwise a long
# template would be tokenized two thousand times before the error is raised.
_MAX_BARREN_TOKENS = 5_000_000
# The limit for checks before the start, which must not wait long for a slow
# dataset.
MAX_BARREN_CHECKED = 200
# Prompts that the checks look at: as many as are there, and so many at least.
_NUM_CHECKED = 100
_NUM_AWAITED = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
  """The source of all prompts of a run.

  Attributes:
    max_prompt_tokens: longest prompt that fits. Longer ones are skipped.
    chat_template: of the tokenizer, if the prompts are chats.
    evaluated: questions that every split but the held-out one passes over.
    max_positions: longest sequence that the model was made for, if it is known.
    tools: descriptions of the tools that every chat may call, if its item names
      none.
  """

  items: source_lib.Source
  task: sections.TaskSection
  tokenizer: tokenizer_lib.Tokenizer
  seed: int
  max_prompt_tokens: int
  chat_template: chat_template_lib.ChatTemplate | None = None
  evaluated: frozenset[str] = frozenset()
  max_positions: int | None = None
  tools: Sequence[Mapping[str, Any]] = ()

  def named(self, split: str, item: dict[str, Any]) -> tuple[str, str]:
    """Return the source of an item and the id of its prompt."""
    source = str(item.get("source", self.items.name))
    return source, f"{source}/{split}/{item.get('index')}"

  def prompt(self, split: str, item: dict[str, Any]) -> types.Prompt:
    """Return the prompt of an item, without checking its length."""
    name = self.items.name
    if missing := {"index", "question"} - item.keys():
      raise sections.ConfigError(
        f"task.dataset: an item of {name} has no {sorted(missing)[0]!r}"
      )
    if self.tools:
      item = {columns_lib.TOOLS: list(self.tools), **item}
    source, prompt_id = self.named(split, item)
    try:
      tokens = rendering.tokens(
        rendering.style_of(self.task, source),
        item,
        source,
        tokenizer=self.tokenizer,
        chat_template=self.chat_template,
      )
    except sections.ConfigError:
      raise
    except ValueError as error:
      raise sections.ConfigError(
        f"task.dataset: {prompt_id} cannot be tokenized: {error}"
      ) from error
    return types.Prompt(
      prompt_id=prompt_id, tokens=tokens, item={"source": source, **item}
    )

  def chat(self, item: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the messages of an item's prompt, or None if it is no chat."""
    source, _ = self.named("", item)
    style = rendering.style_of(self.task, source)
    if "messages" not in item and not style.chat:
      return None
    return rendering.messages_of(style, item, source)


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
      max_barren: number of items in a row without a prompt that fits, after
        which an error is raised.
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
    is_eval = split == source_lib.Split.EVAL
    self._excluded = frozenset() if is_eval else source.evaluated
    self.restore({"next_index": 0, "num_too_long": 0})

  @property
  def num_too_long(self) -> int:
    """Number of prompts that were skipped before the current position."""
    return self._place["num_too_long"]

  def metrics(self) -> dict[str, float]:
    """Return passes over finite data, and what was left out.

    Any thread may call it.
    """
    items = self._source.items
    values = {"data/prompts_too_long": float(self.num_too_long)}
    if isinstance(items, source_lib.Counted):
      passes = items.epochs(self._split, self._place["next_index"])
      names = {name: f"data/epoch/{name}" for name in passes}
      names[items.name] = "data/epoch"  # not one of several
      values |= {names[name]: value for name, value in passes.items()}
      values["data/bad_rows"] = float(items.num_bad())
    return values

  def exclude(self, questions: Iterable[str]) -> None:
    """Pass over these questions, which a run evaluates on, in what follows.

    They are passed over besides those that the source of the prompts names. It
    must be called before the first use.
    """
    self._excluded |= frozenset(questions)

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

  def state(self) -> dict[str, Any]:
    """Return the position of the stream, for a checkpoint."""
    return dict(self._place)

  def restore(self, state: Mapping[str, Any]) -> None:
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
    if item is not None and item.get("question") in self._excluded:
      item = None
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


def validate_task(source: PromptSource) -> list[types.Prompt]:
  """Check source, template and alphabet on a few prompts, and return them.

  There are more of them if they can be had without waiting, as rows of files.
  """
  source.items.check()
  PromptStream(source, source_lib.Split.EVAL)  # raises if the split is missing
  stream = PromptStream(
    source, source_lib.Split.TRAIN, max_barren=MAX_BARREN_CHECKED
  )
  found: list[types.Prompt] = []
  with contextlib.closing(stream):
    try:
      while len(found) < _NUM_CHECKED and (
        len(found) < _NUM_AWAITED or stream.is_ready()
      ):
        found.append(stream.next())
        source_lib.stored(found[-1].item, source.items.name)
    except source_lib.SourceError as error:
      raise sections.ConfigError(str(error)) from error
  return found
