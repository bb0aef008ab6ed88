"""Examples made of a split's prompts, as many as fit and are asked for."""

from collections.abc import Iterator
import contextlib
from typing import Any, Generic, TypeVar

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import prompts

# After this many in a row that cannot be used, there is no other.
MAX_UNUSABLE = 2_000

Example = TypeVar("Example")


class ExampleStream(Generic[Example]):
  """The examples of a split, one after the other, that fit into a row.

  A kind of examples is a subclass with `what`, their name in messages, and
  `make`. The length of an example is its `len`.

  Attributes:
    num_too_long: examples that were skipped so far, because they are longer
      than a row.
    num_equal: examples that were skipped because nothing is to be learned from
      them: their two completions are equal.
  """

  what = "examples"

  def __init__(
    self,
    source: prompts.PromptSource,
    *,
    split: str,
    num_examples: int,
    max_tokens: int,
    max_unusable: int = MAX_UNUSABLE,
  ):
    """Prepare the examples.

    Args:
      max_tokens: longest example, prompts included.
      max_unusable: after so many in a row that are skipped, an error is raised.
    """
    self.source = source
    self._split = split
    self._num_examples = num_examples
    self._max_tokens = max_tokens
    self._max_unusable = max_unusable
    self.num_too_long = 0
    self.num_equal = 0

  def make(self, prompt: types.Prompt, place: int) -> Any:
    """Return an example, or None if there is nothing to learn from it.

    Args:
      prompt: of the split.
      place: the position after the prompt in the split. Random choices depend
        on it and not on the item, so that a second pass over a small dataset
        makes others.
    """
    raise NotImplementedError

  def __iter__(self) -> Iterator[Example]:
    """Yield `num_examples` examples."""
    stream = prompts.PromptStream(
      self.source,
      self._split,
      max_barren=prompts.MAX_BARREN_CHECKED,
    )
    with contextlib.closing(stream):
      for _ in range(self._num_examples):
        yield self._next(stream)

  def left_out(self) -> list[str]:
    """Return lines about the examples that were skipped so far."""
    return [
      f"{count:,} {self.what} {why} and were left out"
      for count, why in (
        (self.num_too_long, "are longer than train.tokens_per_row"),
        (self.num_equal, "have two equal completions"),
      )
      if count
    ]

  def longest(self, example: Any) -> int:
    """Return the tokens of the longest sequence of an example."""
    return len(example)

  def _check_length(self, example: Example, name: str) -> None:
    length, most = self.longest(example), self.source.max_positions
    sections.require(
      most is None or length <= most,
      "train.tokens_per_row",
      f"{name} has {length} tokens, but the model was made for {most}"
      f" (max_position_embeddings); use {most}, which leaves longer {self.what}"
      " out, or allow more by model.max_positions",
    )

  def _next(self, stream: prompts.PromptStream) -> Example:
    shortest = None
    for _ in range(self._max_unusable):
      prompt = stream.next()
      example = self.make(prompt, stream.state()["next_index"])
      if example is None:
        self.num_equal += 1
        continue
      if len(example) <= self._max_tokens:
        self._check_length(example, prompt.prompt_id)
        return example
      self.num_too_long += 1
      shortest = min(shortest or len(example), len(example))
    name = self.source.items.name
    sections.require(
      shortest is not None,
      "task.dataset",
      f"nothing is to be learned from {self._max_unusable} {self.what} of"
      f" {name} in a row, whose completions are equal",
    )
    raise sections.ConfigError(
      f"train.tokens_per_row: {self._max_tokens}, but the shortest of"
      f" {self._max_unusable} {self.what} of {name} has {shortest} tokens with"
      " its prompt; use more"
    )
