"""Pairs of completions of one prompt, of which one is better, as tokens."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.config import preference_section
from jaxrl_async.config import sections
from jaxrl_async.data import example_stream
from jaxrl_async.data import prompts
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.data import worked_solutions


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
  """A prompt with its better and with its worse completion."""

  chosen: worked_examples_lib.WorkedExample
  rejected: worked_examples_lib.WorkedExample

  @property
  def num_tokens(self) -> int:
    """The number of tokens of both, prompts included."""
    return len(self.chosen.tokens) + len(self.rejected.tokens)


def joined(pair: Pair) -> worked_examples_lib.WorkedExample:
  """Return both trajectories one after the other."""
  both = (pair.chosen, pair.rejected)
  return worked_examples_lib.WorkedExample(
    tokens=np.concatenate([x.tokens for x in both]),
    loss_mask=np.concatenate([x.loss_mask for x in both]),
  )


class Pairs:
  """The pairs of a split, one after the other.

  Pair n depends only on the seed and n. Pairs whose completions are equal are
  skipped.
  """

  def __init__(
    self,
    source: prompts.PromptSource,
    section: sections.PreferenceSection,
    *,
    corrupted_frac: float,
    split: str,
    num_examples: int,
    max_tokens: int,
  ):
    """Prepare the pairs.

    Args:
      source: of the prompts.
      section: what the two completions are.
      corrupted_frac: of a rejected completion that a solver of
        `worked_solutions.SOLVERS` writes.
      split: of the source.
      num_examples: number of pairs.
      max_tokens: longest pair, prompts included.

    Raises:
      sections.ConfigError: there is no such completion.
    """
    worked_solutions.check_pair(section)
    self._source = source
    self._solvers = {
      side: _solver(f"preference.{side}", getattr(section, side), frac)
      for side, frac in zip(
        preference_section.SIDES, (0.0, corrupted_frac), strict=True
      )
    }
    self._stream = example_stream.ExampleStream(
      source,
      self._make,
      lambda pair: pair.num_tokens,
      split=split,
      num_examples=num_examples,
      max_tokens=max_tokens,
      what="pairs",
    )

  def __iter__(self) -> Iterator[Pair]:
    """Yield `num_examples` pairs.

    Raises:
      sections.ConfigError: the data has no pairs, or none that fits.
    """
    return iter(self._stream)

  def left_out(self) -> list[str]:
    """Return lines about the pairs that were skipped so far."""
    return [
      f"{count:,} pairs {why} and were left out"
      for count, why in (
        (self._stream.num_too_long, "are longer than train.tokens_per_row"),
        (self._stream.num_useless, "have two equal completions"),
      )
      if count
    ]

  def _make(self, prompt: types.Prompt, place: int) -> Pair | None:
    texts = {
      side: self._text(side, prompt, place) for side in preference_section.SIDES
    }
    if texts["chosen"] == texts["rejected"]:
      return None
    made = {}
    for side, text in texts.items():
      try:
        made[side] = worked_examples_lib.answered(
          prompt, text, self._source.tokenizer
        )
      except ValueError as error:
        raise sections.ConfigError(
          f"preference.{side}: the completion of {prompt.prompt_id} cannot be"
          f" tokenized: {error}"
        ) from error
    return Pair(**made)

  def _text(self, side: str, prompt: types.Prompt, place: int) -> str:
    """Return one completion of a prompt.

    Raises:
      sections.ConfigError: there is none.
    """
    # As in `WorkedExamples`, the seed depends on the position.
    rng = np.random.default_rng((self._source.seed, place))
    try:
      text = self._solvers[side](prompt.item, rng)
    except (LookupError, ValueError, TypeError, AttributeError) as error:
      reason = error.args[0] if isinstance(error, LookupError) else error
      raise sections.ConfigError(
        f"preference.{side}: {prompt.prompt_id} is no pair ({reason}); name the"
        " columns of both completions in preference.chosen and"
        " preference.rejected"
      ) from error
    sections.require(
      isinstance(text, str),
      f"preference.{side}",
      f"{sections.shown(text)} is no text, for {prompt.prompt_id}",
    )
    return text


def _solver(setting: str, name: str, frac: float) -> worked_solutions.Solver:
  place, _, column = name.partition(":")
  if place == worked_solutions.FIELD:
    return functools.partial(_of_column, column)
  return worked_solutions.find(name, frac, setting)


def _of_column(
  column: str, item: Mapping[str, Any], rng: np.random.Generator
) -> str:
  """Return the text in a column, or the answer that ends a chat there.

  The messages before the answer may be left out. If they are there, they have
  to be those of the prompt, apart from a message of the system.

  Raises:
    LookupError: there is no such text.
  """
  value = item.get("metadata", {}).get(column, item.get(column))
  if not isinstance(value, list):
    return worked_solutions.of_field(column, item, rng)
  try:
    found = [(m["role"], m["content"]) for m in value]
  except (TypeError, KeyError) as error:
    raise LookupError(f"{column!r} has no messages of a chat") from error
  if not found or found[-1][0] != "assistant":
    raise LookupError(f"the chat in {column!r} ends without an answer")
  asked = item.get("messages") or [
    {"role": "user", "content": item["question"]}
  ]
  before = [x for x in found[:-1] if x[0] != "system"]
  wanted = [(m["role"], m["content"]) for m in asked if m["role"] != "system"]
  if before and before != wanted:
    raise LookupError(
      f"the chat in {column!r} does not ask what the prompt asks"
    )
  return found[-1][1]
