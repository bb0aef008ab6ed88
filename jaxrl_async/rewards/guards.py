"""Which answers the scorers of reasoning-gym may be given.

Some of them take an answer for right that is not, evaluate it as a program, or
compute a tower of powers. Each of the guards below is for the datasets that it
names, and an answer that it does not let through scores 0.
"""

import ast
from collections.abc import Callable, Mapping
import fractions
import operator
import re
from typing import Any

from jaxrl_async.rewards import answer_size
from jaxrl_async.rewards import match

_NAN = re.compile(r"(?<![a-z])nan(?![a-hj-z])", re.IGNORECASE)
_MAX_CHARACTERS = 1_000  # of an answer that is parsed
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
  # A composite dataset names the one that the item is of.
  guard = _GUARDS.get(item["metadata"].get("source_dataset", item["dataset"]))
  return guard is None or guard(answer, item)


def _is_literal(answer: str, item: Mapping[str, Any]) -> bool:
  """Check what the library evaluates as Python."""
  del item
  if len(answer) > _MAX_CHARACTERS:
    return False
  try:
    ast.literal_eval(answer)
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
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
  except (
    ValueError,
    KeyError,
    SyntaxError,
    ZeroDivisionError,
    MemoryError,
    RecursionError,
  ):
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


def _is_probability(answer: str, item: Mapping[str, Any]) -> bool:
  """Compare the number. To the library 0 is the beginning of 0.3125."""
  expected = match.last_number(item["answer"])
  said = match.last_number(answer)
  if expected is None or said is None or len(answer) > _MAX_CHARACTERS:
    return False
  if not re.fullmatch(r"[\d\s./,]+(?:[eE]-?\d{1,2})?", answer):
    return False
  return abs(said - expected) <= min(1e-4, 0.01 * expected)


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
  except (
    ValueError,
    SyntaxError,
    TypeError,
    OverflowError,
    MemoryError,
    RecursionError,
  ):
    return False
  return found == [float(each) for each in ast.literal_eval(item["answer"])]


def _does_not_go_on(answer: str, item: Mapping[str, Any]) -> bool:
  """Check what follows the word, where the library looks no further."""
  word, said = str(item["answer"]).casefold(), answer.strip().casefold()
  return said == word or not said.startswith(word)


def _has_no_more_words(answer: str, item: Mapping[str, Any]) -> bool:
  """Check for words beyond those that the library compares."""
  return len(answer.split()) <= len(str(item["answer"]).split())


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
  "coin_flip": _is_probability,
  "prime_factorization": _is_product,
  "propositional_logic": _has_variables,
  "gsm_symbolic": _is_number,
  "number_sorting": _has_same_numbers,
  "spell_backward": _does_not_go_on,
  "letter_jumble": _has_no_more_words,
}
