"""Scores of an extracted answer, and of a completion's form and length."""

from collections.abc import Mapping
import math
import numbers
import re
from typing import Any

from jaxrl_async.types import Completion, FinishReason

# Numbers with slashes between them, and perhaps a whole number before.
_DIGITS = re.compile(
  r"(?:\d{1,9}[ \t]+(?=\d{1,9}[ \t]*/))?"
  r"(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d+)?(?:[ \t]*/[ \t]*\d+)*"
)
_FRACTION = re.compile(r"(?:(\d+)[ \t]+)?(\d{1,300})[ \t]*/[ \t]*(\d{1,300})")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{2,3})*,\d{3}(?![\d,])")
# Hyphens, the minus sign and the en dash. An em dash parts sentences.
DASHES = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_TO_HYPHEN = dict.fromkeys(map(ord, DASHES), "-")
_MONEY = r"(?:\\?[$€£¥])?"
# A sign stands before its number, not between two. With a space after it, it
# begins the text or follows a sign of its own.
_MINUS = re.compile(
  rf"(?:(?:^|[^\w)\]}}%.-])-{_MONEY}|(?:^|[=:(\[{{,;<>≈*\n])\s*-\s*{_MONEY}\s*)$"
)
# The only number of a text. Among others, a space parts numbers.
_SPACED = re.compile(r"\D*\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?:\.\d+)?\D*")
_UNDERSCORES = re.compile(r"(?<=\d)_(?=\d{3}(?!\d))")
# Before digits with a letter behind them: x5y is a name.
_NAME = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]+$")
_LETTER = re.compile("[a-zA-Z]")
_MOST_DIGITS = 300  # of an integer; more are infinite for a float
_MOST_BEFORE = 20  # characters that are looked at for a sign
_TOLERANCE = 1e-6  # relative


def exact(item: Mapping[str, Any], completion: Completion) -> float:
  """Score 1 if the extracted answer is the item's, apart from outer spaces."""
  answer = completion.answer
  expected = str(item["answer"]).strip()
  return float(answer is not None and answer.strip() == expected)


def numeric(item: Mapping[str, Any], completion: Completion) -> float:
  """Score 1 if the last number of the answer equals that of the item's answer.

  Commas, underscores and spaces that part thousands are dropped, and 1/2 is a
  number. Integers are compared exactly, and other numbers within 1e-6 of their
  size.

  Raises:
    ValueError: the item's answer is not one number.
  """
  expected = gold_number(item["answer"])
  answer = last_number(completion.answer or "")
  if answer is None:
    return 0.0
  if isinstance(answer, int) and isinstance(expected, int):
    return float(answer == expected)
  return float(math.isclose(answer, expected, rel_tol=_TOLERANCE))


def gold_number(answer: Any) -> int | float:
  """Return the only number of an item's answer.

  Raises:
    ValueError: there is none, or more than one.
  """
  text = str(answer)
  is_plain = isinstance(answer, (str, numbers.Number))
  number = last_number(text) if is_plain else None
  if number is None or math.isinf(number) or len(_numbers(text)) > 1:
    raise ValueError(
      f"its answer {text!r:.80} is not one number; use another reward, such as"
      " mathematics or exact"
    )
  return number


def last_number(text: str) -> int | float | None:
  """Return the last number in a text, or None if there is none."""
  text = text.translate(_TO_HYPHEN)
  if _SPACED.fullmatch(text):
    text = re.sub(r"(?<=\d)\s(?=\d)", "", text)
  found = _numbers(text)
  if not found:
    return None
  start, size = found[-1]
  before = text[max(start - _MOST_BEFORE, 0) : start]
  return -size if _MINUS.search(before) else size


def _numbers(text: str) -> list[tuple[int, int | float]]:
  """Return where the numbers of a text begin, and their sizes without sign."""
  found: list[tuple[int, int | float]] = []
  text = _UNDERSCORES.sub(",", text)
  for match in _DIGITS.finditer(text):
    before = text[max(match.start() - _MOST_BEFORE, 0) : match.start()]
    if _NAME.search(before) and _LETTER.match(text, match.end()):
      continue
    if fraction := _FRACTION.fullmatch(match[0]):
      whole, over, under = map(int, fraction.groups("0"))
      size = whole + over / under if under else math.inf
      found.append((match.start(), size))
      continue
    # Commas part thousands, or numbers.
    digits = r"[^/ \t]+" if _THOUSANDS.match(match[0]) else r"[^/, \t]+"
    for part in re.finditer(digits, match[0]):
      number = part[0].replace(",", "")
      is_integer = number.isdigit() and len(number) < _MOST_DIGITS
      found.append(
        (match.start() + part.start(), (int if is_integer else float)(number))
      )
  return found


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
