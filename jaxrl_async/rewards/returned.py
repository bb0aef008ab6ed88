"""Validation of the values that scorers return."""

from collections.abc import Mapping
import math
import operator
from typing import Any

from jaxrl_async.types import Reward


class NoRewardError(ValueError):
  """A scorer returned something that is not a reward.

  The message is the reason of a `RewardFailure`.
  """


def as_reward(returned: Any, num_tokens: int) -> Reward:
  """Convert the value that a scorer returned to a `Reward` of plain numbers.

  Args:
    returned: the value; it may be anything.
    num_tokens: number of tokens of the completion. Positions of token scores
      must be below it.

  Raises:
    NoRewardError: the value is neither a finite number nor a `Reward` of finite
      numbers.
  """
  if not isinstance(returned, Reward):
    return Reward(score=_number(returned, ""))
  parts = {}
  for name, value in _entries(returned.parts, "parts").items():
    if not isinstance(name, str):
      raise NoRewardError(
        f"error: the scorer returned a part named {name!r:.80}, no string"
      )
    parts[name] = _number(value, f" as the part {name!r:.80}")
  token_scores = None
  if returned.token_scores is not None:
    token_scores = {}
    for position, value in _entries(
      returned.token_scores, "token_scores"
    ).items():
      at = _position(position, num_tokens)
      token_scores[at] = _number(value, f" as the score at token {at}")
  if not isinstance(returned.answer, str | None):
    raise NoRewardError(
      f"error: the scorer returned {returned.answer!r:.80} as the answer, no"
      " text"
    )
  return Reward(
    score=_number(returned.score, ""),
    parts=parts,
    token_scores=token_scores,
    answer=returned.answer,
  )


def _entries(value: Any, name: str) -> Mapping[Any, Any]:
  if not isinstance(value, Mapping):
    raise NoRewardError(
      f"error: the scorer returned {value!r:.80} as {name}, no mapping"
    )
  return value


def _position(position: Any, num_tokens: int) -> int:
  try:
    at = operator.index(position)
  except TypeError:
    at = -1
  if not 0 <= at < num_tokens:
    raise NoRewardError(
      f"error: the scorer returned a score at token {position!r:.80}, but the"
      f" completion has the tokens 0 to {num_tokens - 1}"
    )
  return at


def _number(value: Any, what: str) -> float:
  try:
    number = float(value)
  except (TypeError, ValueError, OverflowError):
    raise NoRewardError(
      f"error: the scorer returned {value!r:.80}{what}, no number"
    ) from None
  if not math.isfinite(number):
    raise NoRewardError(f"nan: the scorer returned {number}{what}")
  return number
