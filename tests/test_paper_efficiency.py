"""The study of how long to think, of benchmarks/papers.py."""

import json

import numpy as np
import paper_efficiency
import paper_study
import pytest
import test_papers_benchmark as studies


def test_the_runs_of_efficiency_differ_in_the_reward_alone(tmp_path):
  launch, models = studies.Launches(), studies.Models()
  found = paper_efficiency.run(studies.a_study(tmp_path, launch, models))
  assert [row["reward"] for row in found["rows"]] == [
    *("sft", "outcome", "length_penalty", "fixed", "exponential", "uniform"),
    "oracle",
  ]
  only = {}
  for name in (row["reward"] for row in found["rows"][1:]):
    flags = launch.flags(name)
    assert flags.pop("config").endswith(f"configs/reasoning.py:{name}")
    assert flags["warm_start.checkpoint"].endswith("/sft/params")
    only[name] = {*flags.items()} - {("workdir", flags["workdir"])}
  same = set.intersection(*only.values())
  longest = "rollout.max_completion_tokens"
  assert {k: dict(v - same) for k, v in only.items()} == {
    **{name: {longest: "96"} for name in only},
    "fixed": {longest: "24"},
    # All that the curve tells is at 8, and then the first ones are taken.
    "oracle": {
      longest: "96",
      "task.episode_params.budgets": "(8, 24, 40, 56, 64)",
    },
  }
  # All answer alike, and there is no gap.
  for row in found["rows"]:
    assert row["reg"] == row["reg_grid"] == 0
    assert row["thought"] == 10
  of_l = {row["L"]: row for row in found["curves"]}
  assert list(of_l) == [*paper_efficiency._QUICK.grid, 96]
  assert of_l[0]["frontier"] == of_l[0]["sft"] == 0 < of_l[8]["oracle"]


def a_policy(curve, **values):
  """A policy with the curve of each question."""
  curve = np.array(curve, np.float64)
  row = {"sampled": float(curve[:, -1].mean()), "by_question": {}, **values}
  return paper_efficiency.Measured(row=row, curve=curve)


def test_the_frontier_of_a_pool_is_the_best_mean_at_each_budget():
  grid = (0, 4, 16)
  policies = {
    "early": a_policy([[0, 1, 0.5], [0, 0.5, 0.5]]),
    "late": a_policy([[0, 0, 1], [0, 0.5, 0.25]]),
  }
  best = paper_efficiency.best_of(policies)
  # The best policy at 16 is not the best in each question.
  assert best.tolist() == [[0, 1, 1], [0, 0.5, 0.25]]
  rows = paper_efficiency.gaps(grid, best, policies)
  # Trapezoids: early misses a half at 16, and has a quarter more in the second.
  regs = {k: x["by_question"]["reg"] for k, x in rows.items()}
  assert regs == {
    "early": pytest.approx([12 * 0.5 / 2 / 16, -12 * 0.25 / 2 / 16]),
    "late": pytest.approx([16 * 1 / 2 / 16, 0]),
  }
  for name, of_grid in (("early", 0.125), ("late", 0.5)):
    assert rows[name]["reg"] == pytest.approx(np.mean(regs[name]))
    assert rows[name]["reg_grid"] == pytest.approx(of_grid)
  assert policies["early"].row["by_question"] == {}


def test_curves_are_the_scores_after_cuts_and_those_of_the_whole():
  answers = [
    {"question": q, "score": whole, "parts": json.dumps({"budget/2": after_2})}
    for q, after_2, whole in ((0, 1, 1), (0, 0, 1), (1, 0.5, 0), (1, 0, None))
  ]
  found = paper_efficiency.curves_of(answers, (2,))
  assert found.tolist() == [[0.5, 1], [0, 0]]


def test_the_error_of_a_sum_over_budgets_is_the_mean_of_its_questions():
  grid = (*paper_efficiency.GRID, paper_efficiency.LONGEST)
  rng = np.random.default_rng(0)
  best = np.sort(rng.random((6, len(grid))), axis=1)
  rows = paper_efficiency.quadrature(grid, best)
  assert [row["budgets"] for row in rows] == [1, 2, 3, 5, 8]
  for row in rows:
    values = row["by_question"]
    error = np.mean(values["error"]) / np.mean(values["mean"])
    assert row["exponential"] == pytest.approx(error)
    assert row["uniform"] != row["oracle"]
  # Its weight at 0 is left out, which is worth nothing on this line.
  line = np.array(grid) / grid[-1]
  for row in paper_efficiency.quadrature(grid, line[None]):
    assert abs(row["exponential"]) < 1e-9 and abs(row["uniform"]) < 1e-9


_OF_EFFICIENCY = {
  "reg": {"outcome": 0.2, "fixed": 0.15, "exponential": 0.08, "uniform": 0.1},
  "sampled": {"outcome": 0.644, "fixed": 0.541, "exponential": 0.629},
  "thought": {"outcome": 50.0, "exponential": 30.0},
}


@pytest.mark.parametrize(
  ("column", "changes", "violated"),
  [
    ("reg", {}, []),
    ("reg", {"exponential": 0.11, "uniform": 0.12}, [0]),
    ("sampled", {"exponential": 0.62}, [1]),
    ("thought", {"exponential": 51.0}, [2]),
    ("reg", {"fixed": 0.07}, [3]),
    ("sampled", {"fixed": 0.63}, [3]),
    ("reg", {"uniform": 0.07}, [4]),
    ("error", {"exponential": 0.02}, [5]),
    ("error", {"exponential": -0.02}, [5]),
  ],
)
def test_a_claim_about_efficiency_holds_as_long_as_it_is_true(
  column, changes, violated
):
  means = _OF_EFFICIENCY | {"error": {"exponential": 0.004}}
  means[column] = means[column] | changes
  rows = [
    {
      "reward": name,
      **{c: found.get(name, 0.0) for c, found in means.items()},
      "by_question": {
        c: studies.values(found.get(name, 0.0)) for c, found in means.items()
      },
    }
    for name in ("sft", *paper_efficiency.METHODS)
  ]
  error = means["error"]["exponential"]
  quadratures = [
    {
      "budgets": count,
      "exponential": error,
      "by_question": {"error": [0.5 * error] * 400, "mean": [0.5] * 400},
    }
    for count in paper_efficiency.COUNTS
  ]
  claims = paper_efficiency.claims(rows, quadratures)
  assert len(claims) == 6
  for number, claim in enumerate(claims):
    is_violated = number in violated
    expected = paper_study.FAILS if is_violated else paper_study.HOLDS
    assert claim["verdict"] == expected, claim
