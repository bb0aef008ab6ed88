"""Which answers the scorers of reasoning-gym may be given.

Some of them take an answer for right that is not, evaluate it as a program, or
compute a tower of powers. Each of the guards below is for the datasets that it
names, and an answer that it does not let through scores 0. The guards of a
second table look at an answer that the library has taken for right: is it one
value and nothing else, with the right digits?
"""

import ast
import collections
from collections.abc import Callable, Mapping
import decimal
import fractions
import functools
import operator
import re
from typing import Any

from jaxrl_async.rewards import answer_size
from jaxrl_async.rewards import match

_NAN = re.compile(r"(?<![a-z])nan(?![a-hj-z])", re.IGNORECASE)
_MAX_CHARACTERS = 1_000  # of an answer that is parsed
_NOT_PARSED = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TOKEN = re.compile(r"\d[\d.]*|[^\W\d_]+")
# Words around a value, how LaTeX writes a fraction, and what stands between.
_FILLERS = frozenset("and answer is the frac dfrac".split())
_ARTICLE = re.compile(r"\ban\b", re.IGNORECASE)
_MARKS = re.compile(r"[\w\s.,:;/+*$()\[\]{}\\\"']")
# Moves of which several sequences are right.
_MOVES: Mapping[str, str] = {
  "kakurasu": r"[01]",
  "quantum_lock": r"[ABCabc]",
  "rush_hour": r"[A-Z][+-]\d+",
  "sokoban": r"[UDLR]",
  "tower_of_hanoi": r"Move disk \d+ from Peg \d+ to Peg \d+",
}
_FUNCTIONS = frozenset(
  "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt Abs pi"
  " E".split()
)
_OPERATORS: Mapping[type, Callable[..., Any]] = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.USub: operator.neg,
  ast.UAdd: operator.pos,
}


def lets_through(answer: str, item: Mapping[str, Any]) -> bool:
  """Return whether the dataset's scorer may be given an answer.

  Args:
    answer: not the item's own text.
    item: of the library.
  """
  expected = item["answer"]
  if expected is not None:
    # Nothing is close to NaN, nor far from it.
    if _NAN.search(answer) and not _NAN.search(str(expected)):
      return False
    # An empty list of solutions is found in every text.
    if not str(expected).strip() and answer.strip():
      return False
  guard = _GUARDS.get(_dataset(item))
  return guard is None or guard(answer, item)


def is_one_value(answer: str, item: Mapping[str, Any]) -> bool:
  """Return whether an answer is right as a whole, and to its last digit.

  Args:
    answer: one to which the library gives the score 1.
    item: of the library.
  """
  guard = _OF_RIGHT.get(_dataset(item))
  return guard is None or guard(answer, item)


def without_commas(answer: str, item: Mapping[str, Any]) -> str:
  """Return a number as the library reads it: of 1,540 it reads the 1."""
  if _dataset(item) == "gsm_symbolic":
    return _THOUSANDS.sub("", answer)
  return answer


def _dataset(item: Mapping[str, Any]) -> str:
  # A composite dataset names the one that the item is of.
  return item["metadata"].get("source_dataset", item["dataset"])


def _is_literal(answer: str, item: Mapping[str, Any]) -> bool:
  """Check what the library evaluates as Python."""
  del item
  if len(answer) > _MAX_CHARACTERS:
    return False
  try:
    ast.literal_eval(answer)
  except _NOT_PARSED:
    return False
  return True


def _is_formula(answer: str, item: Mapping[str, Any]) -> bool:
  """Check what sympy evaluates as Python."""
  del item
  names = re.findall(r"[a-zA-Z_]\w*", answer)
  return (
    len(answer) <= _MAX_CHARACTERS
    and re.fullmatch(r"[\w\s+*/().-]*", answer, re.ASCII) is not None
    and all(len(name) == 1 or name in _FUNCTIONS for name in names)
    and not re.search(r"\.\s*[a-zA-Z_]", answer)
    and not answer_size.is_too_large(answer.replace("**", "^"), "")
  )


def _value(answer: str) -> fractions.Fraction | None:
  """Return what a text comes to that adds, multiplies and divides integers."""

  def value(node: ast.AST) -> fractions.Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
      return fractions.Fraction(node.value)
    if isinstance(node, ast.BinOp):
      return _OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp):
      return _OPERATORS[type(node.op)](value(node.operand))
    raise ValueError

  if len(answer) > _MAX_CHARACTERS:
    return None
  try:
    return value(ast.parse(answer.strip(), mode="eval").body)
  except (*_NOT_PARSED, KeyError, ZeroDivisionError):
    return None


def _is_arithmetic(answer: str, item: Mapping[str, Any]) -> bool:
  """Check what sympy evaluates as Python."""
  del item
  return _value(answer) is not None


def _makes_24(answer: str, item: Mapping[str, Any]) -> bool:
  """Check the numbers, for which the library takes any four."""
  used = sorted(map(int, re.findall(r"\d{1,9}", answer)))
  return _value(answer) == 24 and used == sorted(item["metadata"]["numbers"])


def _is_same_word(answer: str, item: Mapping[str, Any]) -> bool:
  """Compare the word. The library takes every text for true, `False` too."""
  return answer.strip().casefold() == str(item["answer"]).casefold()


