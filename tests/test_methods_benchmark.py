"""The benchmark of methods: its runs, its rows, and what is noise."""

import functools
import inspect
import json
import math
import zlib

import compared_methods
import launched_runs
import launching
import numpy as np
import pytest

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import algorithms
from jaxrl_async.config import sections


def comparison(directory, **changes):
  settings = {
    "directory": directory / "runs",
    "methods": ["areal", "grpo", "gspo_05", "two_epochs"],
    "seeds": (0, 1, 2),
    "num_steps": 3,
  }
  return compared_methods.Comparison(**(settings | changes))


def made(wanted, launch):
  launch_once = functools.partial(launching.launch_once, launch=launch)
  return compared_methods.made(wanted, launch_once)


def accuracy(settings):
  """GSPO is worse, every seed moves all methods, and there is some chance."""
  own = [f"{k}={v}" for k, v in settings.items() if k.startswith("algorithm.")]
  chance = zlib.crc32(f"{settings['seed']} {own}".encode()) % 100 / 1e4
  is_gspo = settings.get("algorithm.loss") == "gspo"
  return 0.5 + 0.1 * settings["seed"] - 0.3 * is_gspo + chance


def test_all_presets_and_all_variants_can_be_trained():
  presets = inspect.getmembers(algorithms)
  names = {name for name, x in presets if isinstance(x, functools.partial)}
  assert (
    names < compared_methods.METHODS.keys()
    and compared_methods.REFERENCE in names
  )
  found = [make() for make in compared_methods.METHODS.values()]
  for section in found:
    section.num_minibatches = 1  # reuse
    config_checks.check(sections.Config(algorithm=section))
  assert all(x != y for i, x in enumerate(found) for y in found[:i])


def test_rows_compare_with_the_reference(tmp_path):
  wanted = comparison(tmp_path)
  launch = launched_runs.Launches(accuracy)
  said = compared_methods.said(made(wanted, launch))
  rows = {x["method"]: x for x in said["table"]}
  assert [*rows] == wanted.methods
  assert rows["grpo"]["difference"] == 0 and rows["grpo"]["is_within_noise"]
  assert rows["gspo_05"]["difference"] == pytest.approx(-0.3, abs=0.01)
  assert not rows["gspo_05"]["is_within_noise"]
  assert rows["areal"]["is_within_noise"]
  assert len(rows["areal"]["seeds"]) == 3
  for name, value in (
    ("eval_before", 0.1),
    ("policy/clip_frac", 0.2),
    ("rl_s", 25.0),
  ):
    assert rows["areal"][name] == pytest.approx(value)
  assert rows["areal"]["greedy_after"] == pytest.approx(
    rows["areal"]["eval_after"] + 0.1
  )
  assert said["degrees_of_freedom"] == 3 * 2
  assert json.loads(json.dumps(said)) == said
  assert "| method | difference |" in launching.markdown(said["table"])


def test_what_moves_all_methods_alike_is_not_noise():
  seeds = np.array([0.1, 0.5, 0.9])
  error, freedom = compared_methods.noise(np.array([[0.2], [0.3]]) + seeds)
  assert error == pytest.approx(0, abs=1e-12) and freedom == 2


def test_the_noise_of_a_difference_has_that_of_both_methods():
  """In many experiments, against the deviation of the differences."""
  rng = np.random.default_rng(0)
  sigma, num_methods, num_seeds = 0.02, 5, 3
  squares, differences = [], []
  for _ in range(4_000):
    values = rng.normal(0, 1, (1, num_seeds)) + rng.normal(
      0, sigma, (num_methods, num_seeds)
    )
    error, _ = compared_methods.noise(values)
    squares.append(error**2)
    differences.append(values[1].mean() - values[0].mean())
  found = math.sqrt(np.mean(squares))
  assert found == pytest.approx(np.std(differences), rel=0.03)


def test_a_run_has_the_fields_of_its_method_and_further_ones(tmp_path):
  wanted = comparison(
    tmp_path, further=["algorithm.max_staleness=16"], seeds=(4, 5)
  )
  launch = launched_runs.Launches(accuracy)
  made(wanted, launch)
  assert launch.made == [
    name
    for seed in (4, 5)
    for name in (f"warm_start_{seed}", *(f"{x}_{seed}" for x in wanted.methods))
  ]
  runs = wanted.directory
  _, *arguments = json.loads((runs / "gspo_05_5.json").read_text())
  assert {
    "--config.algorithm.loss=gspo",
    "--config.algorithm.clip_high=0.05",
    "--config.algorithm.aggregation=sequence_mean",
    "--config.algorithm.max_staleness=16",
    "--config.train.num_steps=3",
    "--config.seed=5",
    f"--config.warm_start.checkpoint={runs}/warm_start_5/params",
    f"--compile_cache={runs}/gspo_05_5.compiled",
  } <= set(arguments)
  _, *arguments = json.loads((runs / "areal_5.json").read_text())
  own = [x for x in arguments if x.startswith("--config.algorithm.")]
  assert own == ["--config.algorithm.max_staleness=16"]
