"""Whole runs are replayed from their timing records, bit for bit."""

import copy
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import environment_calls as called
import jax
from jax import numpy as jnp
import numpy as np
import pytest
import reward_scorers
import test_run

from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import regeneration
from jaxrl_async.replay import replay as replay_lib
from jaxrl_async.replay import timing_record
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import train as train_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.training import trainer as trainer_lib

pytestmark = pytest.mark.slow

NUM_STEPS = 8
DIFFERENCE = replay_lib.Difference
SCORER = reward_scorers.raises_on_some


def make_config(num_steps=NUM_STEPS, **more):
  """A run whose every second step has a checkpoint, all of which are kept."""
  run = {
    "checkpoint_every": 2,
    "keep_checkpoints": 99,
    "exact_resume": True,
  }
  # Few slots: generation is slow enough for trajectories of several versions.
  rollout = {"num_slots": 4, "decode_steps_per_call": 1}
  more: Any = {"algorithm": {"max_staleness": 4}, "rollout": rollout} | more
  return test_run.make_config(num_steps=num_steps, run=run, **more)


def two_turns(prompt):
  """An episode whose second turn depends on the first completion."""
  written = yield prompt.tokens
  yield np.append(written[-1:], prompt.tokens[:2]).astype(np.int32)


def other_turns(prompt):
  """The same with another second turn."""
  yield prompt.tokens
  yield prompt.tokens[:1]


def play(workdir, episode=None, devices=None, **wanted):
  """Replays a run."""
  with progress_lib.Progress(0) as progress:
    return replay_lib.replay(
      pathlib.Path(workdir),
      replay_lib.Wanted(**wanted),
      jax.devices() if devices is None else devices,
      progress=progress,
      stop=supervisor_lib.StopRequest(),
      episode=episode,
    )


def num_tokens(workdir, first=0, last=NUM_STEPS):
  """The tokens that the policy wrote, of the groups of some train steps."""
  return sum(
    sum(line["num_completion_tokens"])
    for line in test_run.lines(workdir, "ledger")
    if line["fate"] == "trained" and first <= line["step"] < last
  )


def a_checkpoint_between(workdir, first, last):
  """A checkpoint may wait for the one before; this gives one there is."""
  steps = checkpoint.steps(workdir / "checkpoints")
  return next(step for step in steps if first <= step <= last)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
  """An asynchronous run, some of whose trajectories have no score."""
  workdir = tmp_path_factory.mktemp("recorded")
  test_run.start(make_config(), workdir, scorer=SCORER)
  return workdir


def test_a_run_is_replayed_to_the_bit(recorded, monkeypatch):
  class Watched(regeneration.Regeneration):
    now = most = 0

    def open(self, step):
      Watched.now += 1
      Watched.most = max(Watched.most, Watched.now)
      super().open(step)

    def close(self, step):
      Watched.now -= 1
      return super().close(step)

  monkeypatch.setattr(regeneration, "Regeneration", Watched)
  found = play(recorded)
  assert found.last_step == NUM_STEPS and found.has_state
  ledger = test_run.lines(recorded, "ledger")
  trained = [x for x in ledger if x["fate"] == "trained"]
  sizes = [len(x["rewards"]) for x in trained]
  assert found.trajectories == sum(sizes) and {3, 4} <= {*sizes}
  assert found.generated == num_tokens(recorded) > 500
  assert found.restored == 0
  assert found.record()["state_bit_exact"]
  assert max(x["num_policy_versions"] for x in trained) > 1
  # No more steps are open than versions are outstanding: a group of step s may
  # have been begun max_staleness steps before.
  longest = max(x["step"] - x["policy_version_min"] for x in trained)
  assert Watched.now == 0 and 1 <= Watched.most <= 1 + longest < NUM_STEPS


def test_the_schedule_has_the_version_and_the_admissions_of_each_call(recorded):
  calls: dict[int, list[int]] = {}  # versions of what they admitted
  schedule = recorded_timing.read(recorded)
  for step in map(schedule.step, schedule.summaries):
    for one in (t for group in step.groups for t in group.trajectories):
      for cache in one.cache_builds:
        calls.setdefault(cache.decode_step, []).append(cache.version)
  in_order = [calls[decode_step] for decode_step in sorted(calls)]
  # The first evaluation was decoded before.
  assert min(calls) > 0 and len(calls) > NUM_STEPS
  assert all(len(versions) <= 4 for versions in in_order)  # slots
  assert all(len(set(versions)) == 1 for versions in in_order)
  assert [v[0] for v in in_order] == sorted(v[0] for v in in_order)


