"""Accuracy under budgets: weights, gaps, quadrature; advantages of parts."""

import itertools

import numpy as np
import pytest

from jaxrl_async.algorithms import advantages as advantages_lib
from jaxrl_async.algorithms import budget_curves
from jaxrl_async.config import budgets as budgets_lib


def test_exponential_and_uniform_budgets_are_those_of_the_paper():
  found = budgets_lib.exponential(1_024, 32_768, 5)
  assert found == (1_024, 2_048, 4_096, 8_192, 16_384)
  assert budgets_lib.exponential(4, 96, 2) == (4, 20)
  assert budgets_lib.uniform(96, 5) == (16, 32, 48, 64, 80)


def test_weights_are_those_of_trapezoids_without_the_left_end():
  # By hand: (3 - 0) / 2, (7 - 1) / 2, (16 - 3) / 2, (16 - 7) / 2, over 16.
  found = budget_curves.weights((1, 3, 7), 16)
  np.testing.assert_allclose(found * 16, [1.5, 3, 6.5, 4.5], rtol=1e-15)
  rng = np.random.default_rng(0)
  for _ in range(20):
    budgets = np.sort(rng.choice(np.arange(1, 99), 5, replace=False))
    values = rng.random(6)
    found = budget_curves.weights([int(x) for x in budgets], 100)
    at = np.array([0, *budgets, 100], np.float64)
    exact = np.trapezoid([0.0, *values], at) / 100
    np.testing.assert_allclose(found @ values, exact, rtol=1e-12)
    assert found.sum() == pytest.approx(1 - budgets[0] / 200)
  # The paper's, of 1K to 16K and 32K.
  found = budget_curves.weights(
    budgets_lib.exponential(1_024, 32_768, 5), 32_768
  )
  expected = [0.03125, 0.046875, 0.09375, 0.1875, 0.375, 0.25]
  np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("budgets", [(5, 3), (3, 3), (-1, 3), (3, 16), (3, 17)])
def test_weights_of_other_budgets_are_refused(budgets):
  with pytest.raises(ValueError, match="are not ascending .* below 16"):
    budget_curves.weights(budgets, 16)


def test_a_first_budget_of_0_has_the_weight_of_the_left_end():
  found = budget_curves.weights((0, 4), 16)
  np.testing.assert_allclose(found * 16, [2, 8, 6], rtol=1e-15)
  assert found.sum() == 1


def test_gaps_of_curves_that_fall_in_between():
  grid = [0, 2, 6, 8]
  pool = np.array([[0.0, 0.6, 0.4, 0.8], [0.2, 0.5, 0.7, 0.6]])
  best = budget_curves.frontier(pool)
  assert best.tolist() == [0.2, 0.6, 0.7, 0.8]
  # Gaps 0.2, 0, 0.3, 0: areas 0.2 + 0.6 + 0.3 over a length of 8.
  assert budget_curves.gap_mean(grid, best, pool[0]) == pytest.approx(1.1 / 8)
  assert budget_curves.gap_sum(best, pool[0]) == pytest.approx(0.5)
  assert budget_curves.gap_mean(grid, best, best) == 0.0
  assert budget_curves.gap_mean(grid, pool[0], best) == pytest.approx(-1.1 / 8)


def test_the_quadrature_is_exact_for_lines_through_zero_and_not_for_others():
  grid = np.arange(0, 65, 4)
  assert budget_curves.quadrature_error(
    grid, grid / 64, (8, 20)
  ) == pytest.approx(0)
  # A step after 4: the mean is (2 + 60) / 64, and the sum (4 + 28 + 28) / 64.
  step = np.array([0.0] + [1.0] * 16)
  found = budget_curves.quadrature_error(grid, step, (8,))
  assert found == pytest.approx((32 + 28) / 62 - 1)
  # The order in which `greedy` chose them is no other error.
  assert budget_curves.quadrature_error(grid, step, (20, 4, 8)) == (
    budget_curves.quadrature_error(grid, step, (4, 8, 20))
  )
  with pytest.raises(ValueError, match="begins with 4"):
    budget_curves.quadrature_error(grid[1:], step[1:], (8,))
  with pytest.raises(ValueError, match="ascending"):
    budget_curves.mean([0, 0, 1], np.zeros(3))


def test_greedy_budgets_are_the_best_ones_one_by_one():
  rng = np.random.default_rng(1)
  grid = np.sort(rng.choice(np.arange(1, 60), 9, replace=False))
  grid = np.array([0, *grid, 64], np.float64)
  curve = rng.random(len(grid))  # not monotone
  expected: list[int] = []
  for _ in range(4):
    errors = {}
    for i in range(1, len(grid) - 1):
      if i not in expected:
        knots = sorted([0, len(grid) - 1, i, *expected])
        line = curve.copy()
        for a, b in itertools.pairwise(knots):
          for x in range(a, b):
            part = (grid[x] - grid[a]) / (grid[b] - grid[a])
            line[x] = curve[a] + part * (curve[b] - curve[a])
        errors[i] = np.trapezoid(np.abs(curve - line), grid)
    expected.append(min(errors, key=lambda i: errors[i]))
  found = budget_curves.greedy(grid, curve, 4)
  assert found == tuple(int(grid[i]) for i in expected)
  assert budget_curves.greedy([0, 5, 9], np.array([0.0, 1.0, 0.0]), 7) == (5,)


def test_advantages_of_parts_are_returns_less_those_of_the_others():
  """The placement of rewards at tokens, as a loop in float64."""
  rng = np.random.default_rng(2)
  budgets, longest = (2, 5, 9), 16
  sizes = [4, 1, 3]
  group_ids = np.repeat(np.arange(3), sizes)
  lengths = rng.integers(1, 16, len(group_ids))
  scores = np.zeros((len(group_ids), 4))
  for row, length in zip(scores, lengths, strict=True):
    row[:] = rng.normal()  # of the natural answer, at all L_i >= K
    for i, budget in enumerate(budgets):
      if budget < length:
        row[i] = rng.normal()
  weights = budget_curves.weights(budgets, longest)
  found = advantages_lib.budget_advantages(scores, weights, group_ids, 3)
  ends = [*budgets, longest]
  for me, length in enumerate(lengths):
    others = [i for i in np.flatnonzero(group_ids == group_ids[me]) if i != me]
    placed = np.zeros(length)
    for i, end in enumerate(ends):
      placed[min(end, length) - 1] += weights[i] * scores[me, i]
    returns = np.cumsum(placed[::-1])[::-1]
    for t in range(1, length + 1):
      j = next(i for i, end in enumerate(ends) if end >= t)
      baseline = 0.0
      for i in range(j, 4):
        if others:
          baseline += weights[i] * np.mean([scores[o, i] for o in others])
      expected = returns[t - 1] - baseline if others else 0.0
      np.testing.assert_allclose(found[me, j], expected, rtol=1e-5, atol=1e-6)
  assert {0, 1, 2, 3} <= {
    sum(b < length for b in budgets) for length in lengths
  }
