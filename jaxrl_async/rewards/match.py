"""Scores of an extracted answer, and of a completion's form and length."""

from collections.abc import Mapping
import math
import re
from typing import Any

from jaxrl_async.types import Completion, FinishReason

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?")
_TOLERANCE = 1e-6  # relative


def exact(item: Mapping[str, Any], completion: Completion) -> float:
  """Score 1 if the extracted answer is the item's, apart from outer spaces."""
  answer = completion.answer
  expected = str(item["answer"]).strip()
  return float(answer is not None and answer.strip() == expected)


def numeric(item: Mapping[str, Any], completion: Completion) -> float:
  """Score 1 if the last number of the answer equals that of the item's answer.

  Commas between digits are dropped. Numbers are equal within 1e-6 of their
  size.
  """
  expected = last_number(str(item["answer"]))
  answer = last_number(completion.answer or "")
  if expected is None or answer is None:
    return 0.0
  return float(math.isclose(answer, expected, rel_tol=_TOLERANCE))


def last_number(text: str) -> float | None:
  """Return the last number in a text, or None if there is none."""
  found = _NUMBER.findall(text)
  return float(found[-1].replace(",", "")) if found else None


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
