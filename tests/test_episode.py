"""Episodes of several turns in a worker, failing ones and interrupted ones."""

import numpy as np
import pytest
import tiny
import worker_world

from jaxrl_async import types
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import episode as episode_lib

REPLY = np.array([50, 51], np.int32)


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


def same_writing(group, other):
  """The same tokens; logprobs but for the shape of the program."""
  for a, b in zip(group.trajectories, other.trajectories, strict=True):
    assert (a.member, a.finish_reason) == (b.member, b.finish_reason)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
    np.testing.assert_allclose(
      a.behavior_logprobs, b.behavior_logprobs, atol=1e-4
    )


def two_turns(prompt):
  completion = yield prompt.tokens
  yield np.concatenate([REPLY, completion[-1:] + 20])


def runs(mask):
  """Lengths of the runs of equal values, the first one False."""
  edges = np.flatnonzero(np.diff(mask.astype(int))) + 1
  return np.diff([0, *edges, len(mask)]).tolist()


def test_later_turns_are_appended_and_the_environments_tokens_masked(
  make_world,
):
  world = make_world(episode=two_turns, max_completion_tokens=24)
  world.run_until(worker_world.finished(3))
  num_turns = []
  for group in world.buffer.state().finished:
    for t in group.trajectories:
      lengths = runs(t.loss_mask)
      assert lengths[0] == len(group.prompt.tokens)
      num_turns.append(len(lengths) // 2)
      if len(lengths) == 4:
        first_end = lengths[0] + lengths[1]
        reply = t.tokens[first_end : first_end + lengths[2]]
        assert reply.tolist() == [50, 51, t.tokens[first_end - 1] + 20]
        assert t.tokens[first_end - 1] in tiny.END_TOKENS
      else:
        assert t.finish_reason == types.FinishReason.LENGTH
      assert (t.behavior_logprobs[~t.loss_mask] == 0).all()
      assert (t.policy_versions == np.where(t.loss_mask, 0, -1)).all()
      (expected,) = tiny.trainer_logprobs(tiny.params(), [t.tokens])
      np.testing.assert_allclose(
        t.behavior_logprobs[t.loss_mask], expected[t.loss_mask], atol=1e-4
      )
  assert set(num_turns) == {1, 2}
  shown = {item["number"]: made for item, made in world.rewards.submitted}
  for group in world.buffer.state().finished:
    for t, completion in zip(
      group.trajectories, shown[group.index], strict=True
    ):
      written = [turn.num_tokens for turn in completion.turns]
      assert written == runs(t.loss_mask)[1::2]
  worker_world.check_balance(world)


def test_an_episode_that_raises_fails_its_group_alone(make_world):
  def episode(prompt):
    yield prompt.tokens
    if len(prompt.tokens) == 4:  # every fourth prompt
      raise LookupError("no such page")

  world = make_world(episode=episode)
  world.run_until(worker_world.finished(4))
  (line, *_) = world.lines()
  assert line["index"] == 1
  assert line["reason"] == "episode: LookupError('no such page')"
  assert len(line["num_completion_tokens"]) == worker_world.GROUP_SIZE
  assert 1 not in {g.index for g in world.buffer.state().finished}
  worker_world.check_balance(world)


@pytest.mark.parametrize(
  ("first_turn", "words"),
  [
    ("raises", "LookupError('no such page')"),
    ("is missing", "returned before its first turn"),
    ("is empty", "without tokens"),
    ("is too long", "first turn of 32 tokens"),
  ],
)
def test_an_episode_that_fails_at_its_first_turn_fails_its_group_alone(
  make_world, first_turn, words
):
  calls = []

  def episode(prompt):
    calls.append(prompt)
    if prompt.item["number"] == 1 and len(calls) % 2 == 0:
      if first_turn == "raises":
        raise LookupError("no such page")
      if first_turn == "is missing":
        return
      if first_turn == "is empty":
        yield np.zeros(0, np.int32)
      yield np.full(tiny.SIZES.cache_tokens, 50, np.int32)
    yield prompt.tokens

  world = make_world(episode=episode)
  world.run_until(worker_world.finished(4))
  (line,) = world.lines()
  assert line["index"] == 1 and line["fate"] == "failed"
  assert line["reason"].startswith("episode: ") and words in line["reason"]
  assert 1 not in {g.index for g in world.buffer.state().finished}
  worker_world.check_balance(world)


def test_an_episode_that_yields_nothing_to_append_fails_its_group(make_world):
  def episode(prompt):
    yield prompt.tokens
    if prompt.item["number"] == 2:
      yield np.zeros(0, np.int32)

  world = make_world(episode=episode)
  world.run_until(worker_world.finished(4))
  (line,) = world.lines()
  assert line["index"] == 2
  assert line["reason"] == "episode: yielded a turn without tokens"
  worker_world.check_balance(world)


def test_episodes_that_never_begin_end_the_run_with_the_first_traceback(
  make_world,
):
  def episode(prompt):
    raise LookupError("no such page")
    yield prompt.tokens

  world = make_world(episode=episode)
  with pytest.raises(coordinator_lib.RewardError) as raised:
    world.run_until(lambda state: False)
  assert "Traceback" in str(raised.value)
  assert "no such page" in str(raised.value)


# -- going on --------------------------------------------------------------


def is_partial(world):
  groups = world.worker.groups().values()
  members = [t for g in groups for t in g.trajectories]
  return (
    any(t.finish_reason for t in members)
    and any(t.finish_reason is None and t.loss_mask.any() for t in members)
    and world.buffer.state().finished
  )


def two_short_turns(prompt):
  completion = yield episode_lib.Until(prompt.tokens, max_tokens=6)
  shown = np.concatenate([REPLY, completion[-1:]])
  yield episode_lib.Until(episode_lib.Anew(shown), max_tokens=7)


@pytest.mark.parametrize("episode", [None, two_turns, two_short_turns])
def test_partial_groups_are_taken_up_and_finish_as_if_never_interrupted(
  make_world, episode
):
  options = {}
  if episode is not None:
    options = {"max_completion_tokens": 24, "episode": episode}
  whole = make_world(**options)
  whole.run_until(worker_world.finished(4))
  expected = {g.index: g for g in whole.buffer.state().finished}

  first = make_world(**options)
  first.run_until(lambda state: is_partial(first))
  state, groups = first.buffer.state(), first.worker.groups()
  assert groups.keys() == {a.index for a in state.running}
  generated = first.scheduler.stats.generated_tokens

  second = make_world(
    prompts=tiny.Prompts(first.coordinator.stream.count), **options
  )
  second.buffer.restore(state)
  second.coordinator.restore([groups[a.index] for a in state.running])
  second.scheduler.stats.generated_tokens = generated
  second.run_until(worker_world.finished(4))
  continued = {g.index: g for g in second.buffer.state().finished}
  assert continued.keys() == expected.keys() == {0, 1, 2, 3}
  for index, group in continued.items():
    same_writing(group, expected[index])
    members = [branches[0] for branches in group.branches()]
    assert [t.score for t in members] == [0, 1, 2]
    if episode is two_short_turns:
      sizes = [t.num_completion_tokens for t in group.trajectories]
      assert max(sizes[::2]) <= 6 and max(sizes[1::2]) <= 7
      assert {6, 7}.intersection(sizes)
    assert group.prompt.prompt_id == f"tiny/train/{index}"
  worker_world.check_balance(second)


def test_a_turn_there_was_no_room_for_is_not_asked_for_again(make_world):
  def episode(prompt):
    while True:
      yield (prompt.tokens if prompt else REPLY)
      prompt = None

  options = {"episode": episode, "max_completion_tokens": 6}
  first = make_world(**options, rewards=tiny.Rewards(num_polls=10**6))
  first.run_until(lambda state: first.rewards.submitted)
  groups = first.worker.groups()
  state = first.buffer.state()
  assert any(
    all(t.finish_reason == "length" for t in g.trajectories)
    for g in groups.values()
  )
  second = make_world(prompts=tiny.Prompts(4), **options)
  second.buffer.restore(state)
  second.coordinator.restore([groups[a.index] for a in state.running])
  second.run_until(worker_world.finished(4))
  for group in second.buffer.state().finished:
    for t in group.trajectories:
      assert t.finish_reason == types.FinishReason.LENGTH


@pytest.mark.parametrize("change", ["raises", "says something else"])
def test_an_episode_that_cannot_be_taken_up_fails_its_group_alone(
  make_world, change
):
  options = {"max_completion_tokens": 24}
  first = make_world(episode=two_turns, **options)
  first.run_until(lambda state: is_partial(first))
  state, groups = first.buffer.state(), first.worker.groups()
  lost = max(groups)
  calls = []

  def changed(prompt):
    calls.append(prompt.prompt_id)
    if prompt.prompt_id == groups[lost].prompt.prompt_id and len(calls) > 1:
      if change == "raises":
        raise LookupError("no such page")
      yield prompt.tokens + 1
    yield from two_turns(prompt)

  second = make_world(
    prompts=tiny.Prompts(first.coordinator.stream.count),
    episode=changed,
    **options,
  )
  second.buffer.restore(state)
  second.coordinator.restore([groups[a.index] for a in state.running])
  second.scheduler.stats.generated_tokens = sum(
    t.num_completion_tokens
    for g in [*groups.values(), *state.finished]
    for t in g.trajectories
  )
  second.run_until(worker_world.finished(4))
  (line,) = second.lines()
  assert line["index"] == lost and line["fate"] == "failed"
  words = {"raises": "no such page", "says something else": "other prompts"}
  assert words[change] in line["reason"]
  assert line["num_completion_tokens"] == [
    t.num_completion_tokens for t in groups[lost].trajectories
  ]
  assert lost not in {g.index for g in second.buffer.state().finished}
  worker_world.check_balance(second)
