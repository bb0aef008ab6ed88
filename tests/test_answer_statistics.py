"""Statistics of repeated answers, against enumeration and known values."""

import itertools

import numpy as np
import pytest

from jaxrl_async.algorithms import answer_statistics
from jaxrl_async.evaluation import answer_results


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
  for c, k in itertools.product(range(n + 1), range(1, n + 1)):
    right = [i < c for i in range(n)]
    subsets = list(itertools.combinations(right, k))
    share = np.mean([any(subset) for subset in subsets])
    found = answer_statistics.pass_at_k(n, c, k)
    assert np.isclose(found, share), (n, c, k)
  assert np.isnan(answer_statistics.pass_at_k(n, 0, n + 1))


def test_pass_at_k_is_stable_for_many_answers():
  # 1 - C(4095, 2048) / C(4096, 2048) = 2048 / 4096
  assert np.isclose(answer_statistics.pass_at_k(4096, 1, 2048), 0.5)


def test_powers_of_two_end_with_the_number_itself():
  assert answer_statistics.powers_of_two(1) == [1]
  assert answer_statistics.powers_of_two(16) == [1, 2, 4, 8, 16]
  assert answer_statistics.powers_of_two(6) == [1, 2, 4, 6]


def test_the_majority_is_the_most_frequent_answer():
  majority = answer_statistics.majority
  assert majority(["4", "4", "5"], [True, True, False]) == 1.0
  assert majority(["5", "4", "5", None], [False, True, False, False]) == 0.0
  # A tie is the expectation of a draw among the winners.
  assert majority(list("45654"), [True, False, False, False, True]) == 0.5
  assert majority([None, None, "4"], [False, False, True]) == 1.0
  assert majority([None, None], [False, False]) == 0.0
  assert np.isnan(majority([], []))


def test_intervals_are_those_of_a_loop_and_cover_the_mean():
  rng = np.random.default_rng(3)
  values = rng.normal(size=(2, 40))
  values[1, ::4] = np.nan
  found = answer_statistics.bootstrap_intervals(values, seed=5)
  draws = np.random.default_rng(5)
  means = []
  for _ in range(2_000):
    drawn = draws.integers(40, size=40)
    means.append(np.nanmean(values[:, drawn], axis=1))
  expected = np.percentile(np.array(means), [2.5, 97.5], axis=0).T
  np.testing.assert_allclose(found, expected, rtol=1e-12)
  for row, (low, high) in zip(values, found, strict=True):
    mean = np.nanmean(row)
    error = np.nanstd(row) / np.sqrt((~np.isnan(row)).sum())
    assert low < mean < high
    assert np.isclose(high - low, 2 * 1.96 * error, rtol=0.15)
  again = answer_statistics.bootstrap_intervals(values, seed=5)
  np.testing.assert_array_equal(found, again)


def test_of_one_question_or_none_the_interval_is_a_point_or_unknown():
  values = np.array([[0.25], [np.nan]])
  found = answer_statistics.bootstrap_intervals(values, seed=0)
  assert found[0].tolist() == [0.25, 0.25] and np.isnan(found[1]).all()


def record(question, score, **more):
  return answer_results.Record(
    question=question,
    score=score,
    **({"num_tokens": 4, "is_truncated": False} | more),
  )


def test_answers_without_a_score_count_in_lengths_alone():
  values = answer_results.by_question(
    [
      record(0, 1.0, answer="4", num_tokens=8),
      record(0, None, answer="5", num_tokens=2, is_truncated=True),
      record(1, None),
      record(1, None),
    ],
    num_questions=2,
    samples=2,
    solved_score=1.0,
  )
  assert values["avg@2"][0] == values["pass@1"][0] == values["maj@2"][0] == 1
  assert np.isnan(values["pass@2"][0])
  assert values["tokens_mean"].tolist() == [5.0, 4.0]
  assert values["frac_truncated"].tolist() == [0.5, 0.0]
  for name in ("avg@2", "pass@1", "maj@2", "score_mean"):
    assert np.isnan(values[name][1])
  assert answer_results.means(values)["avg@2"] == 1.0
  results = answer_results.with_intervals(values, seed=0)
  assert results["avg@2"]["num_questions"] == 1
  assert results["pass@2"]["mean"] is None


def test_an_empty_answer_has_no_vote():
  values = answer_results.by_question(
    [
      record(0, 0.0, answer=""),
      record(0, 0.0, answer=""),
      record(0, 1.0, answer="4"),
    ],
    num_questions=1,
    samples=3,
    solved_score=1.0,
  )
  assert values["maj@3"].tolist() == [1.0]


def test_a_score_above_one_is_right_and_one_below_is_not():
  values = answer_results.by_question(
    [record(0, 1.05), record(1, 0.99)],
    num_questions=2,
    samples=1,
    solved_score=1.0,
  )
  assert values["avg@1"].tolist() == [1.0, 0.0]
  assert values["score_mean"].tolist() == [1.05, 0.99]


def test_categories_part_the_questions():
  values = {"avg@1": np.array([1.0, 0.0, 1.0, 1.0])}
  found = answer_results.by_category(values, ["b", "a", "a", "b"], seed=1)
  assert list(found) == ["a", "b"]
  assert found["a"]["avg@1"]["mean"] == 0.5
  assert found["b"]["avg@1"] == {
    "mean": 1.0,
    "low": 1.0,
    "high": 1.0,
    "num_questions": 2,
  }
  results = {
    "results": found["b"],
    "by_category": found,
    "samples": 1,
    "answers": 4,
    "failed_scores": 0,
    "prompts_too_long": 3,
  }
  first, table = answer_results.describe(results).split("\n\n")
  assert table.splitlines()[0].split() == ["questions", "avg@1"]
  assert table.splitlines()[2].split() == [
    "b",
    "2",
    "1.000",
    "[1.000,",
    "1.000]",
  ]
  (_, line) = first.splitlines()
  assert line.split() == ["avg@1", "1.000", "[1.000,", "1.000]", "2"]
