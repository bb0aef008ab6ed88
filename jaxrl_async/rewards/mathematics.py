r"""Whether two mathematical answers are equal, through math-verify.

An answer is looked for where texts of this kind put it: in the last `\boxed{}`,
after the last `####` (GSM8K), or, if the caller accepts it, in the whole text.
It is compared as mathematics: 0.5 equals \frac{1}{2}, intervals and sets are
compared as such, units and dollar signs are dropped. An answer of letters only
is compared as text.
"""

from collections.abc import Mapping
import dataclasses
import functools
import logging
import re
from typing import Any

from jaxrl_async.rewards import answer_size
from jaxrl_async.rewards import spelling
from jaxrl_async.types import Completion, Reward

_BOX = r"\\(?:boxed|fbox)"
# A box, a backslash or brace that is escaped, or a brace that is not.
_BRACE = re.compile(rf"{_BOX}\s*\{{|\\(?!{_BOX})[\\{{}}]|[{{}}]")
# What TeX boxes without braces is one token. People mean the word.
_BARE_BOX = re.compile(rf"{_BOX}(?![a-zA-Z])[ \t]*([^\s${{}}]+)")
# Between boxes that are one answer: $x=\boxed{3}$ or $x=\boxed{5}$.
_BETWEEN_BOXES = re.compile(
  r"(?:\s|\\[()\[\],;: ]|\$|~)*(?:[,;]|\\text\{\s*(?:and|or)\s*\}|and\b|or\b)"
  r"(?:\s|\\[()\[\],;: ]|\$|~|and\b|or\b|\\text\{\s*(?:and|or)\s*\})*"
  r"(?:[a-zA-Z](?:_\{?\w\}?)?\s*=\s*)?\s*"
)
_MOST_BETWEEN = 60  # characters
_HASHES = re.compile(
  r"####+[ \t]*(?:(?:\*\*)?(?:the )?(?:final )?answer\b(?: is)?[ \t]*:?"
  r"(?:\*\*)?[ \t]*:?\s*)?([^\n]*)",
  re.IGNORECASE,
)
# A line that is a heading, not an answer: it has words.
_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
# What a longer answer could cost: math-verify's grammar backtracks.
_MAX_CHARACTERS = 1_000
# Relative, of numbers that the library calls equal, and of those it does not.
_TOLERANCE, _EXACT = 1e-4, 1e-12


def boxed(text: str) -> str | None:
  r"""Return what the last complete `\boxed{}` or `\fbox{}` holds.

  Boxes that only a comma, "and" or "or" parts are one answer, a set. Without a
  complete box it is the word after the last `\boxed`. It takes time in
  proportion to the text, however many boxes never end.
  """
  boxes: list[tuple[int, int, int]] = []  # outer start, start and end
  opened: list[tuple[int, int] | None] = []
  for match in _BRACE.finditer(text):
    if match[0] == "{":
      opened.append(None)
    elif match[0] == "}":
      box = opened.pop() if opened else None
      if box is not None:
        boxes.append((*box, match.start()))
    elif match[0].endswith("{") and not match[0] == "\\{":
      opened.append((match.start(), match.end()))
  if not boxes:
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None
  # In the order of their beginnings the last one is no part of another.
  boxes.sort()
  found = [boxes.pop()]
  while boxes:
    outer, _, _ = found[-1]
    _, _, end = boxes[-1]
    between = text[end + 1 : outer]
    if len(between) > _MOST_BETWEEN or not _BETWEEN_BOXES.fullmatch(between):
      break
    found.append(boxes.pop())
  answers = [text[start:end].strip() for _, start, end in reversed(found)]
  return ", ".join(dict.fromkeys(answers))


def answer_of(text: str) -> str | None:
  r"""Return the answer in a text: its last box, else what follows `####`.

  Headings of Markdown begin so too. The last line is taken that has no words,
  and the last of all if each has some. None if there is no answer, or nothing
  in it.
  """
  answer = boxed(text)
  if answer is None:
    lines = [line.strip(" \t#*") for line in _HASHES.findall(text)]
    bare = [line for line in lines if line and not _WORDS.search(line)]
    answer = (bare or lines or [""])[-1]
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
  braces = re.sub(r"\\.", "", answer, flags=re.DOTALL)
  if braces.count("{") != braces.count("}"):
    return []  # it would end the box
  # Of what it cannot read as a whole it would read a part. No timeouts of its
  # own: they would take the reward process's alarm away.
  # Units are dropped before; of 2ab the library would drop the letters.
  config = library.LatexExtractionConfig(boxed_match_priority=0)
  keeps = dataclasses.replace(config.normalization_config, units=False)
  return library.parse(
    f"\\boxed{{{answer}}}",
    [dataclasses.replace(config, normalization_config=keeps)],
    extraction_mode="first_match",
    parsing_timeout=None,
  )


def _complex(readings: list[Any]) -> list[Any]:
  """Return readings whose only letter is i with the imaginary unit for it.

  Logarithms and the like of it would take long to evaluate; they stay.
  """
  import sympy

  terms = [x for x in readings if isinstance(x, sympy.Basic)]
  letters = {y for x in terms for y in x.free_symbols}
  functions = {y for x in terms for y in x.atoms(sympy.Function)}
  if {str(x) for x in letters} != {"i"} or any(
    not isinstance(x, sympy.exp) for x in functions
  ):
    return readings
  units: Any = dict.fromkeys(letters, sympy.I)
  return [x.subs(units) if isinstance(x, sympy.Basic) else x for x in readings]


