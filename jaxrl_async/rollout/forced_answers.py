"""The episode `budgets`: answers that are forced after parts of a thought.

The policy writes a completion. Its thought is then cut after as many tokens as
each budget says that is shorter than the thought, a suffix is shown, and the
policy writes an answer. Each such answer is a branch of the member. A budget
that the thought does not reach needs no branch: its answer is the completion's
own. All answers are about the same thought, which nothing writes twice.

`rewards.cut_scores` scores the answers, and `assembly.algorithm` learns from
them. What an engine keeps (`rollout.kept_tokens`) holds the thought already, so
that a branch only has its suffix prefilled.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from jaxrl_async import types
from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import sections
from jaxrl_async.rewards import cut_scores
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


def answer_after_cuts(
  prompt: types.Prompt,
  context: episode_lib.Context,
  *,
  budgets: Sequence[int],
  end: str,
  suffix: str = "",
  max_tokens: int = budgets_lib.MAX_TOKENS,
) -> episode_lib.Turns:
  """Yield the prompt, and what is left of the thought after each cut.

  The arguments are those of `config.budgets.Budgets`. How long the thought is
  becomes a part of the reward, `types.THOUGHT_TOKENS`.
  """
  asked = budgets_lib.of(list(budgets), end, suffix, max_tokens)
  written = yield prompt.tokens
  assert context.written is not None
  length, is_cut_off = thought(written, asked.end, context.tokenizer)
  is_full = context.written.finish_reason is types.FinishReason.LENGTH
  parts = {
    types.THOUGHT_TOKENS: float(length),
    cut_scores.THOUGHT_TRUNCATED: float(is_cut_off),
    cut_scores.COMPLETION_TRUNCATED: float(is_full),
  }
  context.cut(parts)
  forced = context.tokenizer.encode(asked.suffix)
  for budget in asked.budgets:
    if budget < length:
      shown = np.concatenate([prompt.tokens, written[:budget], forced])
      yield episode_lib.Until(
        episode_lib.Anew(shown), max_tokens=asked.max_tokens
      )


def thought(
  tokens: np.ndarray, end: str, tokenizer: tokenizer_lib.Tokenizer
) -> tuple[int, bool]:
  """Return how many tokens of a completion are its thought.

  Those are the ones before the first that has a part of the text `end` in it;
  tokens that end a sequence do not count. Special tokens have their names.

  Returns:
    The number, and whether the text is missing, so that all is thought.
  """
  ids = tokens.tolist()
  while ids and ids[-1] in tokenizer.end_tokens:
    ids.pop()
  at = tokenizer.decode_all(ids).find(end)
  if at < 0:
    return len(ids), True
  low, high = 0, len(ids)  # the most tokens whose text ends at the place
  while low < high:
    middle = (low + high + 1) // 2
    if len(tokenizer.decode_all(ids[:middle])) <= at:
      low = middle
    else:
      high = middle - 1
  return low, False


def check(config: sections.Config, tokenizer: tokenizer_lib.Tokenizer) -> None:
  """Check that a tokenizer writes the texts of budgets, and that they fit.

  Raises:
    ConfigError: it does not, or they do not.
  """
  budgets = budgets_lib.of_task(config.task)
  if budgets is None:
    return
  path, numbers = budgets_lib.PATH, {}
  for name in ("end", "suffix"):
    text = dataclasses.asdict(budgets)[name]
    try:
      ids = tokenizer.encode(text)
    except ValueError as error:
      raise sections.ConfigError(f"{path}.{name}: {error}") from error
    sections.require(
      tokenizer.decode_all(ids.tolist()).strip() == text.strip()
      and not np.isin(ids, tokenizer.end_tokens).any(),
      f"{path}.{name}",
      f"{sections.shown(text)} is not what the tokenizer writes for it, or ends"
      " a sequence; use another text",
    )
    numbers[name] = len(ids)
  last, most = budgets.budgets[-1], config.rollout.max_completion_tokens
  needed = last + numbers["suffix"] + budgets.max_tokens
  sections.require(
    needed <= most,
    f"{path}.suffix",
    f"{numbers['suffix']} tokens after a cut at {last} and an answer of"
    f" {budgets.max_tokens} ({path}.max_tokens) are more than"
    f" rollout.max_completion_tokens {most}; use {needed} or more there",
  )
