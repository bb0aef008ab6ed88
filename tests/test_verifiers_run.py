"""A run with an environment of verifiers is killed, continued and replayed."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest
import test_run
import waiting

from jaxrl_async.storage import checkpoint

HERE = pathlib.Path(__file__).parent
NUM_STEPS = 12
CACHE = f"--compile_cache={jax.config.jax_compilation_cache_dir}"


# Each of three processes imports verifiers and what that needs.
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_a_run_that_is_killed_goes_on_and_is_replayed(tmp_path):
  command = (
    sys.executable,
    str(HERE.parent / "launch" / "train.py"),
    f"--config={HERE / 'verifiers_run.py'}",
    f"--workdir={tmp_path}",
    CACHE,
  )
  with subprocess.Popen(
    command, cwd=HERE, start_new_session=True, stdout=subprocess.PIPE
  ) as run:
    # Any from step 4 on: a checkpoint that is due may wait for an earlier one.
    waiting.until(
      lambda: (
        (checkpoint.latest(tmp_path / "checkpoints") or 0) >= 4
        or run.poll() is not None
      ),
      timeout_s=1_000.0,
    )
    os.killpg(run.pid, signal.SIGKILL)
  assert run.returncode == -signal.SIGKILL
  ended = subprocess.run(
    command, cwd=HERE, stdout=subprocess.PIPE, text=True, check=True
  )
  summary = json.loads(ended.stdout.splitlines()[-1])
  entries = test_run.check_ledger(tmp_path, summary)
  assert {entry["fate"] for entry in entries} <= {"trained", "filtered"}
  steps = test_run.lines(tmp_path, "metrics")[1:]
  assert [step["step"] for step in steps] == [*range(1, NUM_STEPS + 1)]
  assert all(step["staleness/max"] <= 2 for step in steps)
  # Both sources have been asked, and parts are those of the environment.
  named = [step for step in steps if "reward/parts/is_short" in step]
  assert len(named) > NUM_STEPS // 2
  assert all("reward/parts/right" in step for step in named)
  assert {entry["prompt_id"].split("/")[0] for entry in entries} == {
    "tasks",
    "sums",
  }

  replayed = subprocess.run(
    [
      sys.executable,
      str(HERE.parent / "launch" / "replay.py"),
      f"--workdir={tmp_path}",
      CACHE,
    ],
    cwd=HERE,
    env=os.environ | {"NO_AGENTS": "1"},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  found = json.loads(replayed.stdout.splitlines()[-1])
  assert found["bit_exact"] and found["state_bit_exact"]
  assert found["last_step"] == NUM_STEPS and not found["restored"]
