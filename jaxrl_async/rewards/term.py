"""The terms of a reward: functions and servers, and their weighted sum."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

from jaxrl_async.rewards import server as server_lib
from jaxrl_async.types import Completion, Reward

# (types.Prompt.item, completion) -> score or `Reward`. It must be a function of
# a module that imports neither jax nor the launch file, or functools.partial of
# such a function.
Scorer = Callable[[dict[str, Any], Completion], float | Reward]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
  """One term of a reward, with limits of its own.

  Attributes:
    scorer: a function that scores a completion, or a server that scores groups.
    name: of its part in the rewards and of its metrics. "" is the only term of
      its reward, which then is the scorer's own.
    weight: factor of its score, and of its token scores, in the sum.
    timeout_s: time limit of one score, or of one request to a server.
    num_retries: number of further attempts at a completion, or at a request,
      before it fails.
    fails_as_zero: whether a completion that cannot be scored gets 0, and is
      not left out of its group.
    sources: the items whose `source` is one of these are scored by it; () are
      all items.
  """

  scorer: Scorer | server_lib.RewardServer
  name: str = ""
  weight: float = 1.0
  timeout_s: float
  num_retries: int
  fails_as_zero: bool = False
  sources: tuple[str, ...] = ()

  def scores(self, item: dict[str, Any]) -> bool:
    """Return whether completions of this item are scored by it.

    Raises:
      KeyError: the term is for certain sources, and the item has none.
    """
    return not self.sources or item["source"] in self.sources


def combined(
  terms: Sequence[Term], rewards: Sequence[Sequence[Reward]]
) -> list[Reward]:
  """Return the weighted sum of the terms' rewards, for each completion.

  The score of each term, without its weight, becomes a part under the term's
  name. The parts that a term reports itself get its name and a slash before
  theirs. The answer is that of the first term which has read one.

  Args:
    terms: at least one.
    rewards: of each term, one for each completion.
  """
  if len(terms) == 1 and not terms[0].name:
    return list(rewards[0])
  return [_sum(terms, of_one) for of_one in zip(*rewards, strict=True)]


def _sum(terms: Sequence[Term], rewards: Sequence[Reward]) -> Reward:
  score, answer = 0.0, None
  parts: dict[str, float] = {}
  token_scores: dict[int, float] | None = None
  for term, reward in zip(terms, rewards, strict=True):
    score += term.weight * reward.score
    parts[term.name] = reward.score
    parts |= {f"{term.name}/{name}": x for name, x in reward.parts.items()}
    if reward.token_scores is not None:
      token_scores = token_scores or {}
      for at, value in reward.token_scores.items():
        token_scores[at] = token_scores.get(at, 0.0) + term.weight * value
    if answer is None:
      answer = reward.answer
  return Reward(
    score=score, parts=parts, token_scores=token_scores, answer=answer
  )
