"""Scores of a completion's form: whether it answers, and how long it is."""

from collections.abc import Mapping
import re
from typing import Any

from jaxrl_async.types import Completion, FinishReason


def answered(item: Mapping[str, Any], completion: Completion) -> float:
  """Score 1 if an answer could be extracted from the completion."""
  del item
  return float(bool(completion.answer))


def ended(item: Mapping[str, Any], completion: Completion) -> float:
  """Score 1 if the policy ended by itself, and was not cut off."""
  del item
  return float(completion.finish_reason is not FinishReason.LENGTH)


def matches(
  item: Mapping[str, Any], completion: Completion, *, pattern: str
) -> float:
  """Score 1 if the whole completion matches a regular expression.

  Args:
    item: not used.
    completion: what the policy wrote.
    pattern: of Python's `re`. A dot matches line breaks too.
  """
  del item
  return float(re.fullmatch(pattern, completion.text, re.DOTALL) is not None)


def overlong(
  item: Mapping[str, Any],
  completion: Completion,
  *,
  max_tokens: int,
  buffer_tokens: int,
) -> float:
  r"""Score the length of a completion: 0, and down to -1 where it is too long.

  With L tokens, a maximum M and a buffer B, DAPO (arXiv:2503.14476, eq. 13)
  takes

  0                  for L <= M - B
  ((M - B) - L) / B  for M - B < L <= M
  -1                 for L > M

  Args:
    item: not used.
    completion: what the policy wrote.
    max_tokens: M, after which the score is -1.
    buffer_tokens: B, over which the score falls.
  """
  del item
  start = max_tokens - buffer_tokens
  excess = len(completion.tokens) - start
  return -min(max(excess / buffer_tokens, 0.0), 1.0)
