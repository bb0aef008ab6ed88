"""A run that is killed and resumed in a process with another hash seed."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import interrupted_run
import jax
import numpy as np
import pytest
import reward_scorers

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import outstanding as outstanding_lib

TIMEOUT_S = 300.0


def start(workdir, num_steps, hash_seed):
  return subprocess.Popen(
    [sys.executable, interrupted_run.__file__, str(workdir), str(num_steps)],
    env=os.environ | {"PYTHONHASHSEED": hash_seed},
    stdout=subprocess.DEVNULL,
  )


def summarized(workdir):
  """What launch/show.py makes of its metrics."""
  script = pathlib.Path(__file__).parents[1] / "launch" / "show.py"
  command = [sys.executable, script, f"--workdir={workdir}", "--summary"]
  ran = subprocess.run(command, capture_output=True, check=True)
  return json.loads(ran.stdout.splitlines()[-1])


def stored_groups(workdir):
  """Outstanding groups of the newest checkpoint, by index."""
  directory = workdir / "checkpoints"
  step = checkpoint.latest(directory)
  if step is None:
    return 0, {}
  groups = outstanding_lib.read(directory / str(step))
  return step, {g.group.index: g.group for g in groups}


def first_prompts(count):
  """What this process makes, by prompt id."""
  config = interrupted_run.get_config(1)
  source = assembly.prompt_source(setup_lib.resolve(config, jax.devices()))
  stream = prompts.PromptStream(source, source_lib.Split.TRAIN)
  with contextlib.closing(stream):
    found = [stream.next() for _ in range(count)]
  return {prompt.prompt_id: prompt for prompt in found}


@pytest.mark.slow
@pytest.mark.nightly  # test_questions.py compares questions
@pytest.mark.timeout(2 * TIMEOUT_S + 100)
def test_a_run_resumed_under_another_hash_seed_has_the_same_questions(tmp_path):
  killed = start(tmp_path, 5_000, "1")
  deadline = time.monotonic() + TIMEOUT_S
  try:
    while stored_groups(tmp_path)[0] < 2:  # polls what it writes
      assert killed.poll() is None and time.monotonic() < deadline
      time.sleep(0.05)
  finally:
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)
  step, before = stored_groups(tmp_path)
  held_out = (tmp_path / "held_out.json").read_bytes()
  died = summarized(tmp_path)
  assert died["train_steps"] >= step and died["eval_before"] is not None
  assert died["eval_after_greedy"] == died["eval_before_greedy"]
  resumed = start(tmp_path, step + 2, "2")
  try:
    assert resumed.wait(TIMEOUT_S) == 0
  finally:
    resumed.kill()
    resumed.wait(30)
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary["train_steps"] == step + 2
  assert summarized(tmp_path) == summary
  assert summary["eval_before"] == died["eval_before"]
  assert summary["warm_start_s"] == died["warm_start_s"] > 0
  assert summary["wall_s"] > summary["rl_s"] + summary["warm_start_s"]
  _, after = stored_groups(tmp_path)
  assert (tmp_path / "held_out.json").read_bytes() == held_out

  text = (tmp_path / "ledger.jsonl").read_text()
  ended = {
    entry["index"]: entry for entry in map(json.loads, text.splitlines())
  }
  made = first_prompts(max(ended | before | after) + 1)
  assert before
  for group in (*before.values(), *after.values()):
    prompt = made[group.prompt.prompt_id]
    assert group.prompt.item == prompt.item
    np.testing.assert_array_equal(group.prompt.tokens, prompt.tokens)
    for trajectory in group.trajectories:
      start_of_it = trajectory.tokens[: len(prompt.tokens)]
      np.testing.assert_array_equal(start_of_it, prompt.tokens)
  assert before.keys() & ended.keys(), "no group of the first process ended"
  for entry in ended.values():
    item = made[entry["prompt_id"]].item
    reward = reward_scorers.tells_questions_apart(item, None)
    assert entry["rewards"] == [reward] * 4
