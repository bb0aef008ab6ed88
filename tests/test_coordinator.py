"""The coordinator alone: replicas are what this file says they report."""

import time

import numpy as np
import pytest
import tiny
import worker_world

from jaxrl_async import types
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.types import FinishReason

REPLY = np.array([50, 51], np.int32)


@pytest.fixture
def make_world(tmp_path):
  for make in worker_world.worlds(tmp_path):

    def make_with_replicas(*arguments, make=make, **named):
      world = make(*arguments, **named)
      for name in "ab":
        adopted = messages.Adopted(replica=name, version=0)
        world.coordinator.adopted(adopted)
      return world

    yield make_with_replicas


def ask(room=1, version=0, replica="a"):
  return messages.Ask(replica=replica, version=version, room=room)


def written(turn, num_tokens, reason=FinishReason.EOS, version=0, known=0):
  """A turn of which so many tokens were written, some of them known already."""
  num_tokens -= known
  return messages.Written(
    group=turn.admission.index,
    begin=len(turn.trajectory.tokens) + known,
    trajectory=types.Trajectory(
      member=turn.trajectory.member,
      tokens=np.arange(60, 60 + num_tokens, dtype=np.int32),
      loss_mask=np.ones(num_tokens, bool),
      behavior_logprobs=np.zeros(num_tokens, np.float32),
      policy_versions=np.full(num_tokens, version, np.int32),
      finish_reason=reason,
    ),
  )


def report(*all_written, replica="a"):
  return messages.Report(replica=replica, written=all_written)


def of_group(work, index):
  return [turn for turn in work.turns if turn.admission.index == index]


def raising(prompt):
  """The first group's episodes fail after their first turn."""
  yield prompt.tokens
  if prompt.item["number"] == 0:
    raise LookupError("no such page")


def test_a_replica_is_given_whole_groups_while_it_has_room(make_world):
  coordinator = make_world().coordinator
  assert coordinator.admit(ask(room=0)).turns == ()
  work = coordinator.admit(ask(room=1))
  members = [(t.admission.index, t.trajectory.member) for t in work.turns]
  assert members == [(0, 0), (0, 1), (0, 2)]
  work = coordinator.admit(ask(room=100))
  assert {t.admission.index for t in work.turns} == {1, 2, 3}  # the bound
  for turn in work.turns:
    assert turn.admission == types.Admission(
      index=turn.admission.index, birth=0, deadline=1
    )
    assert not turn.trajectory.loss_mask.any()
    prompt_tokens = len(turn.trajectory.tokens)
    assert turn.limit == prompt_tokens + worker_world.MAX_COMPLETION


def test_the_next_turn_has_everything_that_was_written_before(make_world):
  def episode(prompt):
    yield prompt.tokens
    yield REPLY

  coordinator = make_world(episode=episode).coordinator
  turn, *_ = coordinator.admit(ask()).turns
  n = len(turn.trajectory.tokens)
  (more,) = coordinator.report(report(written(turn, 3))).turns
  t = more.trajectory
  assert t.tokens[n:].tolist() == [60, 61, 62, 50, 51]
  assert t.loss_mask.tolist() == [False] * n + [True] * 3 + [False] * 2
  assert t.policy_versions.tolist() == [-1] * n + [0] * 3 + [-1] * 2
  assert t.finish_reason is None and more.limit == turn.limit
  answer = coordinator.report(report(written(more, 2)))
  assert answer == messages.Work()
  assert coordinator.groups()[0].trajectories[0].finish_reason == "eos"


def test_a_turn_without_room_ends_its_trajectory_at_the_limit(make_world):
  def episode(prompt):
    yield prompt.tokens
    yield REPLY

  coordinator = make_world(episode=episode).coordinator
  turn, *_ = coordinator.admit(ask()).turns
  num_tokens = turn.limit - len(turn.trajectory.tokens) - len(REPLY)
  answer = coordinator.report(report(written(turn, num_tokens)))
  assert answer == messages.Work()
  first = coordinator.groups()[0].trajectories[0]
  assert first.finish_reason == FinishReason.LENGTH
  assert first.num_completion_tokens == num_tokens


def test_groups_are_scored_once_all_members_are_there(make_world):
  world = make_world()
  coordinator = world.coordinator
  turns = coordinator.admit(ask()).turns
  for turn in turns[:2]:
    coordinator.report(report(written(turn, 2)))
    coordinator.collect_scores()
  assert not world.rewards.submitted and not coordinator.is_scoring
  coordinator.report(report(written(turns[2], 1)))
  assert len(world.rewards.submitted) == 1 and coordinator.is_scoring
  coordinator.collect_scores()
  (group,) = world.buffer.state().finished
  assert [t.score for t in group.trajectories] == [0, 1, 2]
  assert coordinator.groups() == {}


