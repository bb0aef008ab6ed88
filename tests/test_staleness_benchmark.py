"""The benchmark of staleness: its runs, its rows, and their arithmetic."""

import functools
import importlib
import itertools
import json
import math
import xml.etree.ElementTree

import launched_runs
import launching
import numpy as np
import pytest
import staleness_tables


def comparison(directory, table="staleness", **changes):
  settings = {
    "table": table,
    "task": "",
    "directory": directory / "runs",
    "seeds": (0, 1),
    "bounds": (0, 16),
    "rates": ("1e-4", "3e-4", "9e-4"),
  }
  return staleness_tables.Comparison(**(settings | changes))


def made(wanted, launch):
  launch_once = functools.partial(launching.launch_once, launch=launch)
  return staleness_tables.made(wanted, launch_once)


def by_objective(settings):
  """Accuracies: seeds differ, and the coupled objective loses by the bound."""
  bound = int(settings["algorithm.max_staleness"])
  is_coupled = settings.get("algorithm.loss") == "coupled_ppo"
  loss = bound / 100 * (2 if is_coupled else 1)
  return 0.5 + 0.1 * settings["seed"] - loss


def test_rows_have_the_names_of_the_setting_and_the_statistics_of_its_seeds(
  tmp_path,
):
  wanted = comparison(tmp_path)
  launch = launched_runs.Launches(by_objective)
  said = staleness_tables.said(wanted, made(wanted, launch))
  rows = said["table"]
  assert [(x["max_staleness"], x["objective"]) for x in rows] == [
    (bound, name) for bound in (0, 16) for name in ("decoupled", "coupled")
  ]
  last = rows[-1]
  assert last["seeds"] == pytest.approx([0.18, 0.28])
  for name, value in (
    ("eval_mean", 0.23),
    ("eval_std", 0.1 / math.sqrt(2)),
    ("difference_mean", -0.32),  # of the first row: staleness 0, decoupled
    ("difference_std", 0.0),
    ("greedy_mean", 0.33),
    ("realised_staleness", 14.4),
    ("clip_frac", 0.2),
    ("tokens_per_s", 100.0),  # 2 of 3 steps, in 25 - 5 s
    ("wall_s", 40.0),
  ):
    assert last[name] == pytest.approx(value, abs=1e-9), name
  assert json.loads(json.dumps(said)) == said
  names = launching.markdown(rows).split("\n")[0]
  assert "| max_staleness | objective |" in names and "seeds" not in names


def test_one_seed_has_no_deviation(tmp_path):
  wanted = comparison(tmp_path, seeds=(3,), bounds=(2,))
  runs = made(wanted, launched_runs.Launches())
  (row, _) = staleness_tables.said(wanted, runs)["table"]
  assert row["eval_std"] == row["difference_std"] == 0


def test_the_error_of_an_evaluation_is_that_of_a_bootstrap_of_questions():
  rng = np.random.default_rng(0)
  for k in (1, 2, 4):
    right = rng.binomial(k, rng.beta(1, 2, size=50))
    line = {
      f"eval/held_out/avg@{k}": right.mean() / k,
      # That of one question: one minus the share of pairs that are wrong.
      "eval/held_out/pass@2": np.mean(
        [1 - math.comb(k - c, 2) / math.comb(k, 2) for c in right]
      )
      if k > 1
      else math.nan,
    }
    expected = (right / k).std(ddof=1) / math.sqrt(50)
    assert staleness_tables.evaluation_error(line, 50) == pytest.approx(
      expected
    )


def test_the_error_of_a_mean_is_that_of_independent_seeds(tmp_path):
  wanted = comparison(tmp_path)
  runs = made(wanted, launched_runs.Launches())
  row = staleness_tables.said(wanted, runs)["table"][0]
  error = staleness_tables.evaluation_error(
    launched_runs.evaluated(3, 0.5), 101
  )
  assert row["eval_error"] == pytest.approx(error / math.sqrt(2))


def test_the_best_rate_of_each_objective_at_each_bound(tmp_path):
  def accuracy(settings):
    rate = float(settings["train.optimizer.learning_rate"])
    is_coupled = "algorithm.loss" in settings
    return 0.5 - abs(math.log(rate / (9e-4 if is_coupled else 3e-4))) / 10

  wanted = comparison(tmp_path, "rates")
  launch = launched_runs.Launches(accuracy)
  said = staleness_tables.said(wanted, made(wanted, launch))
  assert len(said["table"]) == 2 * 2 * 3
  found = {
    (x["max_staleness"], x["objective"]): (x["learning_rate"], x["is_at_end"])
    for x in said["best"]
  }
  assert found == {
    (bound, name): rate
    for bound in (0, 16)
    for name, rate in (
      ("decoupled", ("3e-4", False)),
      ("coupled", ("9e-4", True)),
    )
  }


