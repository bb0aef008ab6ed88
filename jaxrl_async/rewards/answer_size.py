r"""How large the number is that an answer writes, before it is computed.

Sympy computes 9^{9^{9}}, 100000000! and \binom{1000000}{500000} to the last
digit, and cannot be interrupted meanwhile.
"""

import math
import re

# A number, a command, a letter, or any other sign.
_TOKEN = re.compile(r"\d+|\\[a-zA-Z]+|\\.|\S", re.DOTALL)
_OPENS, _CLOSES = {"{", "(", "[", "\\{"}, {"}", ")", "]", "\\}"}
# An answer is a result. Sympy may take long for these.
_UNFINISHED = re.compile(
  r"\\(?:i*int|oint|sum|prod|lim|Gamma|zeta|det|operatorname)(?![a-zA-Z])"
  r"|integrate|factorial|factorint|prime"
)
_BINOMIALS = {"\\binom", "\\dbinom", "\\tbinom", "\\choose"}
_MOST_DEPTH = 8
_MOST_DIGITS = 10_000  # of the number
_MOST_POWER = 60  # of a sum that would be multiplied out
_LETTER = 0.5  # log10 of what a letter stands for, e or \pi among them
_BASE = re.compile(r"(.*\w\)?)_\{?(\d+)\}?")


def is_too_large(answer: str, expected: str) -> bool:
  """Return whether an answer is not to be computed.

  Args:
    answer: LaTeX.
    expected: the right answer, which may have what is suspicious otherwise.
  """
  unfinished = set(_UNFINISHED.findall(answer))
  if unfinished - set(_UNFINISHED.findall(expected)):
    return True
  try:
    return _Reader(answer).log10() > _MOST_DIGITS
  except (RecursionError, OverflowError):
    return True


def without_base(expected: str, answer: str) -> tuple[str, str, bool]:
  """Return two numbers without the base they are written in.

  The last is False if they are written in different ones. Library and people
  disagree on what 11_2 is; here it is compared with other such numbers only.
  """
  bases = [_BASE.fullmatch(one) for one in (expected, answer)]
  gold, said = bases
  if gold is None:
    is_ten = said is None or said[2] == "10" or not said[1].isdigit()
    return expected, answer, is_ten
  if said is None:
    return gold[1], answer, True
  return gold[1], said[1], gold[2] == said[2]


class _Reader:
  """Reads LaTeX and bounds the size of every number that is in it."""

  def __init__(self, latex: str):
    """Cut the text into tokens."""
    self._tokens = _TOKEN.findall(latex)
    self._at = 0

  def log10(self) -> float:
    """Return an upper bound of the logarithm of the largest number."""
    largest = 0.0
    while self._at < len(self._tokens):
      largest = max(largest, self._group(0)[0])
      self._at += 1  # a bracket that closes nothing
    return largest

  def _group(self, depth: int) -> tuple[float, bool]:
    """Read up to a closing bracket; also return whether it is a sum of letters.

    Products bound sums too, as every number counts as 2 at least.
    """
    if depth > _MOST_DEPTH:
      return math.inf, True
    total, previous = 0.0, 0.0
    has_letters = is_sum = is_of_letters = False
    choose = 0  # arguments of a binomial that are still to come
    while self._at < len(self._tokens):
      token = self._tokens[self._at]
      if token in _CLOSES:
        break
      if token in ("^", "!"):
        self._at += 1
        if token == "!":
          previous = _power(previous, previous)
        else:
          exponent = self._exponent(depth)
          previous = _power(previous or _LETTER, exponent)
          if is_of_letters and exponent > math.log10(_MOST_POWER):
            previous = math.inf
        total += previous
        continue
      is_sum |= token in "+-"
      if token in _BINOMIALS:
        choose = 2 if token != "\\choose" else 1
        if token == "\\choose":
          total += _power(_LETTER, previous)
      size, is_of_letters = self._atom(depth)
      has_letters |= is_of_letters or token.isalpha() and len(token) == 1
      if choose and size:
        total += _power(_LETTER, size)
        choose -= 1
      previous = size
      total += size
    return total, has_letters and is_sum

  def _exponent(self, depth: int) -> float:
    """Read an exponent: of 9^9^9 the upper two, which are a power."""
    size, _ = self._atom(depth)
    if self._tokens[self._at : self._at + 1] == ["^"]:
      self._at += 1
      return _power(size, self._exponent(depth))
    return size

  def _atom(self, depth: int) -> tuple[float, bool]:
    """Read a number, a letter, or what is in brackets."""
    if self._at >= len(self._tokens):
      return 0.0, False
    token = self._tokens[self._at]
    if token in ("+", "-"):  # signs of an exponent
      self._at += 1
      return 0.0, False
    if token in _CLOSES:
      return 0.0, False
    self._at += 1
    if token in _OPENS:
      found = self._group(depth + 1)
      self._at += 1
      return found
    if token.isdigit():
      return math.log10(max(2.0, float(token[:300]))), False
    return (_LETTER if token[-1].isalpha() else 0.0), False


def _power(base: float, exponent: float) -> float:
  """Return the logarithm of a power, of the logarithms of its parts."""
  return math.inf if exponent > 6 else max(base, 0.3) * 10**exponent
