"""Whole runs are replayed from their schedules, bit for bit."""

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest
import test_run

from jaxrl_async.config import sections
from jaxrl_async.coordination import run_schedule
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import replay
from jaxrl_async.run import training_run

pytestmark = pytest.mark.slow

NUM_STEPS = 8


def make_config(**more):
  """A run whose every second step has a checkpoint, all of which are kept."""
  run = {
    "checkpoint_every": 2,
    "keep_checkpoints": 99,
    "exact_resume": True,
    "keep_trajectories": True,
  }
  # Few slots: generation is slow enough for trajectories of several versions.
  rollout = {"num_slots": 4, "decode_steps_per_call": 1}
  more: Any = {"algorithm": {"max_staleness": 4}, "rollout": rollout} | more
  return test_run.make_config(num_steps=NUM_STEPS, run=run, **more)


def two_turns(prompt):
  """An episode whose second turn depends on the first completion."""
  written = yield prompt.tokens
  yield np.append(written[-1:], prompt.tokens[:2]).astype(np.int32)


def play(workdir, episode=episode_lib.single_turn, **wanted):
  """Replays a run."""
  with progress_lib.Progress(0) as progress:
    return replay.replay(
      pathlib.Path(workdir),
      replay.Wanted(**wanted),
      jax.devices(),
      progress=progress,
      stop=supervisor_lib.StopRequest(),
      episode=episode,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  """An asynchronous run in which trajectories span versions."""
  workdir = tmp_path_factory.mktemp("recorded")
  test_run.start(make_config(), workdir)
  return workdir


def test_a_run_is_replayed_to_the_bit(recorded):
  found = play(recorded)
  assert found.last_step == NUM_STEPS
  ledger = test_run.lines(recorded, "ledger")
  trained = [x for x in ledger if x["fate"] == "trained"]
  assert found.trajectories == 4 * len(trained)
  assert found.tokens == sum(sum(x["num_completion_tokens"]) for x in trained)
  assert max(x["num_policy_versions"] for x in trained) > 1


@pytest.mark.parametrize("step", [2, 6])
def test_a_run_that_goes_on_from_a_checkpoint_repeats_the_bits(recorded, step):
  outstanding = json.loads(
    (recorded / "checkpoints" / str(step) / "groups.json").read_text()
  )
  half_written = [
    t
    for x in outstanding
    for t in (x["group"] or {"trajectories": []})["trajectories"]
    if t["finish_reason"] is None
  ]
  assert half_written
  found = play(recorded, from_step=step)
  assert (found.first_step, found.last_step) == (step, NUM_STEPS)


def test_training_on_the_stored_trajectories_has_the_same_losses(recorded):
  found = play(recorded, from_ledger=True, until=5)
  assert found.last_step == 5


def test_each_stored_token_is_the_one_that_its_number_draws(recorded, tmp_path):
  found = play(recorded, is_forced=True)
  assert found.forced.num_tokens == found.tokens > 500
  assert found.forced.num_at_boundary <= 2
  assert 0 < found.forced.largest_error < 2e-5
  workdir = tmp_path / "changed"
  shutil.copytree(recorded, workdir)
  stored = workdir / "trajectories" / "3" / "tokens.npy"
  tokens = np.load(stored)
  mask = np.load(stored.with_name("loss_mask.npy"))
  at = np.flatnonzero(mask)[20]
  tokens[at] = 6 + (tokens[at] + 1) % 10
  np.save(stored, tokens)
  with pytest.raises(replay.Difference, match="random number is .* outside"):
    play(workdir, is_forced=True)


def changed(recorded, tmp_path, change):
  """A copy of a run, with its schedule changed by a function of the lines."""
  workdir = tmp_path / "changed"
  shutil.copytree(recorded, workdir)
  path = workdir / "schedule.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  change(lines)
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return workdir


def test_the_first_difference_ends_the_replay(recorded, tmp_path):
  def of_a_loss(lines):
    lines[3]["sums"]["loss"][0] += 1e-9

  with pytest.raises(replay.Difference, match=r"^train step 2: loss was"):
    play(changed(recorded, tmp_path, of_a_loss))


def test_a_different_token_is_shown(recorded, tmp_path):
  def of_a_token(lines):
    lines[4]["groups"][1]["trajectories"][2]["digest"] = "0" * 24

  workdir = changed(recorded, tmp_path, of_a_token)
  index = run_schedule.read(workdir).steps[3].groups[1].admission.index
  stored = workdir / "trajectories" / "3" / "tokens.npy"
  tokens = np.load(stored)
  before = sum(
    t.num_tokens
    for t in run_schedule.read(workdir).steps[3].groups[0].trajectories
  ) + sum(
    t.num_tokens
    for t in run_schedule.read(workdir).steps[3].groups[1].trajectories[:2]
  )
  tokens[before + 6] += 1
  np.save(stored, tokens)
  with pytest.raises(
    replay.Difference,
    match=rf"train step 3, group {index}, member 2: tokens\[6\] was",
  ):
    play(workdir, until=4)


def test_a_killed_run_and_what_followed_are_replayed(
  recorded, tmp_path, capsys
):
  workdir = tmp_path / "killed"
  shutil.copytree(recorded, workdir)
  # The run ended after step 6, and was writing the line of another one.
  for name in ("7", "8"):
    shutil.rmtree(workdir / "checkpoints" / name, ignore_errors=True)
  with open(workdir / "schedule.jsonl", "a") as file:
    file.write('{"step": 8, "gro')
  test_run.start(make_config(), workdir)
  starts = run_schedule.read(workdir).starts
  assert [start.step for start in starts] == [0, 6]
  # As if the second start had had other flags of XLA.
  path = workdir / "schedule.jsonl"
  first, rest = path.read_text().split('"start": 6', 1)
  rest = rest.replace('"xla_flags": "', '"xla_flags": "--other', 1)
  path.write_text(f'{first}"start": 6{rest}')
  capsys.readouterr()
  assert play(workdir).last_step == NUM_STEPS
  said = capsys.readouterr().err
  assert "bits may differ from step 6: xla_flags was '--other" in said
  assert "bits may differ from step 0" not in said


def test_a_change_of_settings_ends_what_can_be_replayed(recorded, tmp_path):
  workdir = tmp_path / "other"
  shutil.copytree(recorded, workdir)
  shutil.rmtree(workdir / "checkpoints" / "8")
  config = make_config(algorithm={"clip_low": 0.1})
  test_run.start(config, workdir)
  with pytest.raises(sections.ConfigError, match=r"step 6 .*clip_low.*until=6"):
    play(workdir)
  assert play(workdir, until=6).last_step == 6
  assert play(workdir, from_step=6).last_step == NUM_STEPS


def test_turns_and_preemptions_are_replayed(tmp_path):
  pages = {"num_pages": 10, "page_tokens": 4, "prefill_chunk": 8}
  sizes = {"num_slots": 4, "decode_steps_per_call": 2, **pages}
  config = make_config(rollout=sizes)
  test_run.start(config, tmp_path, episode=two_turns)
  steps = test_run.lines(tmp_path, "metrics")[1:]
  assert sum(step["rollout/preemptions"] for step in steps) > 0
  found = play(tmp_path, two_turns)
  assert found.last_step == NUM_STEPS
  assert play(tmp_path, two_turns, from_step=4).first_step == 4
  # Without the second turn, the first group that has one is different.
  with pytest.raises(replay.Difference, match="train step 0, .* it had"):
    play(tmp_path)


def test_without_exact_resume_a_checkpoint_is_no_beginning(tmp_path):
  config = make_config()
  config.run = dataclasses.replace(config.run, exact_resume=False)
  training_run.run(config, tmp_path, scorer=test_run.reward_scorers.length)
  assert play(tmp_path).last_step == NUM_STEPS
  with pytest.raises(sections.ConfigError, match="exact_resume"):
    play(tmp_path, from_step=4)
