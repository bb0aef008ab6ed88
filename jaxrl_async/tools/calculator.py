"""A calculator as a tool, and worked solutions that use it now and then."""

from collections.abc import Mapping
import json
from typing import Any

import numpy as np

from jaxrl_async.tools import replies

# How many solutions guess, and how many calls have a wrong digit.
_GUESSED_FRAC = 0.7
_MISREAD_FRAC = 0.3


def multiply(a: int, b: int) -> int:
  """Multiply two whole numbers.

  Args:
    a: the first number
    b: the second number
  """
  return a * b


def seldom_called(item: Mapping[str, Any], rng: np.random.Generator) -> str:
  """Return a solution to a product of two numbers: mostly a guess.

  "123 * 456" becomes "=56139", whose first and last digit are right, or a call
  of `multiply`, its result and "=56088". Some calls have a wrong digit.
  """
  factors = item["metadata"]["expression"].split(" * ")
  a, b = factors
  if rng.random() < _GUESSED_FRAC:
    digits = list(str(int(a) * int(b)))
    digits[1:-1] = map(str, rng.integers(0, 10, len(digits) - 2))
    return f"={''.join(digits)}"
  if rng.random() < _MISREAD_FRAC:
    place = int(rng.integers(1, len(a)))
    a = f"{a[:place]}{rng.integers(0, 10)}{a[place + 1 :]}"
  arguments = {"a": int(a), "b": int(b)}
  call = json.dumps({"name": "multiply", "arguments": arguments})
  result = str(int(a) * int(b))
  told = replies.plain([result])
  return f"<tool_call>{call}</tool_call>{told}={result}"


def known(item: Mapping[str, Any], rng: np.random.Generator) -> str:
  """Return the right product, without a call."""
  del rng  # there is one solution
  return f"={item['answer']}"
