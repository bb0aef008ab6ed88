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
from jaxrl_async.data import columns as columns_lib
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
_ASKED = "qz"  # a text of no meaning, by which a template is asked

# A text, or the assistant's message in a chat.
Solution = str | dict[str, Any]
# A text that is shown after the prompt and not learned, and the text after it.
Continued = tuple[str, str]


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
  prompt: types.Prompt, text: str, source: prompts.PromptSource
) -> WorkedExample:
  """Return a prompt with a completion as a policy writes it, and its end.

  Raises:
    ValueError: the text cannot be tokenized.
  """
  tokenizer = source.tokenizer
  tokens = tokenizer.encode(text)
  if not np.isin(tokens[-1:], tokenizer.end_tokens).any():
    tokens = np.append(tokens, _end_of_turn(prompt, source))
  return joined([(prompt.tokens, False), (tokens, True)])


def completed(
  prompt: types.Prompt, solution: Solution, source: prompts.PromptSource
) -> WorkedExample:
  """Return a prompt with what is to be learned after it.

  Args:
    solution: a text, which is learned as it is, or the assistant's message,
      which is learned as the chat template writes it.

  Raises:
    ValueError: it cannot be tokenized, or is no answer to this prompt.
  """
  messages, template = source.chat(prompt.item), source.chat_template
  if messages is None or template is None:
    if not isinstance(solution, str):
      if solution.keys() - {"role", "content"}:
        raise ValueError("a message with calls or thoughts needs a chat")
      return answered(prompt, solution["content"], source)
    return answered(prompt, solution, source)
  if isinstance(solution, str):
    if token := source.tokenizer.special_token_in(solution):
      raise ValueError(f"the special token {token!r} is in its text")
    return answered(prompt, solution, source)
  return chat_example(
    [*messages, solution],
    template,
    source.tokenizer,
    prompt.prompt_id,
    tools=prompt.item.get(columns_lib.TOOLS),
    is_last_alone=True,
  )


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
    split: str = source_lib.Split.WARM_START,
    **options: Any,
  ):
    """Prepare the examples; the options are those of `ExampleStream`."""
    super().__init__(
      source, split=split, num_examples=warm_start.num_examples, **options
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
    source, item = self.source, prompt.item
    solver, turn = self._warm_start.solver, item.get(columns_lib.TURN)
    if solver == worked_solutions.MESSAGES:
      messages = source.chat(item)
      sections.require(
        bool(messages and turn) and source.chat_template is not None,
        "warm_start.solver",
        f"{prompt.prompt_id} is no chat that the assistant has answered; name"
        " the column of its messages in task.fields",
      )
      assert messages and turn and source.chat_template is not None
      return chat_example(
        [*messages, turn],
        source.chat_template,
        source.tokenizer,
        prompt.prompt_id,
        tools=item.get(columns_lib.TOOLS),
      )
    if (
      turn is not None
      and solver == f"{worked_solutions.FIELD}:{columns_lib.REPLY}"
    ):
      return completed(prompt, turn, source)
    rng = np.random.default_rng((source.seed, place))
    text = _solution(self._solve, prompt, rng, self._warm_start)
    if isinstance(text, str):
      return completed(prompt, text, source)
    shown, rest = text
    before = np.append(prompt.tokens, source.tokenizer.encode(shown))
    return answered(dataclasses.replace(prompt, tokens=before), rest, source)


def chat_example(
  messages: Sequence[dict[str, Any]],
  template: chat_template_lib.ChatTemplate,
  tokenizer: tokenizer_lib.Tokenizer,
  name: str,
  *,
  tools: Sequence[Any] | None = None,
  is_last_alone: bool = False,
) -> WorkedExample:
  """Return a chat as tokens, of which the assistant's turns are learned.

  A turn is what the template writes after the prompt for it, up to the token
  that ends it. The prompt and the turn are encoded separately, as they are when
  the policy generates. What the template writes after that token, often a line
  break, belongs to the next prompt. Some templates end a turn with the token
  that begins the next one, which is then learned.

  Raises:
    sections.ConfigError: the template refuses the chat or does not write all of
      it, or changes earlier messages when later ones follow.
    ValueError: the text cannot be tokenized.
  """
  ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
  parts: list[tuple[np.ndarray, bool]] = []
  written, is_open = "", False
  try:
    for i in ends[-1:] if is_last_alone else ends:
      prompt = template.render(messages[:i], tools)
      whole = template.render(messages[: i + 1], tools, is_prompt=False)
      sections.require(
        prompt.startswith(written),
        "warm_start.solver",
        f"the chat template changes earlier messages of {name} when later ones"
        " follow; use field:reply, which learns the last one alone",
      )
      sections.require(
        whole.startswith(prompt),
        "task.chat",
        f"the chat template writes an answer of {name} otherwise than after the"
        " prompt for it, so that it cannot be learned; change its"
        " add_generation_prompt",
      )
      tokens = tokenizer.encode(prompt[len(written) :])
      length = _length_to_end(tokens, tokenizer) if is_open else 0
      parts += [(tokens[:length], True), (tokens[length:], False)]
      turn = tokenizer.encode(whole[len(prompt) :])
      at_end = np.flatnonzero(np.isin(turn, tokenizer.end_tokens))
      is_open = not len(at_end)
      length = len(turn) if is_open else int(at_end[0]) + 1
      parts += [(turn[:length], True), (turn[length:], False)]
      written = whole
    template.check(messages, tools, tokenizer=tokenizer)
    parts.pop()  # nothing follows the last turn
    if is_open:
      end = _end_where_next_begins(
        messages, tools, written, template, tokenizer
      )
      parts.append((end, True))
  except chat_template_lib.ChatTemplateError as error:
    raise sections.ConfigError(f"task.chat: {name}: {error}") from error
  return joined(parts)


def _end_of_turn(
  prompt: types.Prompt, source: prompts.PromptSource
) -> Int32[np.ndarray, "_"]:
  """Return the token that ends a completion of a prompt.

  In a chat it is the one that ends a turn of the template.
  """
  tokenizer, template = source.tokenizer, source.chat_template
  messages = source.chat(prompt.item)
  if messages is not None and template is not None:
    tools = prompt.item.get(columns_lib.TOOLS)
    chat = [*messages, {"role": "assistant", "content": _ASKED}]
    with contextlib.suppress(chat_template_lib.ChatTemplateError):
      written = template.render(chat, tools, is_prompt=False)
      end = tokenizer.encode(written.rpartition(_ASKED)[2])
      length = _length_to_end(end, tokenizer)
      if not length:
        end = _end_where_next_begins(chat, tools, written, template, tokenizer)
        length = len(end)
      return end[length - 1 : length]
  return np.array([tokenizer.eos_id], np.int32)


def _end_where_next_begins(
  messages: Sequence[dict[str, Any]],
  tools: Sequence[Any] | None,
  written: str,
  template: chat_template_lib.ChatTemplate,
  tokenizer: tokenizer_lib.Tokenizer,
) -> Int32[np.ndarray, "_"]:
  """Return what ends a turn in which the template writes no end.

  It is the end of sequence, or the token with which the next turn begins: that
  of a tool that was called, else the user's.
  """
  roles = ("tool", "user") if messages[-1].get("tool_calls") else ("user",)
  for role in roles:
    more = [*messages, {"role": role, "content": _ASKED}]
    with contextlib.suppress(chat_template_lib.ChatTemplateError):
      text = template.render(more, tools, is_prompt=False)
      if text.startswith(written):
        tokens = tokenizer.encode(text[len(written) :])
        if length := _length_to_end(tokens, tokenizer):
          return tokens[:length]
  return np.array([tokenizer.eos_id], np.int32)


def _length_to_end(
  tokens: Int32[np.ndarray, "_"], tokenizer: tokenizer_lib.Tokenizer
) -> int:
  """Return the length of a beginning that is an end token after spaces."""
  at_end = np.flatnonzero(np.isin(tokens, tokenizer.end_tokens))
  if not len(at_end) or tokenizer.decode(tokens[: at_end[0]]).strip():
    return 0
  return int(at_end[0]) + 1


def _solution(
  solve: worked_solutions.Solver,
  prompt: types.Prompt,
  rng: np.random.Generator,
  warm_start: sections.WarmStartSection,
) -> str | Continued:
  """Return the text of a solution, perhaps with a part that is only shown."""
  try:
    with user_code.told():
      solution = solve(prompt.item, rng)
  except user_code.UserCodeError as error:
    raise sections.ConfigError(
      f"warm_start.solver: {warm_start.solver!r} cannot solve"
      f" {prompt.prompt_id}: {error}"
    ) from error
  sections.require(
    isinstance(solution, str)
    or isinstance(solution, tuple)
    and [type(text) for text in solution] == [str, str],
    "warm_start.solver",
    f"{warm_start.solver!r} returned {sections.shown(solution)} for"
    f" {prompt.prompt_id}, neither a text nor two texts, of which the first is"
    " only shown",
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
    scorer: the reward of the run; None accepts extracted answers alone.
    is_scored: whether solutions have to be right.
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
      solution = "".join(_solution(solve, prompt, rng, warm_start))
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
