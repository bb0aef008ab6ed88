"""The timing record of a run, written and read step by step."""

import contextlib
import dataclasses
import json
import math
import pathlib
import runpy

import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.control import settings as settings_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import replay_settings
from jaxrl_async.replay import timing_record
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"


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


def opened(workdir, num_bytes=0, **settings):
  """A timing record that is open for writing."""
  return timing_record.TimingRecord(
    workdir,
    num_bytes,
    **{
      "record_steps": True,
      "first_step": 0,
      "environment": {"jax": "1"},
      "config": {},
      **settings,
    },
  )


def config_of(path):
  return runpy.run_path(str(path))["get_config"]()


@pytest.fixture
def workdir(tmp_path):
  """The timing record of three train steps in two starts."""
  steps = [[group(0, [0])], [group(2, [1]), group(1, [0, 1])], [group(3, [2])]]
  num_bytes = 0
  for first, part in ((0, steps[:2]), (2, steps[2:])):
    schedule = opened(tmp_path, num_bytes, first_step=first)
    for step, groups in enumerate(part, first):
      schedule.add_step(step, groups, SUMS)
    num_bytes = schedule.num_bytes()
    schedule.close()
  return tmp_path


def test_a_step_was_made_by_the_last_start_before_it(workdir):
  first, second = recorded_timing.read(workdir).starts
  with open(workdir / "timing.jsonl", "ab") as file:
    file.write(b'{"start":3,"format":4,"env')  # killed meanwhile
  found = [recorded_timing.start_of(workdir, step) for step in (0, 1, 2, 9)]
  assert found == [first, first, second, second]


def test_steps_are_read_one_at_a_time(workdir):
  recorded = recorded_timing.read(workdir)
  assert [start.step for start in recorded.starts] == [0, 2]
  assert recorded.num_steps == 3
  assert [s.first_version for s in recorded.summaries.values()] == [0, 0, 2]
  ids = [s.prompt_ids for s in recorded.summaries.values()]
  assert ids[1:] == [("sums/train/2", "sums/train/1"), ("sums/train/3",)]
  for number in (2, 0, 1):
    step = recorded.step(number)
    assert step.step == number
    assert [g.prompt_id for g in step.groups] == list(ids[number])
  (trajectory,) = recorded.step(1).groups[1].trajectories
  found = group(1, [0, 1]).trajectories[0]
  assert trajectory.cache_builds == found.cache_builds
  assert trajectory.digest == timing_record.digest(found)


def test_a_line_that_was_being_written_is_left_out(workdir):
  path = workdir / "timing.jsonl"
  whole = path.read_bytes()
  path.write_bytes(whole[:-5])
  assert recorded_timing.read(workdir).num_steps == 2
  path.write_bytes(whole + b'{"step":4,"groups":{},"sums":{}}\n')
  with pytest.raises(recorded_timing.TimingError, match="no line of .* 3"):
    recorded_timing.read(workdir)
  path.write_bytes(whole + b"[1]\n")
  with pytest.raises(recorded_timing.TimingError, match="line 6 is not of"):
    recorded_timing.read(workdir)


def test_a_file_that_changes_meanwhile_is_an_error(workdir):
  recorded = recorded_timing.read(workdir)
  path = workdir / "timing.jsonl"
  path.write_bytes(b" " + path.read_bytes())
  with pytest.raises(recorded_timing.TimingError, match="has changed"):
    recorded.step(1)


def test_sums_that_are_not_finite_are_told_apart(workdir):
  found = recorded_timing.read(workdir).step(0).sums
  assert found == timing_record.plain_sums(SUMS)
  for name, others in {
    "loss": [[0.1, math.inf], [0.1, 0.2], [0.1], [math.nan, 0.1]],
    "norm": [[math.inf, math.inf], [math.nan, -math.inf]],
    "zero": [[0.0]],
  }.items():
    same = timing_record.plain_sums(SUMS)[name]
    assert recorded_timing.are_equal(same, found[name])
    for other in others:
      plain = timing_record.plain_sums({name: other})[name]
      assert not recorded_timing.are_equal(plain, found[name]), other
  assert not recorded_timing.are_equal(None, found["loss"])


def start_of(workdir):
  return recorded_timing.start_of(workdir, 0)


@pytest.mark.parametrize("more", [-1, 1])
def test_another_format_is_refused(workdir, more):
  path = workdir / "timing.jsonl"
  first, *rest = path.read_text().splitlines()
  number = timing_record.FORMAT + more
  other = json.dumps(json.loads(first) | {"format": number})
  path.write_text("\n".join([other, *rest]) + "\n")
  for read in (recorded_timing.read, start_of):
    with pytest.raises(recorded_timing.TimingError, match="another version"):
      read(workdir)


def whole_group(index, *, version, group_size):
  """A group whose rewards have all that a reward can have."""
  of_one = group(index, [version, version + 1])
  (one,) = of_one.trajectories
  reward = types.Reward(
    score=index / 7,
    parts={"right": 1.0},
    token_scores={1: 0.5},
    answer="the whole completion " * 2_000,
  )
  of_one.trajectories = [
    dataclasses.replace(
      one,
      member=member,
      reward=reward,
      writers=(("replica 0", 2),),
      finish_reason=types.FinishReason.LENGTH,
    )
    for member in range(group_size)
  ]
  return of_one


