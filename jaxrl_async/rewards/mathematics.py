r"""Whether two mathematical answers are equal, through math-verify.

An answer is looked for where texts of this kind put it: in the last `\boxed{}`,
after the last `####` (GSM8K), or, if the caller accepts it, in the whole text.
It is compared as mathematics: 0.5 equals \frac{1}{2}, intervals and sets are
compared as such, units and dollar signs are dropped.
"""

from collections.abc import Mapping
import functools
import logging
import re
from typing import Any

from jaxrl_async.types import Completion, Reward

# A box, or a brace that is not escaped, as those of sets are.
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|(?<!\\)[{}]")
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
# What a longer answer could cost: math-verify's grammar backtracks.
_MAX_CHARACTERS = 1_000


def boxed(text: str) -> str | None:
  r"""Return what the last complete `\boxed{}` or `\fbox{}` holds.

  It takes time in proportion to the text, however many boxes never end.
  """
  start, end, opened = -1, -1, []
  for match in _BRACE.finditer(text):
    if match[0] == "}":
      box = opened.pop() if opened else None
      if box is not None and box > start:
        start, end = box, match.start()
    else:
      opened.append(None if match[0] == "{" else match.end())
  return text[start:end].strip() if start >= 0 else None


def answer_of(text: str) -> str | None:
  r"""Return the answer in a text: its last box, else what follows `####`.

  None if it has neither, or nothing in it.
  """
  answer = boxed(text)
  if answer is None:
    hashes = _HASHES.findall(text)
    answer = hashes[-1].strip() if hashes else None
  return answer or None


@functools.cache
def _library() -> Any:
  # Imports sympy and a parser: half a second.
  import math_verify

  # It warns that its own timeouts are off; the reward service has others.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  return math_verify


def _readings(answer: str) -> list[Any]:
  """Return an answer as mathematics, in each way that it can be read."""
  library = _library()
  answer = answer.strip()
  # No timeouts of its own: they would take the reward process's alarm away.
  inline = re.sub(r"^\$+|\$+$|^\\\[|\\\]$|^\\\(|\\\)$", "", answer).strip()
  return library.parse(f"\\boxed{{{inline}}}", parsing_timeout=None)


def are_equal(expected: str, answer: str | None) -> bool:
  """Return whether an answer is the expected one, as mathematics or verbatim.

  Args:
    expected: LaTeX or plain.
    answer: the same; None is never right.
  """
  if answer is None or len(answer) > _MAX_CHARACTERS:
    return False
  if answer.strip() == expected.strip():
    return bool(answer.strip())
  gold, read = _readings(expected), _readings(answer)
  if not gold or not read:
    return False
  return bool(_library().verify(gold, read, timeout_seconds=None))


def score(item: Mapping[str, Any], completion: Completion) -> Reward:
  r"""Score 1 if the completion's answer equals the item's as mathematics.

  The item's answer may be a whole solution that ends with `#### answer` or has
  a `\boxed{}`. Part "answered" tells whether the completion has an answer.

  Args:
    item: with the right answer as `answer`.
    completion: whose last box or `####` is its answer. Without either it is
      the extracted one (`task.answer_prefix`).
  """
  expected = str(item["answer"])
  expected = answer_of(expected) or expected
  answer = answer_of(completion.text)
  if answer is None:
    answer = completion.answer
  is_right = are_equal(expected, answer)
  return Reward(
    score=float(is_right),
    parts={"answered": float(bool(answer))},
    answer=answer,
  )
