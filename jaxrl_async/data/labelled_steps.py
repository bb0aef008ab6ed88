"""Solutions in steps, each with a label whether it is right, as tokens."""

import dataclasses
from typing import Any

from jaxtyping import Float, Int32
import numpy as np

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import example_stream
from jaxrl_async.data import prompts
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.data import worked_solutions
from jaxrl_async.text import tokenizer as tokenizer_lib

# What stands after each step.
_END = "\n"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LabelledSteps:
  """A prompt with a solution, whose steps end at the tokens of the loss mask.

  Attributes:
    example: the mask is True at the last token of each step.
    labels: of each token; at the end of a step how right it is, from 0 to 1,
      and 0 elsewhere.
  """

  example: worked_examples_lib.WorkedExample
  labels: Float[np.ndarray, "T"]

  def __len__(self) -> int:
    """Return the number of tokens of the example."""
    return len(self.example)


def tokenized(
  prompt: types.Prompt, steps: list[str], tokenizer: tokenizer_lib.Tokenizer
) -> worked_examples_lib.WorkedExample:
  r"""Return a solution whose loss mask is True at the last token of each step.

  Each step is encoded by itself, together with the "\n" after it.
  """
  parts = [(prompt.tokens, False)]
  for step in steps:
    tokens = tokenizer.encode(step.removesuffix(_END) + _END)
    parts += [(tokens[:-1], False), (tokens[-1:], True)]
  return worked_examples_lib.joined(parts)


def ends(
  tokens: Int32[np.ndarray, "T"], tokenizer: tokenizer_lib.Tokenizer
) -> list[int]:
  r"""Return the last position of each step of a completion.

  A step is a line with something else than white space in it. It ends with the
  token that has its line break, and the last one with the completion. Empty
  lines belong to the step after them, so that they are no steps.
  """
  found, has_text = [], False
  for position, piece in enumerate(map(tokenizer.decode, tokens[:, None])):
    has_text |= bool(piece.strip())
    if has_text and _END in piece:
      found.append(position)
      has_text = False
  return [*found, len(tokens) - 1] if has_text else found


def completed(
  prompt: types.Prompt,
  completion: Int32[np.ndarray, "T"],
  tokenizer: tokenizer_lib.Tokenizer,
) -> tuple[worked_examples_lib.WorkedExample, list[int]]:
  r"""Return what a policy wrote as a solution that is scored at its steps.

  A last step without a line break is judged as `tokenized` would write it, with
  one in the place of the end of sequence.

  Returns:
    The example, with a loss mask that is True at the last token of each step,
    and the positions in the completion that these tokens stand for.
  """
  steps = ends(completion, tokenizer)
  tokens, marks = completion, steps
  if steps and _END not in tokenizer.decode(completion[steps[-1] :]):
    begin = steps[-2] + 1 if len(steps) > 1 else 0
    last = tokenizer.encode(tokenizer.decode(completion[begin:]) + _END)
    tokens = np.append(completion[:begin], last)
    marks = [*steps[:-1], len(tokens) - 1]
  tokens = np.append(prompt.tokens, tokens)
  mask = np.zeros(len(tokens), bool)
  mask[len(prompt.tokens) + np.array(marks, np.int64)] = True
  return worked_examples_lib.WorkedExample(tokens=tokens, loss_mask=mask), steps


def column(item: dict[str, Any], name: str, setting: str, what: str) -> Any:
  """Return what an item has in a column."""
  value = worked_solutions.value_of(item, name)
  sections.require(
    value is not None,
    setting,
    f"the data has no column {sections.shown(name)} of {what}"
    f"{worked_solutions.did_you_mean(item, name)}; name the columns of both in"
    " preference.steps and preference.labels",
  )
  return value


def steps_of(
  item: dict[str, Any], name: str, prompt_id: str, setting: str
) -> list[str]:
  """Return the steps of an item."""
  steps = column(item, name, setting, "steps")
  is_right = isinstance(steps, list) and all(
    isinstance(x, str) and x.strip() for x in steps
  )
  sections.require(
    is_right and bool(steps),
    setting,
    f"{prompt_id} has {sections.shown(steps)}, not a list of texts",
  )
  return steps


class Solutions(example_stream.ExampleStream[LabelledSteps]):
  """The labelled solutions of a split, one after the other."""

  what = "solutions"

  def __init__(
    self,
    source: prompts.PromptSource,
    section: sections.PreferenceSection,
    **options: Any,
  ):
    """Prepare the solutions."""
    super().__init__(source, **options)
    self._section = section

  def make(self, prompt: types.Prompt, place: int) -> LabelledSteps:
    """Return the solution of a prompt with its labels."""
    del place
    path, name = "preference.labels", self._section.labels
    steps = steps_of(
      prompt.item, self._section.steps, prompt.prompt_id, "preference.steps"
    )
    labels = column(prompt.item, name, path, "labels")
    sections.require(
      isinstance(labels, list)
      and all(isinstance(x, int | float) and 0 <= x <= 1 for x in labels),
      path,
      f"{prompt.prompt_id} has {sections.shown(labels)}, not a list of true and"
      " false or of numbers from 0 to 1",
    )
    sections.require(
      len(labels) == len(steps),
      path,
      f"{prompt.prompt_id} has {len(labels)} for {len(steps)} steps"
      f" (preference.steps)",
    )
    try:
      example = tokenized(prompt, steps, self.source.tokenizer)
    except ValueError as error:
      raise sections.ConfigError(
        f"preference.steps: {prompt.prompt_id} cannot be tokenized: {error}"
      ) from error
    of_tokens = np.zeros(len(example.tokens), np.float32)
    of_tokens[example.loss_mask] = labels
    return LabelledSteps(example=example, labels=of_tokens)
