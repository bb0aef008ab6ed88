"""Scores of answers that are right if they are the same text or number."""

from collections.abc import Mapping
import math
import re
from typing import Any

from jaxrl_async.types import Completion

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
