"""Rows of code as people and datasets write them."""

import importlib
import pathlib
import sys

import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.rewards import code

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
odd_code_rows = importlib.import_module("odd_code_rows")
code_rows = importlib.import_module("code_rows")

pytestmark = pytest.mark.sandbox


def score(item, text):
  said = types.Completion(
    text=text,
    turns=(),
    tokens=np.zeros((1,), np.int32),
    finish_reason=types.FinishReason.EOS,
  )
  return code.score(item, said).score


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