def test_a_failed_group_is_written_down_when_all_of_it_is_known(make_world):
  world = make_world(episode=raising)
  coordinator = world.coordinator
  first, second, third = coordinator.admit(ask()).turns
  answer = coordinator.report(
    report(written(second, 4, reason=None), written(first, 2))
  )
  assert answer == messages.Work(cancelled=(0,))
  assert world.lines() == []
  aborted = FinishReason.ABORTED
  answer = coordinator.report(
    report(written(second, 5, aborted, known=4), written(third, 1, aborted))
  )
  assert answer == messages.Work()
  (line,) = world.lines()
  assert line["reason"] == "episode: LookupError('no such page')"
  assert line["num_completion_tokens"] == [2, 5, 1]
  assert line["finish_reasons"] == ["aborted"] * 3
  assert coordinator.groups() == {}
  assert world.buffer.state().running == []


def test_members_that_end_together_with_a_failing_one_are_counted(make_world):
  world = make_world(episode=raising)
  turns = world.coordinator.admit(ask()).turns
  answer = world.coordinator.report(report(*(written(t, 3) for t in turns)))
  assert answer == messages.Work()
  (line,) = world.lines()
  assert line["num_completion_tokens"] == [3, 3, 3]


def test_a_lost_replicas_groups_go_on_from_what_it_reported_last(make_world):
  world = make_world()
  coordinator = world.coordinator
  work = coordinator.admit(ask(room=100))
  ended, partial, silent = of_group(work, 0)
  coordinator.report(report(written(ended, 2), written(partial, 3, None)))
  coordinator.adopted(messages.Adopted(replica="a", version=0))
  assert "a holding version 0" in coordinator.status()
  coordinator.drained("a")
  assert "a holding" not in coordinator.status()
  # Not to weights older than what the group may have been written with.
  assert coordinator.admit(ask(version=-1, replica="b")).turns == ()
  again = coordinator.admit(ask(room=1, replica="b"))
  assert [t.trajectory.member for t in again.turns] == [1, 2]
  assert [t.admission.index for t in again.turns] == [0, 0]
  assert again.turns[0].trajectory.tokens[-3:].tolist() == [60, 61, 62]
  assert again.turns[1].trajectory.tokens.tolist() == (
    silent.trajectory.tokens.tolist()
  )
  # The other groups still wait.
  assert {
    t.admission.index for t in coordinator.admit(ask(room=3, replica="b")).turns
  } == {1}
  # It was not lost after all: nobody wants what it writes, and it gets nothing.
  assert coordinator.admit(ask(room=9)).turns == ()
  late = coordinator.report(
    report(written(partial, 5, None), written(silent, 2))
  )
  assert late == messages.Work(cancelled=(0,))
  assert coordinator.groups()[0].trajectories[1].num_completion_tokens == 3
  for turn in again.turns:
    coordinator.report(report(written(turn, 1), replica="b"))
  coordinator.collect_scores()
  (group,) = world.buffer.state().finished
  assert [t.num_completion_tokens for t in group.trajectories] == [2, 4, 1]
  assert [t.writers for t in group.trajectories] == [
    (("a", 2),),
    (("a", 3), ("b", 1)),
    (("b", 1),),
  ]
  assert coordinator.recorded_tokens == group.num_completion_tokens
  assert coordinator.refused_tokens == 7


def test_a_failed_group_of_a_lost_replica_ends_with_what_is_known(make_world):
  world = make_world(episode=raising)
  coordinator = world.coordinator
  first, second, _ = coordinator.admit(ask()).turns
  coordinator.report(report(written(second, 4, reason=None), written(first, 2)))
  coordinator.drained("a")
  (line,) = world.lines()
  assert line["num_completion_tokens"] == [2, 4, 0]
  assert coordinator.groups() == {}


def test_a_replica_that_aborts_what_nobody_cancelled_is_an_error(make_world):
  coordinator = make_world().coordinator
  turn, *_ = coordinator.admit(ask()).turns
  with pytest.raises(ValueError, match="group 0 was aborted"):
    coordinator.report(report(written(turn, 1, FinishReason.ABORTED)))


def test_a_report_that_leaves_tokens_out_is_an_error(make_world):
  coordinator = make_world().coordinator
  turn, *_ = coordinator.admit(ask()).turns
  coordinator.report(
    report(written(turn, 2, None), written(turn, 3, None, 0, 2))
  )
  with pytest.raises(ValueError, match="from token 7, but 6 are known"):
    coordinator.report(report(written(turn, 5, known=4)))


def test_restored_groups_wait_for_a_replica(make_world):
  first = make_world()
  work = first.coordinator.admit(ask(room=4))
  ended, partial, _ = of_group(work, 1)
  first.coordinator.report(report(written(ended, 2), written(partial, 3, None)))
  world = make_world(prompts=tiny.Prompts(2))
  world.buffer.restore(first.buffer.state())
  world.coordinator.restore(list(first.coordinator.groups().values()))
  assert world.coordinator.groups().keys() == {0, 1}
  turns = world.coordinator.admit(ask(room=4)).turns
  members = [(t.admission.index, t.trajectory.member) for t in turns]
  assert members == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
  assert turns[3].trajectory.num_completion_tokens == 3


