r"""Accuracy under budgets of thought, and what it falls short of.

J(L) is the accuracy of a policy whose thoughts are cut after L tokens. The
definitions are those of arXiv:2506.07104. No curve is taken to be monotone.

In all functions `grid` has budgets L, ascending, and curves have J(L) at each.
An integral is a sum of trapezoids over the grid; it is one over [0, L_max] if
the grid begins with 0 and ends with L_max.
"""

from collections.abc import Sequence

from jaxtyping import Float, Real
import numpy as np

Grid = Sequence[int] | Sequence[float] | Real[np.ndarray, "L"]


def weights(
  budgets: Sequence[int], longest: int | float
) -> Float[np.ndarray, "_"]:
  r"""Return the weights of r_i in the mean of J over [0, L_max].

  c_i = (L_{i+1} - L_{i-1}) / 2,  c_{N+1} = (L_max - L_N) / 2

  with L_0 = 0 and L_{N+1} = L_max, all of them divided by L_max. The last one
  is that of the whole thought. The trapezoids' weight of J(0), L_1 / 2, is left
  out, so that the sum is 1 - L_1 / (2 L_max).

  Args:
    budgets: L_1 to L_N, ascending and less than L_max; L_1 may be 0.
    longest: L_max.

  Raises:
    ValueError: the budgets are others.
  """
  between = np.array([-1, *budgets, longest], np.float64)
  if not (np.diff(between) > 0).all():
    raise ValueError(
      f"{tuple(budgets)} are not ascending budgets from 0 on and below"
      f" {longest:g}"
    )
  ends = np.array([0, *budgets, longest, longest], np.float64)
  return (ends[2:] - ends[:-2]) / 2 / longest


def frontier(
  curves: Float[np.ndarray, "policies L"],
) -> Float[np.ndarray, "L"]:
  """Return the best accuracy of a pool of policies at each budget.

  It depends on the pool: a gap says little unless the pool is named.
  """
  return np.max(curves, axis=0)


def mean(grid: Grid, curve: Float[np.ndarray, "L"]) -> float:
  """Return the integral of a curve over the length of the grid."""
  places = _ascending(grid)
  return float(np.trapezoid(curve, places) / (places[-1] - places[0]))


def gap_mean(
  grid: Grid, best: Float[np.ndarray, "L"], curve: Float[np.ndarray, "L"]
) -> float:
  """Return REG_int, the mean of frontier minus curve; see `mean`.

  It is negative where a curve that is not in the pool is above the frontier.
  """
  return mean(grid, best - curve)


def gap_sum(
  best: Float[np.ndarray, "L"], curve: Float[np.ndarray, "L"]
) -> float:
  """Return REG_grid, the sum of frontier minus curve over the grid's points.

  It weighs regions by the number of points they have.
  """
  return float(np.sum(best - curve))


def quadrature_error(
  grid: Grid, curve: Float[np.ndarray, "L"], budgets: Sequence[int]
) -> float:
  """Return how far the weighted sum of J(L_i) is from the mean of J, over it.

  The sum is over the budgets and the grid's last point, with `weights`; between
  points of the grid the curve is a line. The grid begins with 0. The budgets
  may be in any order, such as that in which `greedy` chose them.
  """
  places, exact = _ascending(grid), mean(grid, curve)
  if places[0] != 0:
    raise ValueError(f"the grid begins with {places[0]:g} and not with 0")
  longest = float(places[-1])
  budgets = sorted(budgets)
  at = np.interp([*budgets, longest], places, curve)
  return float((weights(budgets, longest) @ at - exact) / exact)


def greedy(
  grid: Grid, curve: Float[np.ndarray, "L"], count: int
) -> tuple[int, ...]:
  """Return budgets that are chosen one by one for a known curve, in that order.

  Each is the point of the grid with which the lines through the chosen points
  and both ends come closest to the curve: the mean of the absolute difference
  over the grid is the least, and of equal ones the first is taken.
  """
  places = _ascending(grid)
  chosen: list[int] = []

  def error(point: int) -> float:
    through = sorted({0, len(places) - 1, *chosen, point})
    line = np.interp(places, places[through], curve[through])
    return mean(places, np.abs(curve - line))

  for _ in range(min(count, len(places) - 2)):
    left = [i for i in range(1, len(places) - 1) if i not in chosen]
    chosen.append(min(left, key=error))
  return tuple(int(places[i]) for i in chosen)


def _ascending(grid: Grid) -> Float[np.ndarray, "L"]:
  """Return the grid as an array.

  Raises:
    ValueError: it has fewer than two points, or they do not ascend.
  """
  places = np.asarray(grid, np.float64)
  if len(places) < 2 or not (np.diff(places) > 0).all():
    raise ValueError(f"{grid} are not two or more ascending budgets")
  return places