def test_what_is_trained_on_comes_back_and_answers_do_not(tmp_path):
  groups = [whole_group(i, version=0, group_size=3) for i in (5, 2)]
  groups.append(group(1, [0, 0]))
  (trajectory,) = groups[-1].trajectories
  trajectory.events = (
    types.Event("result", 0, 0, '{"found": "é"}'),
    types.Event("error", 1, 1, "timeout: search took longer than 10 s"),
    types.Event("reward", 0, -1, "0.5"),
  )
  with contextlib.closing(opened(tmp_path)) as schedule:
    schedule.add_step(0, groups, {})
  text = (tmp_path / "timing.jsonl").read_text()
  assert "whole completion" not in text and "replica" not in text
  found = recorded_timing.read(tmp_path).step(0)
  for one, recorded in zip(groups, found.groups, strict=True):
    assert recorded.admission == one.admission
    assert recorded.prompt_id == one.prompt.prompt_id
    for wanted, has in zip(
      one.trajectories, recorded.trajectories, strict=True
    ):
      reward = dataclasses.replace(wanted.reward, parts={}, answer=None)
      assert has == recorded_timing.RecordedTrajectory(
        member=wanted.member,
        num_tokens=len(wanted.tokens),
        finish_reason=wanted.finish_reason,
        cache_builds=wanted.cache_builds,
        reward=reward,
        events=tuple(e for e in wanted.events if e.kind != "reward"),
        digest=timing_record.digest(wanted),
      )


def test_a_step_of_a_large_config_is_a_megabyte_and_a_run_goes_on(tmp_path):
  section = config_of(CONFIGS / "deepseek_1p5b.py").algorithm
  groups = [
    whole_group(i, version=100, group_size=section.group_size)
    for i in range(100_000, 100_000 + section.groups_per_step)
  ]
  with contextlib.closing(opened(tmp_path)) as schedule:
    before = schedule.num_bytes()
    schedule.add_step(0, groups, SUMS)
    after = schedule.num_bytes()
    workdir_lib.check_lines(tmp_path / "timing.jsonl", after)
    assert after - before < 120 * 512 * 16
    again = opened(tmp_path, after, first_step=1)
    again.close()
  assert recorded_timing.read(tmp_path).num_steps == 1


def test_steps_are_recorded_by_the_starts_that_want_it(tmp_path):
  num_bytes = 0
  for first, records in enumerate((True, False, False, True)):
    schedule = opened(
      tmp_path, num_bytes, first_step=first, record_steps=records
    )
    schedule.add_step(first, [group(first, [first])], SUMS)
    num_bytes = schedule.num_bytes()
    schedule.add_step(first + 1, [group(first + 1, [first])], SUMS)  # cut off
    schedule.close()
  recorded = recorded_timing.read(tmp_path)
  assert [start.step for start in recorded.starts] == [0, 1, 2, 3]
  assert [*recorded.summaries] == [0, 3, 4]
  assert recorded.num_steps == 5 and recorded.step(3).groups[0].index == 3


@pytest.mark.parametrize(
  "path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem
)
def test_configs_of_large_batches_record_no_schedule(path):
  config = config_of(path)
  if isinstance(config, settings_lib.ControlConfig):
    return  # nothing of it is recorded
  section = config.algorithm
  is_large = section.groups_per_step * section.group_size > 1_000
  assert config.run.record_timing == (not is_large)


def test_a_replay_says_that_it_needs_the_record(tmp_path):
  config = config_json.to_stored(sections.Config())

  def add(num_bytes, first, *steps, records):
    schedule = opened(
      tmp_path, num_bytes, first_step=first, record_steps=records, config=config
    )
    for step in steps:
      schedule.add_step(step, [group(step, [step])], SUMS)
    found = schedule.num_bytes()
    schedule.close()
    return found

  def part(**wanted):
    found = recorded_timing.read(tmp_path)
    return replay_settings.part(found, replay_settings.Wanted(**wanted))[1]

  num_bytes = add(0, 0, 0, 1, records=False)
  with pytest.raises(
    sections.ConfigError, match="^workdir: .*has no train steps; .*run.record_t"
  ):
    part()
  num_bytes = add(num_bytes, 2, 2, 3, records=True)
  num_bytes = add(num_bytes, 4, 4, records=False)
  add(num_bytes, 5, 5, records=True)
  assert part(from_step=2, until=4) == 4 and part(from_step=5) == 6
  for wanted, missing in (({}, 0), ({"from_step": 2}, 4)):
    with pytest.raises(
      sections.ConfigError, match=f"train step {missing} .*run.record_timing"
    ):
      part(**wanted)


@pytest.mark.parametrize(
  ("name", "value"),
  [("kept_tokens", 64), ("kv_on_adopt", sections.KvOnAdopt.KEEP)],
)
def test_a_cache_of_which_the_record_does_not_tell_is_not_replayed(
  tmp_path, name, value
):
  config = sections.Config()
  setattr(config.rollout, name, value)
  schedule = opened(
    tmp_path,
    0,
    first_step=0,
    record_steps=True,
    config=config_json.to_stored(config),
  )
  schedule.add_step(0, [group(0, [0])], SUMS)
  schedule.close()
  recorded = recorded_timing.read(tmp_path)
  with pytest.raises(sections.ConfigError, match=f"^workdir: .*{name}.* is of"):
    replay_settings.part(recorded, replay_settings.Wanted())