@pytest.mark.parametrize("at", [(1, 3), (5, 7)])
def test_a_run_that_goes_on_from_a_checkpoint_repeats_the_bits(recorded, at):
  step = a_checkpoint_between(recorded, *at)
  begun = {
    (x.group.index, t.member): t
    for x in outstanding_lib.read(recorded / "checkpoints" / str(step))
    for t in x.group.trajectories
  }
  assert any(t.finish_reason is None for t in begun.values())
  schedule = recorded_timing.read(recorded)
  trained = {
    (group.index, t.member)
    for number in range(step, NUM_STEPS)
    for group in schedule.step(number).groups
    for t in group.trajectories
  }
  found = play(recorded, from_step=step)
  assert (found.first_step, found.last_step) == (step, NUM_STEPS)
  assert found.generated + found.restored == num_tokens(recorded, step)
  assert found.generated > 0
  assert found.restored == sum(
    t.num_completion_tokens for key, t in begun.items() if key in trained
  )


def test_what_the_last_update_makes_is_compared(recorded, monkeypatch):
  step = trainer_lib.Trainer.step

  def disturbed(self, number, batch):
    done = step(self, number, batch)
    if number == NUM_STEPS - 1:
      self.state = jax.tree.map(
        lambda x: jnp.nextafter(x, x + 1) if x.dtype == jnp.float32 else x,
        self.state,
      )
    return done

  monkeypatch.setattr(trainer_lib.Trainer, "step", disturbed)
  with pytest.raises(
    replay_lib.Difference, match="after step 8: models.policy"
  ):
    play(recorded)


def test_a_question_that_is_gone_ends_the_search(recorded, tmp_path):
  def renamed(lines):
    lines[2]["groups"]["prompt_id"][1] = "chain_sum/train/-1"

  workdir = changed(recorded, tmp_path, renamed)
  with pytest.raises(sections.ConfigError, match="chain_sum/train/-1 of group"):
    play(workdir)


def test_the_script_compares_and_says_so_in_json(recorded):
  done = subprocess.run(
    [
      sys.executable,
      str(test_run.ROOT / "launch" / "replay.py"),
      f"--workdir={recorded}",
      f"--compile_cache={jax.config.jax_compilation_cache_dir}",
      "--until=2",
    ],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])
  assert found["bit_exact"]
  assert found["generated"] == num_tokens(recorded, last=2)


def test_a_replay_begins_with_a_checkpoint_that_there_is(recorded):
  with pytest.raises(sections.ConfigError, match="^from_step: "):
    play(recorded, from_step=1)


def changed(recorded, tmp_path, change):
  """A copy of a run, with its record changed by a function of the lines."""
  workdir = tmp_path / "changed"
  shutil.copytree(recorded, workdir)
  path = workdir / "timing.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  change(lines)
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return workdir


def test_the_first_difference_ends_the_replay(recorded, tmp_path):
  def of_a_loss(lines):
    lines[3]["sums"]["loss"][0] += 1e-9

  with pytest.raises(DIFFERENCE, match=r"^train step 2: loss was"):
    play(changed(recorded, tmp_path, of_a_loss))


def test_a_different_trajectory_is_named(recorded, tmp_path):
  def of_a_token(lines):
    size = timing_record.DIGEST_LENGTH
    at = lines[4]["groups"]["num_trajectories"][0] * size
    digests = lines[4]["digests"]
    lines[4]["digests"] = f"{digests[:at]}{'0' * size}{digests[at + size :]}"

  workdir = changed(recorded, tmp_path, of_a_token)
  _, second, *_ = recorded_timing.read(workdir).step(3).groups
  member = second.trajectories[0].member
  where = f"step 3, group {second.index}, member {member}"
  with pytest.raises(DIFFERENCE, match=f"{where}: the digest is another one"):
    play(workdir, until=4)


def test_a_killed_run_and_what_followed_are_replayed(
  recorded, tmp_path, capsys
):
  workdir = tmp_path / "killed"
  shutil.copytree(recorded, workdir)
  # The run ended before step 7, and was writing the line of another one.
  for name in ("7", "8"):
    shutil.rmtree(workdir / "checkpoints" / name, ignore_errors=True)
  # A checkpoint that is due waits until the one before is written.
  last = max(int(path.name) for path in (workdir / "checkpoints").glob("[0-9]"))
  with open(workdir / "timing.jsonl", "a") as file:
    file.write('{"step": 8, "gro')
  test_run.start(make_config(), workdir, scorer=SCORER)
  starts = recorded_timing.read(workdir).starts
  assert [start.step for start in starts] == [0, last]
  # As if the second start had had other flags of XLA.
  path = workdir / "timing.jsonl"
  first, rest = path.read_text().split(f'"start":{last}', 1)
  rest = rest.replace('"xla_flags":"', '"xla_flags":"--other', 1)
  path.write_text(f'{first}"start":{last}{rest}')
  capsys.readouterr()
  assert play(workdir).last_step == NUM_STEPS
  said = capsys.readouterr().err
  assert f"bits may differ from step {last} on: xla_flags was '--other" in said
  assert "bits may differ from step 0" not in said