def test_each_table_has_its_settings(tmp_path):
  fields = {
    table: [
      dict(x.fields) for x in comparison(tmp_path, table, bounds=(8,)).settings
    ]
    for table in staleness_tables.TABLES
  }
  bound = {"algorithm.max_staleness": 8}
  coupled = staleness_tables.OBJECTIVES["coupled"]
  assert fields["staleness"] == [bound, bound | coupled]
  assert [x["rollout.kv_on_adopt"] for x in fields["interruption"]] == [
    *("recompute", "keep", "wait")
  ]
  assert {x["eval.every"] for x in fields["interruption"]} == {0}
  assert fields["proximal"] == [
    bound | {"algorithm.proximal": name} for name in ("recompute", "loglinear")
  ]
  assert all("algorithm.num_minibatches" not in x for x in fields["proximal"])


def test_interruption_is_only_compared_where_there_is_some(tmp_path):
  wanted = comparison(tmp_path, "interruption", bounds=(8,))
  runs = made(wanted, launched_runs.Launches())
  assert staleness_tables.said(wanted, runs)["is_interrupted"] is False
  for run in runs[0]:
    run.summary["versions_per_trajectory_mean"] = 2.5
  assert staleness_tables.said(wanted, runs)["is_interrupted"] is True


def test_data_that_is_not_equally_old_is_told(tmp_path):
  wanted = comparison(tmp_path, "proximal", bounds=(2, 8))
  runs = made(wanted, launched_runs.Launches())
  # Settings of different bounds are not compared.
  assert staleness_tables.said(wanted, runs)["staleness_gap"] == 0
  runs[3][1].summary["staleness_mean"] = 5.0
  found = staleness_tables.said(wanted, runs)["staleness_gap"]
  assert found == pytest.approx(0.9 * 8 - 5)


def test_the_runs_of_a_seed_begin_alike_and_compile_for_themselves(tmp_path):
  wanted = comparison(
    tmp_path,
    task="sort",
    num_steps=7,
    further=("eval.num_items=64",),
  )
  launch = launched_runs.Launches(by_objective)
  made(wanted, launch)
  assert launch.made == [
    name
    for seed in (0, 1)
    for name in (
      f"warm_start_sort_{seed}",
      *(
        f"staleness_sort_{bound}_{objective}_{seed}"
        for bound, objective in itertools.product(
          (0, 16), ("decoupled", "coupled")
        )
      ),
    )
  ]
  runs = wanted.directory
  started = {
    name: json.loads((runs / f"{name}.json").read_text())
    for name in launch.made
  }
  script, *arguments = started["warm_start_sort_1"]
  assert script == "sft.py" and "--config.seed=1" in arguments
  assert "--config.eval.num_items=64" in arguments
  script, *arguments = started["staleness_sort_16_coupled_1"]
  assert script == "train.py"
  config = next(x for x in arguments if x.startswith("--config="))
  assert config.endswith("configs/staleness.py:sort")
  assert {
    f"--config.warm_start.checkpoint={runs}/warm_start_sort_1/params",
    f"--compile_cache={runs}/staleness_sort_16_coupled_1.compiled",
    "--config.eval.num_items=64",
    "--config.train.num_steps=7",
    "--config.algorithm.max_staleness=16",
    "--config.algorithm.loss=coupled_ppo",
  } <= set(arguments)


def test_a_command_goes_on_where_it_was_stopped(tmp_path, capsys):
  wanted = comparison(tmp_path)
  stopped = launched_runs.Launches(by_objective, fails_at=4)
  with pytest.raises(KeyboardInterrupt):
    made(wanted, stopped)
  assert launched_runs.minutes(capsys.readouterr().err) == (8, 8, 110, 15)
  again = launched_runs.Launches(by_objective)
  found = staleness_tables.said(wanted, made(wanted, again))
  # Three runs and a warm start are there; a run takes as long as they did.
  assert launched_runs.minutes(capsys.readouterr().err) == (5, 8, 40, 3)
  assert again.made[0] == "staleness_16_coupled_0"
  assert len(stopped.made) + len(again.made) == 10
  other = launched_runs.Launches(by_objective)
  assert staleness_tables.said(wanted, made(wanted, other)) == found
  assert not other.made


def test_a_result_is_never_that_of_other_settings(tmp_path):
  launch = launched_runs.Launches()
  made(comparison(tmp_path), launch)
  other = comparison(tmp_path, num_steps=9)
  with pytest.raises(SystemExit, match="other settings; use another dir"):
    made(other, launch)
  # Another table or task has runs of its own.
  for changes in ({"table": "rates"}, {"task": "sort"}):
    before = len(launch.made)
    made(comparison(tmp_path, **changes), launch)
    assert len(launch.made) > before


def test_curves_are_drawn_in_a_panel_for_each_bound(tmp_path):
  wanted = comparison(tmp_path)
  runs = made(wanted, launched_runs.Launches(by_objective))
  curves = np.array([[run.curve for run in own] for own in runs])
  assert curves.shape == (4, 2, 2, 2)
  names = [x.names for x in wanted.settings]
  for kept in (curves, curves[:, :1]):  # bands, and none with one seed
    staleness_tables.draw(str(tmp_path / "picture.svg"), names, kept)
    text = (tmp_path / "picture.svg").read_text()
    root = xml.etree.ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert all(f"max_staleness {bound}" in text for bound in (0, 16))


def test_every_task_is_a_variant_of_the_config():
  module = importlib.import_module("configs.staleness")
  assert tuple(staleness_tables.TASKS) == module.VARIANTS