def are_equal(expected: str, answer: str | None) -> bool:
  """Return whether an answer is the expected one, as mathematics or verbatim.

  Args:
    expected: LaTeX or plain.
    answer: the same; None is never right. One that would take long to compute,
      such as a tower of powers, is right only verbatim.
  """
  if answer is None or len(answer) > _MAX_CHARACTERS:
    return False
  if answer.strip() == expected.strip():
    return bool(answer.strip())
  golds, said = spelling.labelled(expected), spelling.labelled(answer)
  if len(golds) == len(said) == 2:
    return golds[0] == said[0] and are_equal(golds[1], said[1])
  if len(golds) + len(said) > 2:
    return any(are_equal(x, y) for x in golds for y in said)
  gold_words, words = spelling.words(expected), spelling.words(answer)
  if gold_words is not None and (words is not None or len(gold_words) > 2):
    return gold_words == words
  gold, said = spelling.latex(expected), spelling.latex(answer)
  if spelling.tight(gold) == spelling.tight(said):
    return bool(said)
  gold, said, is_same_base = answer_size.without_base(gold, said)
  if not is_same_base or answer_size.is_too_large(said, gold):
    return False
  golds, read = _readings(gold), _readings(said)
  if not golds or not read:
    return False
  together = _complex(golds + read)
  golds, read = together[: len(golds)], together[len(golds) :]
  if "\\infty" in said and "\\infty" not in gold and _is_term(read[0]):
    return False  # the library takes some infinite terms for any set
  kinds = {_kind(golds[0], gold), _kind(read[0], said)}
  if kinds in ({"ordered", "set"}, {"ordered", "one"}) or _is_false(read[0]):
    return False
  is_right = bool(
    _library().verify(
      golds, read, timeout_seconds=None, allow_set_relation_comp=True
    )
  )
  sizes = _size(golds[0]), _size(read[0])
  if sizes[0] is None or sizes[1] is None:
    return is_right
  # The library compares decimals: it takes all small numbers as equal, and
  # \sqrt{2} and 2^{0.5} as different.
  has_float = any(one.atoms(_float()) for one in (golds[0], read[0]))
  if not is_right and not has_float:
    return False
  tolerance = _TOLERANCE if is_right else _EXACT
  scales = (1, 100) if "%" in gold + said else (1,)  # 50% is 0.5, and 50
  return any(
    bool(abs(x - y) <= tolerance * max(abs(x), abs(y)))
    for scale in scales
    for x, y in ((sizes[0] * scale, sizes[1]), (sizes[0], sizes[1] * scale))
  )


def _float() -> type:
  import sympy

  return sympy.Float


def _is_term(reading: Any) -> bool:
  import sympy

  return isinstance(reading, sympy.Expr)


def _kind(reading: Any, latex: str) -> str:
  """Return whether an answer is one value, a pair or interval, or a set.

  What has neither brackets nor braces may be a pair or a set.
  """
  import sympy

  if isinstance(reading, sympy.Equality):
    reading = reading.rhs
  is_point = isinstance(reading, sympy.FiniteSet) and len(reading) == 1
  if isinstance(reading, (sympy.Tuple, sympy.Interval)) or (
    is_point and "[" in latex
  ):
    return "ordered"
  if isinstance(reading, sympy.FiniteSet) and not is_point:
    return "set" if latex.startswith("{") or "\\{" in latex else "list"
  return "one" if isinstance(reading, sympy.Expr) else ""


def _is_false(reading: Any) -> bool:
  """Return whether an answer says that two different numbers are equal."""
  import sympy

  if not isinstance(reading, sympy.Basic):
    return False
  sides = [map(_size, one.args) for one in reading.atoms(sympy.Equality)]
  return any(
    x is not None
    and y is not None
    and abs(x - y) > _TOLERANCE * max(abs(x), abs(y))
    for x, y in sides
  )


def _size(reading: Any) -> Any:
  """Return a real number to 20 digits, and None for what is none."""
  if not getattr(reading, "is_number", False):
    return None
  value = reading.doit().evalf(20)
  return value if isinstance(value, _float()) or value.is_zero else None


def gold_of(item: Mapping[str, Any]) -> str:
  """Return the right answer; "" if there is only a box or `####` around it."""
  text = str(item["answer"])
  if (answer := answer_of(text)) is not None:
    return answer
  return "" if boxed(text) == "" or not text.strip(" \t\r\n#*") else text


def score(item: Mapping[str, Any], completion: Completion) -> Reward:
  r"""Score 1 if the completion's answer equals the item's as mathematics.

  The item's answer may be a whole solution that ends with `#### answer` or has
  a `\boxed{}`. Part "answered" tells whether the completion has an answer.

  Args:
    item: with the right answer as `answer`.
    completion: whose last box or `####` is its answer. Without either it is
      the extracted one (`task.answer_prefix`).
  """
  expected = gold_of(item)
  answer = answer_of(completion.text)
  if answer is None:
    answer = completion.answer
  is_right = are_equal(expected, answer)
  if answer is not None and len(answer) <= _MAX_CHARACTERS:
    answer = spelling.latex(answer)  # equal ones are counted together
  return Reward(
    score=float(is_right),
    parts={"answered": float(bool(answer))},
    answer=answer,
  )
