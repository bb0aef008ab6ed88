"""Prompts with their worked solutions, as tokens, for the warm start."""

from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
import itertools
from typing import Any

from jaxtyping import Bool, Int32
import numpy as np

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.data import example_stream
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.data import worked_solutions
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

# Items whose solutions are scored, and examples that are made, in a check.
_NUM_SCORED = 4
_NUM_CHECKED = 100


@dataclasses.dataclass(kw_only=True, slots=True)
class WorkedExample:
  """A prompt and its worked solution, or a whole chat.

  Attributes:
    tokens: token ids of all of it.
    loss_mask: True for the tokens to be learned: those of the solution and the
      end of sequence, or of each turn of the assistant.
  """

  tokens: Int32[np.ndarray, "T"]
  loss_mask: Bool[np.ndarray, "T"]

  def __len__(self) -> int:
    """Return the number of tokens."""
    return len(self.tokens)


def joined(
  parts: Iterable[tuple[Int32[np.ndarray, "_"], bool]],
) -> WorkedExample:
  """Return the example of parts, each of which is to be learned or not."""
  parts = list(parts)
  return WorkedExample(
    tokens=np.concatenate([tokens for tokens, _ in parts]),
    loss_mask=np.concatenate(
      [np.full(len(tokens), is_learned) for tokens, is_learned in parts]
    ),
  )


def answered(
  prompt: types.Prompt, text: str, tokenizer: tokenizer_lib.Tokenizer
) -> WorkedExample:
  """Return a prompt with a completion, which ends as a policy ends one.

  Raises:
    ValueError: the text cannot be tokenized.
  """
  tokens = tokenizer.encode(text)
  completion = np.append(tokens, np.int32(tokenizer.eos_id))
  return joined([(prompt.tokens, False), (completion, True)])


class WorkedExamples(example_stream.ExampleStream[WorkedExample]):
  """The worked solutions of a split, one after the other.

  A question may occur several times, with the same or with other mistakes in
  its solution. Repetitions are not removed, because that would remove mostly
  right solutions, which are all equal for a question. Example n depends only on
  the seed and n.
  """

  what = "worked solutions"

  def __init__(
    self,
    source: prompts.PromptSource,
    warm_start: sections.WarmStartSection,
    *,
    max_tokens: int,
    max_unusable: int = example_stream.MAX_UNUSABLE,
    split: str = source_lib.Split.WARM_START,
  ):
    """Prepare the examples.

    Args:
      source: of the prompts.
      warm_start: the solver, and how many examples there are.
      max_tokens: longest prompt and solution together.
      max_unusable: see `ExampleStream`.
      split: of the source.

    Raises:
      sections.ConfigError: there is no such solver.
    """
    super().__init__(
      source,
      split=split,
      num_examples=warm_start.num_examples,
      max_tokens=max_tokens,
      max_unusable=max_unusable,
    )
    self._warm_start = warm_start
    self._solve = worked_solutions.find(
      warm_start.solver, warm_start.corrupted_frac
    )

  def make(self, prompt: types.Prompt, place: int) -> WorkedExample:
    """Return the example of a prompt."""
    try:
      return self._example(prompt, place)
    except sections.ConfigError:
      raise
    except ValueError as error:
      raise sections.ConfigError(
        f"warm_start.solver: the solution of {prompt.prompt_id} cannot be"
        f" tokenized: {error}"
      ) from error

  def _example(self, prompt: types.Prompt, place: int) -> WorkedExample:
    source = self.source
    if self._warm_start.solver == worked_solutions.MESSAGES:
      messages = source.answered_chat(prompt.item)
      sections.require(
        messages is not None and source.chat_template is not None,
        "warm_start.solver",
        f"{prompt.prompt_id} is no chat that the assistant has answered; name"
        " the column of its messages in task.fields",
      )
      assert messages is not None and source.chat_template is not None
      return chat_example(
        messages, source.chat_template, source.tokenizer, prompt.prompt_id
      )
    rng = np.random.default_rng((source.seed, place))
    text = _solution(self._solve, prompt, rng, self._warm_start)
    return answered(prompt, text, source.tokenizer)


