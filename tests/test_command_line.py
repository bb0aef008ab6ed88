"""launch/train.py with bad input: one line that names the field."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny.py"


def launch(*arguments):
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.run(
    [sys.executable, str(ROOT / "launch" / "train.py"), *arguments],
    capture_output=True,
    text=True,
    timeout=120,
    env=environment | {"JAX_PLATFORMS": "cpu"},
  )


def check(arguments, words):
  done = launch(*arguments)
  assert done.returncode not in (0, None)
  assert done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith("error: ")
  for word in words:
    assert word in line, line
  assert not pathlib.Path("/nowhere").exists()


def with_tiny(*arguments):
  return [f"--config={TINY}", "--workdir=/nowhere/to/be/written", *arguments]


def test_an_unknown_field_is_one_line(tmp_path):
  check(with_tiny("--config.train.num_stps=3"), ["num_stps"])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    (with_tiny("--config.train.num_steps=few"), ["train.num_steps"]),
    (with_tiny("--config.transfer.channel=carrier"), ["transfer.channel"]),
    (["--config=/no/such/file.py"], ["/no/such/file.py"]),
    ([f"--config={TINY}:fast"], ["variant", "fast"]),
    ([], ["config"]),
    ([f"--config={TINY}"], ["workdir"]),
    (with_tiny("stray"), ["stray"]),
    (
      with_tiny("--config.algorithm.max_staleness=-1"),
      ["algorithm.max_staleness", "negative"],
    ),
    (
      with_tiny("--config.algorithm.num_minibatches=3"),
      ["algorithm.num_minibatches", "16"],
    ),
    (with_tiny("--config.task.dataset=chain_some"), ["task.dataset"]),
    (
      with_tiny("--config.task.template={exprssion}"),
      ["task.template", "expression"],
    ),
    (
      with_tiny("--config.rollout.max_completion_tokens=99"),
      ["rollout.cache_tokens", "107"],
    ),
    (with_tiny("--config.mesh.train_data=4"), ["mesh", "there are 2"]),
    (with_tiny("--config.model.name=tinny"), ["model.name"]),
    (
      with_tiny("--dry_run", "--config.train.attention=flash"),
      ["train.attention", "flash", "blocks"],
    ),
    (
      with_tiny("--dry_run", "--config.rollout.attention=tpu_paged"),
      ["rollout.attention", "rollout.num_pages"],
    ),
    (with_tiny("--topology=v5e:2x4"), ["topology", "add --dry_run"]),
    (with_tiny("--compile"), ["compile", "add --dry_run"]),
    (
      with_tiny("--dry_run", "--topology=v5e:3x3"),
      ["topology", "v5e:3x3", "2x2, 2x4"],
    ),
  ],
)
def test_bad_input_is_one_line_that_names_the_field(arguments, words):
  check(arguments, words)


@pytest.mark.slow
def test_dry_run_prints_sizes_and_devices_and_writes_nothing(tmp_path):
  workdir = tmp_path / "run"
  done = launch(f"--config={TINY}", f"--workdir={workdir}", "--dry_run")
  assert done.returncode == 0, done.stderr
  assert "parameters" in done.stdout
  assert not workdir.exists()


@pytest.mark.slow
def test_what_a_dry_run_compiles_is_listed_by_slice():
  done = launch(f"--config={TINY}", "--dry_run", "--compile")
  assert done.returncode == 0, done.stderr
  for name in ("proximal", "update", "publish", "prefill", "decode"):
    assert f"\n  {name} " in done.stdout
  assert "training slice: " in done.stdout
