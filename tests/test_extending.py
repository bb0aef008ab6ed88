"""The programs of docs/how-to/extending.md, run as they are printed there."""

import json
import os
import pathlib
import re
import subprocess
import sys

import printed_page
import pytest

from jaxrl_async.reporting import metrics as metrics_lib

ROOT = pathlib.Path(__file__).parents[1]
TIMEOUT_S = 600
PROGRAMS = printed_page.programs("how-to/extending.md")
# Metrics that the program's own part must have changed.
SEEN = {
  "my_loss": ("loss/weight", lambda x: 0.5 < x < 2.0),
  "my_reward": ("reward/parts/brevity", lambda x: 0.0 < x <= 1.0),
  "my_data": ("reward/mean", lambda x: 0.0 <= x <= 1.0),
  "my_environment": ("reward/mean", lambda x: 0.0 <= x <= 1.0),
  "my_tool": ("reward/mean", lambda x: 0.0 <= x <= 1.0),
}


def on_a_cpu():
  """The variables that the page sets."""
  text = (ROOT / "docs/how-to/extending.md").read_text()
  (line,) = re.findall(r"^    export (.*)$", text, re.MULTILINE)
  return dict(setting.split("=") for setting in line.split())


def lines_of_code(program):
  return [line for line in program.splitlines() if line.strip()]


def test_each_extension_has_a_short_program():
  assert PROGRAMS.keys() == SEEN.keys()
  for name, program in PROGRAMS.items():
    assert len(lines_of_code(program)) < 30, name


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
  "name",
  [
    name
    if name in ("my_environment", "my_tool")
    else pytest.param(name, marks=pytest.mark.nightly)
    for name in PROGRAMS
  ],
)
def test_a_program_runs_as_it_is_printed(name, tmp_path):
  script = tmp_path / f"{name}.py"
  script.write_text(PROGRAMS[name])
  workdir = tmp_path / "run"
  ran = subprocess.run(
    [sys.executable, str(script), str(workdir)],
    env={**os.environ, **on_a_cpu(), "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=TIMEOUT_S,
  )
  assert ran.returncode == 0, ran.stderr[-4000:]
  summary = json.loads(ran.stdout.splitlines()[-1])
  assert summary["train_steps"] == 4
  _, *steps = metrics_lib.by_step(workdir)
  metric, is_right = SEEN[name]
  assert all(is_right(step[metric]) for step in steps)
  ledger = (workdir / "ledger.jsonl").read_text().splitlines()
  groups = [json.loads(line) for line in ledger]
  if name == "my_data":
    assert all(group["prompt_id"].startswith("sums/train/") for group in groups)
