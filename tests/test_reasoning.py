"""The scorers of reasoning-gym: odd answers score nothing and end nothing."""

import ast
import importlib
import json
import pathlib
import re
import sys

import pytest

from jaxrl_async.rewards import reasoning

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
odd_answers = importlib.import_module("odd_answers")

# Those of which the library takes odd answers for right, raises for some, or
# evaluates them as programs.
GUARDED = (
  "binary_matrix",
  "boxnet",
  "coin_flip",
  "complex_arithmetic",
  "countdown",
  "game_of_life",
  "game_of_life_halting",
  "intermediate_integration",
  "n_queens",
  "polynomial_equations",
  "polynomial_multiplication",
  "prime_factorization",
  "propositional_logic",
  "puzzle24",
  "simple_integration",
  "spiral_matrix",
  "string_insertion",
)


def items(name, count):
  dataset = reasoning.create_dataset(name, {}, seed=4, size=count)
  for i in range(count):
    yield {**dataset[i], "dataset": name, "params": {}}


def check(name, count):
  for item in items(name, count):
    if item["answer"] is not None:
      assert reasoning.score_answer(item, item["answer"]) == 1.0
    for odd in odd_answers.ODD:
      if odd != item["answer"]:
        assert reasoning.score_answer(item, odd) < 1.0, (item["answer"], odd)


@pytest.mark.parametrize("name", GUARDED)
def test_odd_answers_are_not_right_and_raise_nothing(name):
  check(name, 4)


# A dependency of two datasets leaves its files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_dataset_takes_an_odd_answer_for_right():
  assert len(odd_answers.ODD) >= 40
  # A composite dataset needs others; its items name them.
  for name in sorted(set(reasoning.datasets()) - {"composite"}):
    check(name, 1)


def score(name, answer, wanted):
  """The score of an answer to an item whose own answer is `wanted`."""
  for item in items(name, 40):
    if item["answer"] == wanted:
      return reasoning.score_answer(item, answer)
  raise AssertionError(f"{name} has no item with the answer {wanted!r}")


def test_what_the_library_takes_for_right_is_wrong():
  assert score("game_of_life_halting", "False", "True") == 0.0
  assert score("game_of_life_halting", "True", "False") == 0.0
  assert score("game_of_life_halting", " false\n", "False") == 1.0
  (item,) = items("puzzle24", 1)
  assert sorted(item["metadata"]["numbers"]) != [1, 1, 4, 6]
  assert reasoning.score_answer(item, "6*4*1*1") < 1.0
  (item,) = items("intermediate_integration", 1)
  integral = f"Integral({item['metadata']['integrand']}, x) + C"
  assert reasoning.score_answer(item, integral) < 1.0


# Datasets whose scorers take these for right, made of the right answer.
BESIDE_IT = {
  "gsm_symbolic": lambda right: [f"-{right}", f"{right} or 7"],
  "letter_jumble": lambda right: [f"{right} or not", f"{right} {right}"],
  "number_sorting": lambda right: [re.sub(r"(\d+)\.(\d)", r"\1.\g<2>5", right)],
  "spell_backward": lambda right: [f"{right}x", f"{right} or not"],
}


@pytest.mark.parametrize("name", BESIDE_IT)
def test_what_is_beside_the_right_answer_is_wrong(name):
  for item in items(name, 12):
    right = item["answer"]
    assert reasoning.score_answer(item, right) == 1.0
    for answer in BESIDE_IT[name](right):
      if answer != right:
        assert reasoning.score_answer(item, answer) < 0.9, (right, answer)
  if name == "number_sorting":
    numbers = ast.literal_eval(right)
    for written in (json.dumps(numbers), f"[{', '.join(numbers)}]"):
      assert reasoning.score_answer(item, written) == 1.0


def test_an_answer_is_evaluated_as_no_program(tmp_path):
  left = tmp_path / "left"
  program = f"[open({str(left)!r}, 'w')]"
  for name in sorted(reasoning.guards._GUARDS):
    for item in items(name, 1):
      assert reasoning.score_answer(item, program) < 1.0
  assert not left.exists()


def test_a_fault_of_the_item_is_no_score():
  (item,) = items("complex_arithmetic", 1)
  del item["metadata"]["result"]
  with pytest.raises(KeyError):
    reasoning.score_answer(item, "1 + 1i")