def test_a_run_without_the_record_goes_on_and_cannot_be_replayed(tmp_path):
  config = make_config(num_steps=2)
  config.run = sections.RunSection(record_timing=False, exact_resume=True)
  test_run.start(config, tmp_path)
  config.train = dataclasses.replace(config.train, num_steps=3)
  test_run.start(config, tmp_path)
  lines = test_run.lines(tmp_path, "timing")
  assert [line["start"] for line in lines] == [0, 2]
  for wanted in ({}, {"from_step": 2}):
    with pytest.raises(sections.ConfigError, match="run.record_timing$"):
      play(tmp_path, **wanted)


@pytest.mark.nightly
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


def test_other_questions_of_evaluations_end_what_can_be_generated(
  recorded, tmp_path
):
  def other_sets(lines):
    config = copy.deepcopy(lines[0]["config"])
    config["eval"]["sets"] = {"more": {"dataset": "jsonl:more.jsonl"}}
    (at,) = (i for i, line in enumerate(lines) if line.get("step") == 6)
    lines.insert(at, {**lines[0], "start": 6, "config": config})

  workdir = changed(recorded, tmp_path, other_sets)
  with pytest.raises(sections.ConfigError, match=r"step 6 .*eval\.sets.*un"):
    play(workdir)


def test_turns_and_preemptions_are_replayed(tmp_path):
  pages = {"num_pages": 10, "page_tokens": 4, "prefill_chunk": 8}
  sizes = {"num_slots": 4, "decode_steps_per_call": 2, **pages}
  algorithm = {"max_staleness": 4, "advantage": "segment"}
  config = make_config(rollout=sizes, algorithm=algorithm)
  test_run.start(config, tmp_path, scorer=SCORER, episode=two_turns)
  steps = test_run.lines(tmp_path, "metrics")[1:]
  assert sum(step["rollout/preemptions"] for step in steps) > 0
  found = play(tmp_path, two_turns)
  assert found.last_step == NUM_STEPS
  step = a_checkpoint_between(tmp_path, 3, 7)
  assert play(tmp_path, two_turns, from_step=step).first_step == step
  with pytest.raises(sections.ConfigError, match="^episode: .*:two_turns"):
    play(tmp_path)
  # Another second turn makes another group.
  with pytest.raises(DIFFERENCE, match=r"group \d+, member"):
    play(tmp_path, other_turns)


def test_a_replay_and_a_run_that_goes_on_make_no_recorded_call(tmp_path):
  path = tmp_path / "calls"

  async def episode(prompt, context):
    """The second turn depends on what a call returned first."""
    written = yield prompt.tokens
    name = f"{prompt.prompt_id} {context.member} {written.tolist()}"
    count = await context.call(called.note_there, str(path), name)
    context.reward(count % 2)
    yield np.append(written[-1:], count % 7 + 20).astype(np.int32)

  config = make_config()
  config.task.reward = "episode"
  workdir = tmp_path / "run"
  config.train.num_steps = 4
  train_lib.run(config, workdir, episode=episode)
  # What was called after the checkpoint is called again, since nothing else
  # would know of it.
  recorded = [
    f"{group.prompt.prompt_id} {trajectory.member} {written.tokens.tolist()}"
    for outstanding in outstanding_lib.read(workdir / "checkpoints" / "4")
    for group in [outstanding.group]
    for trajectory in group.trajectories
    if trajectory.events
    for written in [next(episode_lib.recorded_turns([trajectory])).completion]
  ]
  config.train.num_steps = NUM_STEPS
  train_lib.run(config, workdir, episode=episode)
  made = called.lines(path)
  assert recorded
  assert [made.count(name) for name in recorded] == [1] * len(recorded)
  assert play(workdir, episode).last_step == NUM_STEPS
  step = a_checkpoint_between(workdir, 3, 7)
  assert play(workdir, episode, from_step=step).first_step == step
  assert called.lines(path) == made
  scores = {
    reward
    for line in test_run.lines(workdir, "ledger")
    for reward in line["rewards"]
  }
  assert scores == {0.0, 1.0}


@pytest.mark.nightly
def test_without_exact_resume_a_checkpoint_is_no_beginning(tmp_path):
  config = make_config()
  config.run = dataclasses.replace(config.run, exact_resume=False)
  train_lib.run(config, tmp_path, scorer=test_run.reward_scorers.length)
  assert play(tmp_path).last_step == NUM_STEPS
  step = a_checkpoint_between(tmp_path, 3, 7)
  with pytest.raises(sections.ConfigError, match="exact_resume"):
    play(tmp_path, from_step=step)
  # A start of the run is one: it had nothing but its checkpoint.
  config.train = dataclasses.replace(config.train, num_steps=NUM_STEPS + 2)
  train_lib.run(config, tmp_path, scorer=test_run.reward_scorers.length)
  assert play(tmp_path, from_step=NUM_STEPS).last_step == NUM_STEPS + 2