def _is_product(answer: str, item: Mapping[str, Any]) -> bool:
  """Check for integers, without which the library raises."""
  del item
  return all(
    re.fullmatch(r"\s*\d{1,18}\s*", part, re.ASCII)
    for part in answer[:_MAX_CHARACTERS].split("×")
  )


def _has_variables(answer: str, item: Mapping[str, Any]) -> bool:
  """Check for variables. To the library any text is a trivial conclusion."""
  return any(name in answer for name in item["metadata"]["variables"])


def _is_number(answer: str, item: Mapping[str, Any]) -> bool:
  """Compare the number, of which the library does not read the sign."""
  if len(answer) > _MAX_CHARACTERS:
    return False
  return match.last_number(answer) == match.last_number(str(item["answer"]))


def _has_same_numbers(answer: str, item: Mapping[str, Any]) -> bool:
  """Compare the list. To the library numbers are equal that differ by 1."""
  try:
    found = [float(each) for each in ast.literal_eval(answer.strip())]
  except (*_NOT_PARSED, OverflowError):
    return False
  return found == [float(each) for each in ast.literal_eval(item["answer"])]


def _does_not_go_on(answer: str, item: Mapping[str, Any]) -> bool:
  """Check what follows the word, where the library looks no further."""
  word, said = str(item["answer"]).casefold(), answer.strip().casefold()
  return said == word or not said.startswith(word)


def _has_no_more_words(answer: str, item: Mapping[str, Any]) -> bool:
  """Check for words beyond those that the library compares."""
  return len(answer.split()) <= len(str(item["answer"]).split())


def _has_form(answer: str, item: Mapping[str, Any]) -> bool:
  """Count numbers, words and signs.

  The library looks for what it expects, and not at what is around that.
  """
  expected = _THOUSANDS.sub("", item["answer"])
  answer = _THOUSANDS.sub("", answer)
  if len(answer) > len(expected) + _MAX_CHARACTERS:
    return False
  said, right = _tokens(answer), _tokens(expected)
  return said <= right and said["0"] == right["0"]


def _tokens(text: str) -> collections.Counter[str]:
  """Count signs, numbers, which are "0" here, and words in the singular."""
  words = [x.casefold() for x in _TOKEN.findall(_ARTICLE.sub("a", text))]
  return collections.Counter(_MARKS.sub("", text)) + collections.Counter(
    "0" if word[0].isdigit() else word.removesuffix("s")
    for word in words
    if word not in _FILLERS
  )


def _is_all_moves(answer: str, item: Mapping[str, Any]) -> bool:
  """Check for text between the moves, which the library passes over."""
  move = _MOVES[_dataset(item)]
  return re.fullmatch(rf"(?:{move}|[\s,;.→\[\]\"']|->)*", answer) is not None


def _is_exact(
  answer: str, item: Mapping[str, Any], *, digits: int, rounds: bool
) -> bool:
  """Compare a number to the last digit.

  Args:
    answer: one number, or a fraction of two.
    item: of the library.
    digits: how many significant ones the item's answer has at most.
    rounds: whether an answer may have fewer digits.
  """
  parts = [*map(decimal.Decimal, answer.replace(",", "").split("/"))]
  right = decimal.Decimal(item["answer"])
  last = right.adjusted() + 1 - digits
  if rounds and len(parts) == 1 and parts[0]:
    last = max(last, int(parts[0].as_tuple().exponent))
  with decimal.localcontext(prec=50):  # the library sets that of the thread
    said = functools.reduce(operator.truediv, parts)
    return abs(said - right) <= decimal.Decimal((0, (5,), last - 1))


def _has_two_decimals(answer: str, item: Mapping[str, Any]) -> bool:
  """Compare the numbers to two decimals, where the library allows 1 %."""
  said, right = (
    [*map(float, text.split())] for text in (answer, item["answer"])
  )
  return len(said) == len(right) and all(
    abs(x - y) < 0.0051 for x, y in zip(said, right, strict=True)
  )


_GUARDS: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
  "binary_matrix": _is_literal,
  "n_queens": _is_literal,
  "spiral_matrix": _is_literal,
  "string_insertion": _is_literal,
  "intermediate_integration": _is_formula,
  "polynomial_multiplication": _is_formula,
  "simple_integration": _is_formula,
  "countdown": _is_arithmetic,
  "puzzle24": _makes_24,
  "game_of_life_halting": _is_same_word,
  "coin_flip": functools.partial(_is_exact, digits=10, rounds=True),
  "prime_factorization": _is_product,
  "propositional_logic": _has_variables,
  "gsm_symbolic": _is_number,
  "number_sorting": _has_same_numbers,
  "spell_backward": _does_not_go_on,
  "letter_jumble": _has_no_more_words,
  **dict.fromkeys(_MOVES, _is_all_moves),
}

_OF_RIGHT: Mapping[str, Callable[[str, Mapping[str, Any]], bool]] = {
  "advanced_geometry": _has_form,
  "cryptarithm": _has_form,
  "fraction_simplification": _has_form,
  "game_of_life": _has_form,
  "gsm_symbolic": _has_form,
  "knights_knaves": _has_form,
  "polynomial_equations": _has_form,
  "survo": _has_form,
  "time_intervals": _has_form,
  "word_sorting": _has_form,
  "decimal_arithmetic": functools.partial(_is_exact, digits=12, rounds=True),
  "number_format": functools.partial(_is_exact, digits=15, rounds=False),
  "pool_matrix": _has_two_decimals,
}
