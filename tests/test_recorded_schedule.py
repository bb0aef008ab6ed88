"""The schedule of a run, written and read step by step."""

import json
import math

import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.coordination import recorded_schedule
from jaxrl_async.coordination import run_schedule


def group(index, versions):
  """A group of one trajectory that was begun with each of these versions."""
  n = len(versions)
  return types.RolloutGroup(
    admission=types.Admission(index=index, birth=min(versions), deadline=9),
    prompt=types.Prompt(
      prompt_id=f"sums/train/{index}", tokens=np.zeros(1, np.int32), item={}
    ),
    trajectories=[
      types.Trajectory(
        member=0,
        tokens=np.arange(n, dtype=np.int32),
        loss_mask=np.ones(n, bool),
        behavior_logprobs=np.zeros(n, np.float32),
        policy_versions=np.array(versions, np.int32),
        finish_reason=types.FinishReason.EOS,
        reward=types.Reward(score=1.0),
        cache_builds=tuple(
          types.CacheBuild(1 + i, 1, version, decode_step=4 * i)
          for i, version in enumerate(versions)
        ),
      )
    ],
  )


SUMS = {"loss": [0.1, math.nan], "norm": [math.inf, -math.inf], "zero": [-0.0]}


@pytest.fixture
def workdir(tmp_path):
  """The schedule of three train steps in two starts."""
  steps = [[group(0, [0])], [group(2, [1]), group(1, [0, 1])], [group(3, [2])]]
  num_bytes = 0
  for first, part in ((0, steps[:2]), (2, steps[2:])):
    schedule = run_schedule.Schedule(
      tmp_path,
      num_bytes,
      keep_trajectories=False,
      first_step=first,
      environment={"jax": "1"},
      config={},
    )
    for step, groups in enumerate(part, first):
      schedule.add_step(step, groups, SUMS)
    num_bytes = schedule.num_bytes()
    schedule.close()
  return tmp_path


def test_a_step_was_made_by_the_last_start_before_it(workdir):
  first, second = recorded_schedule.read(workdir).starts
  with open(workdir / "schedule.jsonl", "ab") as file:
    file.write(b'{"format": 2, "start": 3, "env')  # killed meanwhile
  found = [recorded_schedule.start_of(workdir, step) for step in (0, 1, 2, 9)]
  assert found == [first, first, second, second]


def test_steps_are_read_one_at_a_time(workdir):
  recorded = recorded_schedule.read(workdir)
  assert [start.step for start in recorded.starts] == [0, 2]
  assert recorded.num_steps == 3
  assert [s.first_version for s in recorded.summaries] == [0, 0, 2]
  ids = [s.prompt_ids for s in recorded.summaries]
  assert ids[1:] == [("sums/train/2", "sums/train/1"), ("sums/train/3",)]
  for number in (2, 0, 1):
    step = recorded.step(number)
    assert step.step == number
    assert [g.prompt_id for g in step.groups] == list(ids[number])
  (trajectory,) = recorded.step(1).groups[1].trajectories
  found = group(1, [0, 1]).trajectories[0]
  assert trajectory.cache_builds == found.cache_builds
  assert trajectory.digest == run_schedule.digest(found)


def test_caches_of_an_older_format_have_no_decode_step(workdir):
  path = workdir / "schedule.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  for line in lines:
    if "format" in line:
      line["format"] = 2
    for one in line.get("groups", ()):
      for trajectory in one["trajectories"]:
        trajectory["cache_builds"] = [x[:3] for x in trajectory["cache_builds"]]
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  (trajectory,) = recorded_schedule.read(workdir).step(1).groups[1].trajectories
  assert trajectory.cache_builds == ((1, 1, 0, -1), (2, 1, 1, -1))


def test_a_line_that_was_being_written_is_left_out(workdir):
  path = workdir / "schedule.jsonl"
  whole = path.read_bytes()
  path.write_bytes(whole[:-5])
  assert recorded_schedule.read(workdir).num_steps == 2
  path.write_bytes(whole + b'{"step": 4, "groups": [], "sums": {}}\n')
  with pytest.raises(recorded_schedule.ScheduleError, match="no line of .* 3"):
    recorded_schedule.read(workdir)
  path.write_bytes(whole + b"[1]\n")
  with pytest.raises(recorded_schedule.ScheduleError, match="line 6 is not of"):
    recorded_schedule.read(workdir)


def test_a_file_that_changes_meanwhile_is_an_error(workdir):
  recorded = recorded_schedule.read(workdir)
  path = workdir / "schedule.jsonl"
  path.write_bytes(b" " + path.read_bytes())
  with pytest.raises(recorded_schedule.ScheduleError, match="has changed"):
    recorded.step(1)


def test_sums_that_are_not_finite_are_told_apart(workdir):
  found = recorded_schedule.read(workdir).step(0).sums
  assert found == run_schedule.plain_sums(SUMS)
  for name, others in {
    "loss": [[0.1, math.inf], [0.1, 0.2], [0.1], [math.nan, 0.1]],
    "norm": [[math.inf, math.inf], [math.nan, -math.inf]],
    "zero": [[0.0]],
  }.items():
    same = run_schedule.plain_sums(SUMS)[name]
    assert recorded_schedule.are_equal(same, found[name])
    for other in others:
      plain = run_schedule.plain_sums({name: other})[name]
      assert not recorded_schedule.are_equal(plain, found[name]), other
  assert not recorded_schedule.are_equal(None, found["loss"])
  # In format 1 all of them were null.
  assert recorded_schedule.are_equal(["nan", 1.0], [None, 1.0])
  assert not recorded_schedule.are_equal([2.0, 1.0], [None, 1.0])


def test_a_newer_format_is_refused(workdir):
  path = workdir / "schedule.jsonl"
  first, *rest = path.read_text().splitlines()
  newer = json.dumps(json.loads(first) | {"format": run_schedule.FORMAT + 1})
  path.write_text("\n".join([newer, *rest]) + "\n")
  with pytest.raises(recorded_schedule.ScheduleError, match="newer version"):
    recorded_schedule.read(workdir)