def waiting(world, admissions):
  """Lets groups wait for a replica, each with two members and no tokens."""
  prompt = tiny.Prompts().next()
  first = episode_lib.First(prompt.tokens)
  members = [first.trajectory(member) for member in range(2)]
  world.coordinator.restore(
    [
      types.RolloutGroup(
        admission=admission, prompt=prompt, trajectories=list(members)
      )
      for admission in admissions
    ]
  )


def test_of_the_groups_that_wait_a_replica_gets_the_oldest_it_may_write(
  make_world,
):
  world = make_world()
  rng = np.random.default_rng(0)
  births, more = rng.integers(0, 6, (2, 60)).tolist()
  rest = [
    types.Admission(index=index, birth=birth, deadline=birth + extra)
    for index, (birth, extra) in enumerate(zip(births, more, strict=True))
  ]
  waiting(world, rest)
  for version in (1, 0, 3, 2, 5, 1, 4) * 60:
    allowed = [a for a in rest if a.birth <= version]
    if not allowed:
      continue
    expected = min(allowed, key=lambda a: (a.deadline, a.index))
    turns = world.coordinator.admit(ask(version=version)).turns
    assert [turn.admission for turn in turns] == [expected] * 2
    rest.remove(expected)
  assert not rest


@pytest.mark.slow
def test_handing_out_the_groups_of_a_large_checkpoint_is_linear(make_world):
  def seconds(num_groups):
    world = make_world()
    waiting(
      world,
      [
        types.Admission(index=i, birth=0, deadline=i % 9)
        for i in range(num_groups)
      ],
    )
    start_s = time.process_time()
    for _ in range(num_groups):
      assert len(world.coordinator.admit(ask()).turns) == 2
    return time.process_time() - start_s

  # 512 groups a step and a staleness of 8, as in configs/deepseek_1p5b.py.
  assert seconds(9 * 512) < 8 * min(seconds(2 * 512) for _ in range(3))


def test_a_group_that_takes_too_long_fails_and_its_replica_drops_it(make_world):
  world = make_world(max_group_s=1e-9)
  coordinator = world.coordinator
  work = coordinator.admit(ask(room=4))
  ended, partial, silent = of_group(work, 0)
  coordinator.report(report(written(ended, 2), written(partial, 3, None)))
  coordinator.report(report(*(written(t, 1) for t in of_group(work, 1))))
  # Group 1 is generated, and its score may take its time.
  assert coordinator.overdue() == {"a": messages.Work(cancelled=(0,))}
  assert coordinator.overdue() == {} and world.lines() == []
  aborted = FinishReason.ABORTED
  coordinator.report(
    report(written(partial, 4, aborted, known=3), written(silent, 1))
  )
  (line,) = world.lines()
  assert line["index"] == 0 and line["fate"] == "failed"
  assert line["reason"] == (
    "not generated in 1e-09 s (rollout.max_group_seconds)"
  )
  assert line["num_completion_tokens"] == [2, 4, 1]
  assert line["finish_reasons"] == ["eos", "aborted", "aborted"]
  assert [a.index for a in world.buffer.state().running] == [1]


def test_a_group_that_waits_too_long_for_a_replica_ends_at_once(make_world):
  world = make_world(max_group_s=1e-9)
  coordinator = world.coordinator
  first, *_ = coordinator.admit(ask()).turns
  coordinator.report(report(written(first, 2)))
  coordinator.drained("a")
  assert coordinator.overdue() == {}
  (line,) = world.lines()
  assert line["fate"] == "failed" and line["num_completion_tokens"] == [2, 0, 0]
  assert coordinator.groups() == {}
  assert coordinator.admit(ask(replica="b")).turns[0].admission.index == 1


def test_a_group_that_waits_for_an_evaluation_does_not_take_too_long(
  make_world,
):
  world = make_world(max_group_s=1e-9)
  coordinator = world.coordinator
  coordinator.admit(ask())
  coordinator.drained("a")
  coordinator.questions.ask([], 0, is_alone=True)
  assert coordinator.overdue() == {} and len(coordinator.groups()) == 1
  coordinator.questions.forget()
  coordinator.overdue()
  assert coordinator.groups() == {}


def test_the_group_that_training_waits_for_is_named(make_world):
  world = make_world()
  coordinator = world.coordinator
  names = "rollout/oldest_group", "rollout/oldest_group_s"
  metrics = coordinator.metrics(num_replicas=1)
  assert [metrics[name] for name in names] == [-1, 0]
  work = coordinator.admit(ask(room=4))
  coordinator.report(report(*(written(t, 1) for t in of_group(work, 0))))
  coordinator._running[1].times_s["admitted"] -= 50.0
  assert coordinator.metrics(1)["rollout/oldest_group"] == 0
  coordinator.collect_scores()
  metrics = coordinator.metrics(num_replicas=1)
  assert metrics["rollout/oldest_group"] == 1
  assert 50 <= metrics["rollout/oldest_group_s"] < 60
  assert coordinator.overdue() == {}, "off by default"
