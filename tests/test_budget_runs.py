"""Whole runs and evaluations with budgets: replayed, continued, measured."""

import json

import jax
from ml_collections import config_dict
import numpy as np
import polars
import pytest
import reward_scorers
import stored_run
import test_replay
import test_run

from jaxrl_async.config import sections
from jaxrl_async.evaluation import answer_results
from jaxrl_async.evaluation import evaluation
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import progress as progress_lib

pytestmark = pytest.mark.slow

ODD = {"scorer": reward_scorers.has_odd_length}
PARTS = {
  "advantage": "segment",
  "advantage_scale": sections.AdvantageScale.NONE,
}
ASKED = {"budgets": (2, 5, 9), "end": "a", "max_tokens": 3}


def with_budgets(config):
  config.task.episode = "budgets"
  config.task.episode_params = config_dict.ConfigDict(ASKED)
  return config


def test_a_run_with_budgets_is_replayed_to_the_bit(tmp_path):
  config = test_replay.make_config(4, algorithm={"max_staleness": 2, **PARTS})
  test_run.check_ledger(
    tmp_path, test_run.start(with_budgets(config), tmp_path, **ODD)
  )
  first, *steps = test_run.lines(tmp_path, "metrics")
  for values in steps:
    assert 1 < values["completion/branches_mean"] <= 4
    assert values["completion/tokens_mean"] <= 16
    assert values["reward/parts/budget/thought_tokens"] <= 16
    assert 0 < values["reward/parts/budget/2"] < 1
    assert values["policy/grad_norm"] > 0
  assert {f"eval/held_out/parts/budget/{x}" for x in (2, 5, 9)} <= first.keys()
  found = test_replay.play(tmp_path)
  assert found.last_step == 4 and found.has_state
  assert found.generated == test_replay.num_tokens(tmp_path, last=4) > 0
  step = test_replay.a_checkpoint_between(tmp_path, 1, 3)
  assert test_replay.play(tmp_path, from_step=step).has_state


@pytest.mark.nightly
def test_a_run_that_goes_on_is_the_same_as_one_without_a_stop(tmp_path):
  for name, counts in (("whole", [4]), ("parts", [2, 4])):
    for num_steps in counts:
      config = test_run.make_config(
        "sync",
        num_steps=num_steps,
        algorithm=PARTS,
        run={"exact_resume": True},
      )
      test_run.start(with_budgets(config), tmp_path / name, **ODD)
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  assert test_run.losses(whole)[:4] == test_run.losses(parts)[:4]
  made = [
    [test_run.content(x) | x["reward_parts"] for x in entries]
    for entries in (
      test_run.lines(whole, "ledger"),
      test_run.lines(parts, "ledger"),
    )
  ]
  assert made[0] == made[1] and "budget/5" in made[0][0]


def test_an_evaluation_has_the_curve_and_counts_completions_alone(tmp_path):
  stored_run.write(tmp_path / "run")
  rows = stored_run.random_rows(6)
  config = stored_run.config_for_rows()
  config.rollout.max_completion_tokens = 16
  config.task.reward = sections.TaskSection().reward
  config.task.rewards = config_dict.ConfigDict(
    {"right": {"function": "exact"}, "ended": {"function": "ended"}}
  )
  results = evaluation.evaluate(
    tmp_path / "run",
    5,
    config,
    evaluation.Wanted(
      dataset=stored_run.write_rows(tmp_path / "rows.jsonl", rows),
      samples=3,
      budgets={"budgets": (0, 2, 5), "end": "=", "max_tokens": 4},
    ),
    tmp_path / "out",
    jax.devices()[:2],
    progress=progress_lib.Progress(0),
    stop=supervisor_lib.StopRequest(),
  )
  found = polars.read_parquet(tmp_path / "out" / "completions" / "*.parquet")
  parts = [json.loads(x) for x in found["parts"]]
  lengths = found["num_tokens"].to_numpy()
  assert lengths.max() <= 16
  assert all(
    x["budget/thought_tokens"] <= n for x, n in zip(parts, lengths, strict=True)
  )
  values = results["results"]
  assert values["tokens_mean"]["mean"] == pytest.approx(lengths.mean())
  for name in ("budget/thought_tokens", "budget/thought_truncated"):
    mean = np.mean([x[name] for x in parts])
    assert values[name]["mean"] == pytest.approx(mean)
  right = [np.mean([x[f"budget/{b}"] >= 1 for x in parts]) for b in (0, 2, 5)]
  right.append(np.mean(found["score"].to_numpy() >= 1))
  assert results["curve"]["budgets"] == [0, 2, 5, 16]
  assert results["curve"]["accuracy"] == pytest.approx(right)
  # Both terms count in answers after cuts too.
  assert {"right", "ended"} <= parts[0].keys() and max(right[:3]) > 0
  assert "budget/2" in answer_results.describe(results)
