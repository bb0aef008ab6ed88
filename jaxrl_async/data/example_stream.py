"""Examples made of a split's prompts, as many as fit and are asked for."""

from collections.abc import Callable, Iterator
import contextlib
from typing import Generic, TypeVar

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import prompts

# After this many in a row that cannot be used, there is no other.
MAX_UNUSABLE = 2_000

Example = TypeVar("Example")


class ExampleStream(Generic[Example]):
  """The examples of a split, one after the other, that fit into a row.

  Attributes:
    num_too_long: examples that were skipped so far, because they are longer
      than a row.
    num_useless: examples that were skipped because nothing is to be learned
      from them.
  """

  def __init__(
    self,
    source: prompts.PromptSource,
    make: Callable[[types.Prompt, int], Example | None],
    num_tokens: Callable[[Example], int],
    *,
    split: str,
    num_examples: int,
    max_tokens: int,
    what: str,
    max_unusable: int = MAX_UNUSABLE,
  ):
    """Prepare the examples.

    Args:
      source: of the prompts.
      make: returns the example of a prompt and of the position after it in the
        split, or None if there is nothing to learn from it.
      num_tokens: returns the length of an example.
      split: of the source.
      num_examples: number of examples.
      max_tokens: longest example.
      what: what the examples are called, in messages.
      max_unusable: after so many in a row that are skipped, an error is raised.
    """
    self._source = source
    self._make = make
    self._num_tokens = num_tokens
    self._split = split
    self._num_examples = num_examples
    self._max_tokens = max_tokens
    self._what = what
    self._max_unusable = max_unusable
    self.num_too_long = 0
    self.num_useless = 0

  def __iter__(self) -> Iterator[Example]:
    """Yield `num_examples` examples.

    Raises:
      sections.ConfigError: none can be used, or one cannot be made.
    """
    stream = prompts.PromptStream(
      self._source,
      self._split,
      max_barren=prompts.MAX_BARREN_CHECKED,
    )
    with contextlib.closing(stream):
      for _ in range(self._num_examples):
        yield self._next(stream)

  def _next(self, stream: prompts.PromptStream) -> Example:
    shortest = None
    for _ in range(self._max_unusable):
      prompt = stream.next()
      example = self._make(prompt, stream.state()["next_index"])
      if example is None:
        self.num_useless += 1
        continue
      length = self._num_tokens(example)
      if length <= self._max_tokens:
        return example
      self.num_too_long += 1
      shortest = min(shortest or length, length)
    name = self._source.items.name
    sections.require(
      shortest is not None,
      "task.dataset",
      f"nothing is to be learned from {self._max_unusable} {self._what} of"
      f" {name} in a row, whose completions are equal",
    )
    raise sections.ConfigError(
      f"train.tokens_per_row: {self._max_tokens}, but the shortest of"
      f" {self._max_unusable} {self._what} of {name} has {shortest} tokens with"
      " its prompt; use more"
    )
