"""Solutions written out step by step, for the supervised first stage.

A policy that thinks in tokens has something for reinforcement learning to
improve, and completions whose lengths have a long tail.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Solver = Callable[[Mapping[str, Any], np.random.Generator, float], str]


def chain_sum(
  item: Mapping[str, Any], rng: np.random.Generator, corrupted_frac: float
) -> str:
  r"""Add up from left to right, a line for each partial sum.

  "4 - 1 - 7 + 7" becomes "4-1=3\n3-7=-4\n-4+7=3": what follows the last "=" is
  the answer. With terms of one digit a line has at most 10 characters.

  Args:
    item: of reasoning-gym's chain_sum.
    rng: draws which sums are wrong, and by how much.
    corrupted_frac: share of the partial sums, the last one included, that are
      written wrong by 1 to 3, up or down, and carried on.
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