def chat_example(
  messages: Sequence[dict[str, Any]],
  template: chat_template_lib.ChatTemplate,
  tokenizer: tokenizer_lib.Tokenizer,
  name: str,
) -> WorkedExample:
  """Return a chat as tokens, of which the assistant's turns are learned.

  A turn is what the template writes after the prompt for it, up to the token
  that ends it. The prompt and the turn are encoded separately, as they are when
  the policy generates. What the template writes after that token, often a line
  break, belongs to the next prompt.

  Args:
    messages: of the chat; the last one is the assistant's.
    template: of the tokenizer.
    tokenizer: of the policy.
    name: of the prompt, for messages.

  Raises:
    sections.ConfigError: the template refuses the chat, or changes earlier
      messages when later ones follow.
    ValueError: the text cannot be tokenized.
  """
  ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
  parts: list[tuple[np.ndarray, bool]] = []
  written = ""
  try:
    for i in ends:
      prompt = template.render(messages[:i])
      whole = template.render(messages[: i + 1], is_prompt=False)
      if not (prompt.startswith(written) and whole.startswith(prompt)):
        raise sections.ConfigError(
          f"warm_start.solver: the chat template changes earlier messages of"
          f" {name} when later ones follow; use field:reply, which learns the"
          " last one alone"
        )
      parts.append((tokenizer.encode(prompt[len(written) :]), False))
      turn = tokenizer.encode(whole[len(prompt) :])
      at_end = np.flatnonzero(np.isin(turn, tokenizer.end_tokens))
      length = int(at_end[0]) + 1 if len(at_end) else len(turn)
      parts += [(turn[:length], True), (turn[length:], False)]
      written = whole
  except chat_template_lib.ChatTemplateError as error:
    raise sections.ConfigError(f"task.chat: {name}: {error}") from error
  last = parts.pop()[0]  # nothing follows the last turn
  if not np.isin(parts[-1][0][-1:], tokenizer.end_tokens).any():
    end = np.array([tokenizer.eos_id], np.int32)
    parts += [(last, True), (end, True)]
  return joined(parts)


def _solution(
  solve: worked_solutions.Solver,
  prompt: types.Prompt,
  rng: np.random.Generator,
  warm_start: sections.WarmStartSection,
) -> str:
  """Return the text of a solution.

  Raises:
    sections.ConfigError: the solver fails for this item, or returns no text.
  """
  try:
    with user_code.told():
      solution = solve(prompt.item, rng)
  except user_code.UserCodeError as error:
    raise sections.ConfigError(
      f"warm_start.solver: {warm_start.solver!r} cannot solve"
      f" {prompt.prompt_id}: {error}"
    ) from error
  sections.require(
    isinstance(solution, str),
    "warm_start.solver",
    f"{warm_start.solver!r} returned {sections.shown(solution)} for"
    f" {prompt.prompt_id}, not a text",
  )
  return solution


def validate(
  source: prompts.PromptSource,
  warm_start: sections.WarmStartSection,
  *,
  max_tokens: int,
  scorer: service_lib.Scorer | None = None,
  is_scored: bool = True,
) -> None:
  """Check that the solver solves this task, in a form that can be scored.

  A solution is right if the extracted answer is the item's, or if the run's
  reward scores it above 0. At least one of the first few has to be. The first
  100 examples are made, and the others when the warm start needs them.

  Args:
    source: of the prompts.
    warm_start: the solver.
    max_tokens: longest prompt and solution together.
    scorer: the reward of the run; None accepts extracted answers alone.
    is_scored: whether solutions have to be right.

  Raises:
    sections.ConfigError: a check failed. The message says what to change.
  """
  if is_scored:
    _validate_scores(source, warm_start, scorer)
  examples = WorkedExamples(
    source,
    warm_start,
    max_tokens=max_tokens,
    max_unusable=prompts.MAX_BARREN_CHECKED,
  )
  for _ in itertools.islice(examples, _NUM_CHECKED):
    pass


def _validate_scores(
  source: prompts.PromptSource,
  warm_start: sections.WarmStartSection,
  scorer: service_lib.Scorer | None,
) -> None:
  """Check that one of the first solutions is right; see `validate`."""
  solve = worked_solutions.find(warm_start.solver, 0.0)
  stream = prompts.PromptStream(
    source,
    source_lib.Split.WARM_START,
    max_barren=prompts.MAX_BARREN_CHECKED,
  )
  rng = np.random.default_rng(source.seed)
  with contextlib.closing(stream):
    for number in range(_NUM_SCORED):
      prompt = stream.next()
      solution = _solution(solve, prompt, rng, warm_start)
      answer = extraction.extract_answer(solution, source.task.answer_prefix)
      if answer is not None and answer == prompt.item.get("answer"):
        break
      if scorer and _score(scorer, prompt, solution, answer) > 0:
        break
      if not number:
        first = solution, answer
    else:
      raise sections.ConfigError(
        f"task.answer_prefix: {source.task.answer_prefix!r} finds"
        f" {sections.shown(first[1])} in a right solution of the solver"
        f" {warm_start.solver!r}, {sections.shown(first[0])}, and the reward"
        " of the run is 0"
      )


def _score(
  scorer: service_lib.Scorer,
  prompt: types.Prompt,
  solution: str,
  answer: str | None,
) -> float:
  """Return the reward of a solution as a policy's completion."""
  tokens = np.zeros((0,), np.int32)  # rewards of texts do not look at them
  turn = types.Turn(prompt="", completion=solution, num_tokens=0)
  completion = types.Completion(
    text=solution,
    answer=answer,
    turns=(turn,),
    tokens=tokens,
    finish_reason=types.FinishReason.EOS,
  )
  try:
    with user_code.told():
      reward = scorer(prompt.item, completion)
  except user_code.UserCodeError as error:
    raise sections.ConfigError(
      f"warm_start.solver: the reward of the run fails for the solution of"
      f" {prompt.prompt_id}: {error}"
    ) from error
  return reward.score if isinstance(reward, types.Reward) else float(reward)
