"""Pairs of completions of one prompt, of which one is better, as tokens."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import columns as columns_lib
from jaxrl_async.data import example_stream
from jaxrl_async.data import prompts
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.data import worked_solutions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
  """A prompt with its better and with its worse completion."""

  chosen: worked_examples_lib.WorkedExample
  rejected: worked_examples_lib.WorkedExample

  def __len__(self) -> int:
    """Return the number of tokens of both, prompts included."""
    return len(self.chosen.tokens) + len(self.rejected.tokens)


def joined(pair: Pair) -> worked_examples_lib.WorkedExample:
  """Return both trajectories one after the other."""
  both = (pair.chosen, pair.rejected)
  return worked_examples_lib.WorkedExample(
    tokens=np.concatenate([x.tokens for x in both]),
    loss_mask=np.concatenate([x.loss_mask for x in both]),
  )


class Pairs(example_stream.ExampleStream[Pair]):
  """The pairs of a split, one after the other.

  Pair n depends only on the seed and n. Pairs whose completions are equal are
  skipped.
  """

  what = "pairs"

  def __init__(
    self,
    source: prompts.PromptSource,
    section: sections.PreferenceSection,
    *,
    corrupted_frac: float,
    **options: Any,
  ):
    """Prepare the pairs.

    Args:
      corrupted_frac: of a rejected completion that a solver of
        `worked_solutions.SOLVERS` writes.
    """
    super().__init__(source, **options)
    worked_solutions.check_pair(section)
    self._solvers = {
      side: _solver(f"preference.{side}", getattr(section, side), frac)
      for side, frac in zip(
        sections.PREFERENCE_SIDES, (0.0, corrupted_frac), strict=True
      )
    }

  def make(self, prompt: types.Prompt, place: int) -> Pair | None:
    """Return the pair of a prompt, or None if both completions are equal."""
    sides = sections.PREFERENCE_SIDES
    found = {side: self._completion(side, prompt, place) for side in sides}
    if found["chosen"] == found["rejected"]:
      return None
    made = {}
    for side, completion in found.items():
      try:
        made[side] = worked_examples_lib.completed(
          prompt, completion, self.source
        )
      except ValueError as error:
        raise sections.ConfigError(
          f"preference.{side}: the completion of {prompt.prompt_id} cannot be"
          f" tokenized: {error}"
        ) from error
    return Pair(**made)

  def longest(self, example: Pair) -> int:
    """Return the tokens of the longer one of the two."""
    return max(len(example.chosen), len(example.rejected))

  def _completion(
    self, side: str, prompt: types.Prompt, place: int
  ) -> worked_examples_lib.Solution:
    """Return one completion of a prompt."""
    rng = np.random.default_rng((self.source.seed, place))
    try:
      completion = self._solvers[side](prompt.item, rng)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
      reason = error.args[0] if isinstance(error, LookupError) else error
      raise sections.ConfigError(
        f"preference.{side}: {prompt.prompt_id} is no pair ({reason}); name the"
        " columns of both completions in preference.chosen and"
        " preference.rejected"
      ) from error
    sections.require(
      isinstance(completion, str | dict),
      f"preference.{side}",
      f"{sections.shown(completion)} is no text, for {prompt.prompt_id}",
    )
    return completion


def _solver(
  setting: str, name: str, frac: float
) -> Callable[
  [Mapping[str, Any], np.random.Generator], worked_examples_lib.Solution
]:
  place, _, column = name.partition(":")
  if place == worked_solutions.FIELD:
    return functools.partial(_of_column, column)
  return worked_solutions.find(name, frac, setting)


def _of_column(
  column: str, item: Mapping[str, Any], rng: np.random.Generator
) -> worked_examples_lib.Solution:
  """Return the text in a column, or the message that ends a chat there.

  The messages before it may be left out. If they are there, they have to be
  those of the prompt, apart from a message of the system.

  Raises:
    LookupError: there is no such text.
  """
  value = worked_solutions.value_of(item, column)
  if column == columns_lib.REPLY and columns_lib.TURN in item:
    return item[columns_lib.TURN]
  if not isinstance(value, list):
    return worked_solutions.of_field(column, item, rng)
  try:
    found = columns_lib.chat(value)
  except ValueError as error:
    raise LookupError(f"{column!r} is {error}") from error
  if found[-1]["role"] != "assistant":
    raise LookupError(f"the chat in {column!r} ends without an answer")
  asked = item.get("messages") or [
    {"role": "user", "content": item["question"]}
  ]
  before = [x for x in found[:-1] if x["role"] != "system"]
  if before and before != [m for m in asked if m["role"] != "system"]:
    raise LookupError(
      f"the chat in {column!r} does not ask what the prompt asks"
    )
  return found[-1]
