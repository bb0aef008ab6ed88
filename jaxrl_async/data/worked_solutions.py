"""Solutions written out step by step, for the warm start.

A policy that learned to reason step by step can be improved by reinforcement
learning. Its completions have lengths with a long tail.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Solver = Callable[[Mapping[str, Any], np.random.Generator, float], str]


def chain_sum(
  item: Mapping[str, Any], rng: np.random.Generator, corrupted_frac: float
) -> str:
  r"""Return a sum computed from left to right, with a line per partial sum.

  "4 - 1 - 7 + 7" becomes "4-1=3\n3-7=-4\n-4+7=3". The answer is the text after
  the last "=". With terms of one digit a line has at most 10 characters.

  Args:
    item: an item of reasoning-gym's chain_sum.
    rng: draws which partial sums are wrong, and by how much.
    corrupted_frac: probability that a partial sum, the last one included, is
      wrong by 1 to 3 in either direction. Later lines continue with the wrong
      sum.
  """
  first, *rest = item["metadata"]["expression"].split()
  if not rest:
    return f"{first}={first}"
  total = int(first)
  lines = []
  for operator, term in zip(rest[::2], rest[1::2], strict=True):
    step = f"{total}{operator}{term}"
    total += int(term) if operator == "+" else -int(term)
    if rng.random() < corrupted_frac:
      total += int(rng.choice((-3, -2, -1, 1, 2, 3)))
    lines.append(f"{step}={total}")
  return "\n".join(lines)


SOLVERS: dict[str, Solver] = {"chain_sum": chain_sum}
