"""Rows of code as people and datasets write them."""

import code_rows
import numpy as np
import odd_code_rows
import pytest

from jaxrl_async import types
from jaxrl_async.rewards import code
from jaxrl_async.rewards import sandbox as sandbox_lib

pytestmark = pytest.mark.sandbox


def score(item, text):
  said = types.Completion(
    text=text,
    turns=(),
    tokens=np.zeros((1,), np.int32),
    finish_reason=types.FinishReason.EOS,
  )
  return code.score(item, said).score


@pytest.mark.slow
@pytest.mark.parametrize(
  ("style", "item", "right", "wrong"), [*odd_code_rows.rows()]
)
def test_a_right_program_scores_1_and_a_wrong_one_0(style, item, right, wrong):
  assert score(item, right) == 1.0
  assert score(item, wrong) == 0.0


@pytest.mark.parametrize("metadata", code_rows.FAULTY)
def test_a_row_whose_tests_test_nothing_or_are_wrong_is_refused(metadata):
  with pytest.raises(ValueError):
    code.try_item({"question": "Add 1 to x.", "metadata": metadata})


@pytest.mark.parametrize(
  "tests",
  [
    "assert isclose(f(1), 2)",
    "assert f(1) == Counter(1)",
    "assert approx(f(1), 2)",
  ],
)
@pytest.mark.parametrize("entry_point", [None, "f"])
def test_a_program_cannot_define_what_tests_forgot_to_import(
  tests, entry_point
):
  forged = "".join(
    f"def {name}(*args): return 1\n"
    for name in ("isclose", "Counter", "approx", "f")
  )
  metadata = {"tests": tests, "entry_point": entry_point}
  item = {"question": "Compare f by isclose.", "metadata": metadata}
  with pytest.raises(sandbox_lib.TestsError, match="is not defined"):
    score(item, f"```\n{forged}```")


POINT = """
class Point:
  def __init__(self, x): self.x = x
  def is_same(self, other): return self.x == other.x
"""
SETS = "def f(p, x):\n  p.x = x\n"
AGREES = "class Agrees:\n  def __eq__(self, other): return True\n"


@pytest.mark.parametrize(
  ("program", "is_right"),
  [
    ("def f(x): return Point(x)", True),
    ("def f(x): return Point(2)", False),
    ("def f(x):\n  p = Point(2)\n  p.is_same = bool\n  return p", False),
    ("def f(x):\n  p = Point(2)\n  p.__class__ = int\n  return p", False),
    (f"{AGREES}def f(x): return Point(Agrees())", False),
    (f"{AGREES}Point = Agrees\ndef f(x): return Point()", False),
    ("class Point:\n  is_same = print\ndef f(x): return Point()", False),
    ("class Point:\n  __slots__ = ['x']\ndef f(x): return Point()", False),
  ],
)
def test_an_object_of_a_class_of_the_setup_is_compared_by_the_tests(
  program, is_right
):
  tests = "assert f(1).is_same(Point(1)) is True"
  metadata = {"tests": tests, "setup": POINT, "entry_point": "f"}
  item = {"question": "Write f.", "metadata": metadata}
  assert score(item, f"```\n{program}\n```") == is_right


@pytest.mark.parametrize(
  ("program", "is_right"),
  [
    (f"{SETS}  return p.plus(1)", True),
    ("def f(p, x):\n  p.plus = lambda y: 4\n  return p.plus(1)", False),
    (f"{SETS}  return p.plus.__globals__['EXPECTED']", False),
    (f"{SETS}  return p._expected", False),
    (f"{SETS}  return p.__class__.plus.__globals__['EXPECTED']", False),
    (f"{SETS}  return p.plus.__self__.x + 1", False),
  ],
)
def test_a_program_calls_methods_of_the_tests_and_sees_nothing_private(
  program, is_right
):
  tests = """
EXPECTED = 4
class P:
  x, _expected = 1, 4
  def plus(self, y): return self.x + y
p = P()
assert f(p, 3) == EXPECTED == p.plus(1)
"""
  item = {"question": "Write f.", "metadata": {"tests": tests}}
  assert score(item, f"```\n{program}\n```") == is_right


def test_without_an_entry_point_the_program_defines_what_the_tests_call():
  item = {"question": "Write it.", "metadata": {"tests": "assert f(1) == 2"}}
  for result, is_right in ("x + 1", True), ("x", False):
    program = f"```python\ndef f(x): return {result}\n```"
    said = f"{program}\nUse it:\n```python\nprint(f(1))\n```"
    assert score(item, said) == is_right


@pytest.mark.parametrize("indentation", ["", "    "])
def test_a_body_goes_on_with_or_without_the_indentation_of_the_question(
  indentation,
):
  task = {"tests": "assert S().f(1) == 2", "entry_point": "S().f"}
  begun = f"class S:\n  def f(self, x):\n{indentation}"
  item = {"question": begun, "metadata": task}
  body = "    y = x\n    return y + 1\n"
  for said in body, body.removeprefix(indentation):
    assert score(item, said) == 1.0
