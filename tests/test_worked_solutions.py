"""Worked solutions of the warm start."""

import numpy as np
import pytest

from configs import quickstart
from configs import staleness
from jaxrl_async.data import worked_solutions
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import reasoning


def items(num_items, name="chain_sum", **params):
  dataset = reasoning.create_dataset(name, params, seed=7, size=num_items)
  for i in range(num_items):
    yield {"dataset": name, "params": params, **dataset[i]}


QUICKSTART = quickstart.get_config().task.params.to_dict()


def test_the_partial_sums_are_written_from_left_to_right():
  item = {"metadata": {"expression": "4 - 1 - 7 + 7"}}
  solution = worked_solutions.chain_sum(item, np.random.default_rng(0), 0.0)
  assert solution == "4-1=3\n3-7=-4\n-4+7=3"


@pytest.mark.parametrize(
  "params",
  [
    QUICKSTART,
    {"min_terms": 1, "max_terms": 8, "max_digits": 4, "allow_negation": True},
  ],
)
def test_an_uncorrupted_solution_always_scores_one(params):
  rng = np.random.default_rng(0)
  for item in items(300, **params):
    solution = worked_solutions.chain_sum(item, rng, 0.0)
    answer = extraction.extract_answer(solution, "=")
    assert reasoning.score_answer(item, answer) == 1.0


def test_every_line_is_wrong_by_one_to_three_when_all_are_corrupted():
  rng = np.random.default_rng(0)
  errors = set()
  for item in items(200, **QUICKSTART):
    solution = worked_solutions.chain_sum(item, rng, 1.0)
    carried = item["metadata"]["expression"].split()[0]
    for line in solution.split("\n"):
      left, right = line.split("=")
      assert left.startswith(carried)  # the wrong sum is carried on
      errors.add(int(right) - eval(left.replace("--", "+")))
      carried = right
  assert errors == {-3, -2, -1, 1, 2, 3}


VARIANTS = {
  variant: staleness.get_config(variant) for variant in staleness.VARIANTS
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_solutions_of_the_variants_score_one_and_fit(variant):
  config = VARIANTS[variant]
  solver, params = config.warm_start.solver, config.task.params.to_dict()
  solve = worked_solutions.find(solver, 0.0)
  rng = np.random.default_rng(0)
  for item in items(50, solver, **params):
    solution = solve(item, rng)
    answer = extraction.extract_answer(solution, config.task.answer_prefix)
    assert reasoning.score_answer(item, answer) == 1.0
    # A token is a character, and one more ends the solution.
    assert len(solution) < config.rollout.max_completion_tokens
    prompt = config.task.template.format(**item["metadata"])
    assert len(prompt) <= config.rollout.max_prompt_tokens


def test_a_wrong_place_has_another_number_of_those_that_are_left():
  item = {"metadata": {"sorted_numbers": ["9.0", "7.5", "4.0", "1.0"]}}
  solve = worked_solutions.number_sorting
  rng = np.random.default_rng(0)
  assert solve(item, rng, 0.0) == "[9,7.5,4,1]"
  found = {solve(item, rng, 1.0) for _ in range(200)}
  # The last number is all that is left.
  assert "[9,7.5,4,1]" not in found and len(found) == 3 * 2 * 1
  for text in found:
    left = [9, 7.5, 4, 1]
    for number in eval(text)[:-1]:
      assert number != left[0]
      left.remove(number)


def test_a_wrong_operator_is_the_opposite_one():
  item = {"metadata": {"expression": "2*(6 + 9) - 8"}}
  rng = np.random.default_rng(0)
  assert worked_solutions.countdown(item, rng, 0.0) == "2*(6+9)-8"
  assert worked_solutions.countdown(item, rng, 1.0) == "2/(6-9)+8"


@pytest.mark.parametrize("solver", ["number_sorting", "countdown"])
def test_places_are_wrong_as_often_as_asked_for(solver):
  params = {
    "number_sorting": {"min_numbers": 6, "max_numbers": 6},
    "countdown": {"operators": ("+", "-")},
  }[solver]
  params |= {"min_value": 1, "max_value": 99} if solver == "countdown" else {}
  rng = np.random.default_rng(0)
  places = wrong = 0
  for item in items(300, solver, **params):
    right, found = (
      worked_solutions.SOLVERS[solver](item, rng, frac) for frac in (0.0, 0.3)
    )
    if solver == "countdown":
      wrong += sum(a != b for a, b in zip(right, found, strict=True))
      places += sum(x in "+-" for x in right)
      continue
    left = eval(right)
    for number in eval(found)[:-1]:
      places, wrong = places + 1, wrong + (number != left[0])
      left.remove(number)
  assert places > 800 and wrong / places == pytest.approx(0.3, abs=0.04)
