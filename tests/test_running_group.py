"""A group in progress: its trajectories, put together from reports."""

import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import running_group

PROMPT = np.array([7, 8, 9], np.int32)


def make_group():
  group = running_group.RunningGroup(
    admission=types.Admission(index=5, birth=0, deadline=1),
    prompt=types.Prompt(prompt_id="x", tokens=PROMPT, item={}),
    limit=100,
    times_s={},
  )
  first = episode_lib.First(PROMPT)
  for member in range(2):
    group.set(first.trajectory(member))
  return group


def piece(rng, replica, member, reason=None):
  count = int(rng.integers(0, 4))
  new = types.Trajectory(
    member=member,
    tokens=rng.integers(0, 99, count, np.int32),
    loss_mask=np.ones(count, bool),
    behavior_logprobs=rng.random(count, np.float32),
    policy_versions=rng.integers(0, 9, count, np.int32),
    finish_reason=reason,
  )
  return running_group.Piece(replica, new)


@pytest.mark.parametrize("num_pieces", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize("looks", [False, True])
def test_a_trajectory_is_all_that_was_reported_of_it(num_pieces, looks):
  rng = np.random.default_rng(num_pieces)
  group, tokens, versions, writers = make_group(), [7, 8, 9], [-1] * 3, []
  for i in range(num_pieces):
    is_last = i == num_pieces - 1
    one = piece(
      rng, "ab"[i // 4 % 2], 1, types.FinishReason.STOP if is_last else None
    )
    group.add(len(tokens), one)
    tokens += one.new.tokens.tolist()
    versions += one.new.policy_versions.tolist()
    writers += [one.replica] * len(one.new.tokens)
    if looks:
      assert group.trajectory(1).tokens.tolist() == tokens
    last = group.last_completion(1, 2)
    assert last.tokens.tolist() == tokens[3:] and last.num_cached == 2
  found = group.group().trajectories[1]
  assert found.tokens.tolist() == tokens
  assert found.policy_versions.tolist() == versions
  assert found.loss_mask.tolist() == [x >= 0 for x in versions]
  assert found.behavior_logprobs.dtype == np.float32
  assert found.finish_reason is types.FinishReason.STOP
  assert [name for name, n in found.writers for _ in range(n)] == writers
  names = [name for name, _ in found.writers]
  assert all(a != b for a, b in zip(names, names[1:], strict=False))
  assert group.trajectory(0).tokens.tolist() == [7, 8, 9]


def test_members_get_their_own_pieces():
  rng, group, written = np.random.default_rng(3), make_group(), {0: [], 1: []}
  for i in range(9):
    one = piece(rng, "a", i % 2)
    group.add(3 + len(written[i % 2]), one)
    written[i % 2] += one.new.tokens.tolist()
  for trajectory in group.group().trajectories:
    assert trajectory.tokens.tolist() == [7, 8, 9, *written[trajectory.member]]
    assert len(trajectory.policy_versions) == len(trajectory.tokens)
    assert trajectory.num_completion_tokens == len(written[trajectory.member])


def test_few_reports_are_kept_in_memory():
  rng, group = np.random.default_rng(0), make_group()
  for _ in range(100):
    known = sum(len(x.new.tokens) for x in group._pieces.get(0, ()))
    known += len(group._known[0].tokens)
    group.add(known, piece(rng, "a", 0))
    assert len(group._pieces.get(0, ())) < 8


def test_a_report_that_does_not_follow_the_one_before_is_an_error():
  rng, group = np.random.default_rng(1), make_group()
  one = piece(rng, "a", 0)
  assert len(one.new.tokens)
  group.add(3, one)
  with pytest.raises(ValueError, match="group 5, member 0 from token 3, but "):
    group.add(3, one)


def test_members_that_begin_alike_share_arrays_that_nothing_can_change():
  group = make_group()
  first, second = group.group().trajectories
  assert first.tokens is second.tokens and first.member != second.member
  with pytest.raises(ValueError, match="read-only"):
    first.tokens[0] = 1
  begins = episode_lib.First(PROMPT)
  assert begins.is_equal(PROMPT.astype(np.int64))
  assert not begins.is_equal(np.array([7, 8, 1]))


@pytest.mark.parametrize("mask", ["001", "0110", "00101", "01011", "0"])
def test_the_last_completion_is_what_follows_the_last_prompt(mask):
  is_written = np.array([x == "1" for x in mask])
  tokens = np.arange(len(mask), dtype=np.int32)
  trajectory = types.Trajectory(
    member=0,
    tokens=tokens,
    loss_mask=is_written,
    behavior_logprobs=np.zeros(len(mask), np.float32),
    policy_versions=tokens,
  )
  written = list(range(len(mask.rstrip("1")), len(mask)))
  assert episode_lib.last_completion(trajectory).tokens.tolist() == written
