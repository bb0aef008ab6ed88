"""The scorers of reasoning-gym: odd answers score nothing and end nothing."""

import ast
import decimal
import fractions
import json
import re

import odd_answers
import pytest

from jaxrl_async.rewards import reasoning

# Those of which the library takes odd answers for right, raises for some, or
# evaluates them as programs.
GUARDED = (
  "advanced_geometry",
  "binary_matrix",
  "boxnet",
  "coin_flip",
  "complex_arithmetic",
  "countdown",
  "cryptarithm",
  "decimal_arithmetic",
  "fraction_simplification",
  "game_of_life",
  "game_of_life_halting",
  "gsm_symbolic",
  "intermediate_integration",
  "kakurasu",
  "knights_knaves",
  "n_queens",
  "number_format",
  "polynomial_equations",
  "polynomial_multiplication",
  "pool_matrix",
  "prime_factorization",
  "propositional_logic",
  "puzzle24",
  "quantum_lock",
  "simple_integration",
  "sokoban",
  "spiral_matrix",
  "string_insertion",
  "survo",
  "time_intervals",
  "tower_of_hanoi",
  "word_sorting",
)


def items(name, count):
  dataset = reasoning.create_dataset(name, {}, seed=4, size=count)
  for i in range(count):
    yield {**dataset[i], "dataset": name, "params": {}}


def check(name, count):
  for item in items(name, count):
    if item["answer"] is not None:
      assert reasoning.score_answer(item, item["answer"]) == 1.0
    near = odd_answers.beside(name, item["answer"] or "")
    for odd in *odd_answers.ODD, *near:
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.nightly
def test_every_dataset_takes_its_own_answers_for_right():
  for name in sorted(set(reasoning.datasets()) - {"composite"}):
    for item in items(name, 20):
      if (right := item["answer"]) is not None:
        assert reasoning.score_answer(item, right) == 1.0, (name, right)
        # What is said of its own text says nothing of the guards.
        assert reasoning.guards.is_one_value(right, item), (name, right)


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
  "polynomial_equations": lambda right: [
    f"{right}, 7 or 8",
    f"not known, {right}",
  ],
  "number_sorting": lambda right: [re.sub(r"(\d+)\.(\d)", r"\1.\g<2>5", right)],
  "spell_backward": lambda right: [f"{right}x", f"{right} or not"],
}


@pytest.mark.parametrize("name", BESIDE_IT)
def test_what_is_beside_the_right_answer_is_wrong(name):
  for item in items(name, 12):
    right = item["answer"]
    assert reasoning.score_answer(item, right) == 1.0
    for answer in BESIDE_IT[name](right):
      if right and answer != right:
        assert reasoning.score_answer(item, answer) < 0.9, (right, answer)
  if name == "number_sorting":
    numbers = ast.literal_eval(right)
    for written in (json.dumps(numbers), f"[{', '.join(numbers)}]"):
      assert reasoning.score_answer(item, written) == 1.0


def test_surplus_moves_are_right_where_the_question_asks_for_any_solution():
  for name, of_surplus in (("sokoban", 1.0), ("quantum_lock", 0.5)):
    scores = {
      reasoning.score_answer(item, surplus + item["answer"])
      for item in items(name, 4)
      for surplus in (("LR", "UD") if name == "sokoban" else ("A → ", "B → "))
    }
    assert of_surplus in scores <= {0.0, of_surplus}
  # No part of it is a move of a longer sequence.
  for item in items("quantum_lock", 4):
    said = f"{item['answer']} or A → B"
    assert reasoning.score_answer(item, said) == 0.0


# Another spelling of the right answer, by an item's own one.
ALSO_RIGHT = {
  "advanced_geometry": lambda right: [
    right.replace("°", ""),
    right.strip("()"),
  ],
  "coin_flip": lambda right: [str(fractions.Fraction(right)), f"0{right}"],
  "cryptarithm": lambda right: [right.replace(",", ", ").replace("=", " = ")],
  "decimal_arithmetic": lambda right: [f"{right}0"],
  "fraction_simplification": lambda right: [
    "{}/{}".format(*re.findall(r"\d+", right)),
    r"\frac{{{}}}{{{}}}".format(*re.findall(r"\d+", right)),
  ],
  "game_of_life": lambda right: [right.replace(",", ", ")],
  "gsm_symbolic": lambda right: [f"{int(right):,}", f"${right}", f"{right}.0"],
  "kakurasu": lambda right: [right.replace(" ", ""), right.replace(" ", ", ")],
  "knights_knaves": lambda right: [
    right.rstrip(".").replace(" an ", " a "),
    " and ".join(reversed(right.rstrip(".").split(", and "))),
  ],
  "number_format": lambda right: [
    f"{float(right):,.3f}",
    f"{float(right):.12e}",
  ],
  "pool_matrix": lambda right: [f"{right}\n"],
  "power_function": lambda right: [f"{float(right):.2e}"],
  "quantum_lock": lambda right: [
    right.replace("→", "->"),
    right.replace(" → ", ", "),
  ],
  "time_intervals": lambda right: [right.removesuffix(" days"), f" {right}"],
  "word_sorting": lambda right: [right.replace(", ", ",")],
}


@pytest.mark.parametrize("name", ALSO_RIGHT)
def test_other_spellings_that_the_question_allows_are_right(name):
  for item in items(name, 12):
    for answer in ALSO_RIGHT[name](item["answer"]):
      right = reasoning.score_answer(item, answer)
      assert right == 1.0, (item["answer"], answer)


def test_digits_that_are_written_are_compared():
  # The library sets a precision of 12 digits when it makes an item.
  exact = decimal.Context(prec=30)
  for name in ("coin_flip", "decimal_arithmetic"):
    for item in items(name, 40):
      right = decimal.Decimal(item["answer"])
      digits = -right.as_tuple().exponent
      if digits < 5 or right.adjusted() < -1 or digits + right.adjusted() > 8:
        continue  # it has been rounded itself, or cannot be to four decimals
      rounded = right.quantize(decimal.Decimal("0.0001"))
      assert reasoning.score_answer(item, str(rounded)) == 1.0
      for wrong in (
        exact.add(rounded, decimal.Decimal("0.0002")),
        exact.add(right, decimal.Decimal((0, (1,), -digits))),
        exact.add(right, decimal.Decimal((0, (3,), -digits - 1))),
      ):
        assert reasoning.score_answer(item, str(wrong)) < 1.0, (right, wrong)


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
