"""A replica alone: the coordinator is a script."""

import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.types import FinishReason

LONG_GROUPS = (8, 9, 10, 11)  # member 2 of these writes much


def turn(group=8, trajectory=None, limit=24):
  if trajectory is None:
    trajectory = episode_lib.begin(2, tiny.prompt(5))
  return messages.Turn(
    admission=types.Admission(index=group, birth=0, deadline=1),
    trajectory=trajectory,
    limit=limit,
    temperature=1.0,
  )


class Script:
  """Answers with what it was given, once; keeps what it was told."""

  def __init__(self):
    self.asks, self.reports, self.others = [], [], []
    self.to_admit = self.to_report = messages.Work()

  def admit(self, ask):
    self.asks.append(ask)
    work, self.to_admit = self.to_admit, messages.Work()
    return work

  def report(self, report):
    self.reports.append(report)
    work, self.to_report = self.to_report, messages.Work()
    return work

  def adopted(self, adopted):
    self.others.append(adopted)

  def drained(self, drained):
    self.others.append(drained)

  def written(self):
    """All that was reported, in order."""
    return [one for report in self.reports for one in report.written]


@pytest.fixture
def script():
  return Script()


@pytest.fixture
def replica(script):
  channel = tiny.channel()
  made = replica_lib.Replica("r", script, tiny.scheduler(), channel=channel)
  yield made
  channel.close()


def run(replica, max_steps=50):
  for _ in range(max_steps):
    if not replica.can_step:
      return
    replica.step()
  raise AssertionError("turns do not end")


def alone(group=8, tokens=None):
  """What a scheduler of its own writes."""
  scheduler = tiny.ready()
  prompt = tiny.prompt(5) if tokens is None else tokens
  sequence = tiny.sequence(prompt, group=group, member=2)
  scheduler.submit(sequence)
  tiny.finish(scheduler)
  return sequence.trajectory()


def test_it_asks_once_it_has_weights_and_room(script, replica):
  replica.feed()
  assert not script.asks and not replica.can_step
  assert replica.has_newer_weights()
  replica.adopt()
  assert script.others == [messages.Adopted(replica="r", version=0)]
  assert not replica.has_newer_weights()
  script.to_admit = messages.Work(turns=tuple(map(turn, LONG_GROUPS)))
  replica.feed()
  room = tiny.SIZES.num_slots + tiny.SIZES.insert_rows
  assert script.asks == [messages.Ask(replica="r", version=0, room=room)]
  script.to_admit = messages.Work(turns=(turn(12), turn(13)))
  replica.feed()
  assert script.asks[-1].room == tiny.SIZES.insert_rows
  replica.feed()
  assert len(script.asks) == 2  # nothing would be written soon


def test_it_writes_what_the_turn_says_and_reports_its_end(script, replica):
  replica.adopt()
  script.to_admit = messages.Work(turns=(turn(8), turn(9)))
  replica.feed()
  run(replica)
  found = {w.group: w.trajectory for w in script.written()}
  assert found.keys() == {8, 9}
  for group, trajectory in found.items():
    expected = alone(group)
    assert trajectory.tokens.tolist() == expected.tokens.tolist()
    assert trajectory.finish_reason == expected.finish_reason
    np.testing.assert_array_equal(
      trajectory.behavior_logprobs, expected.behavior_logprobs
    )
  assert replica.group_tokens == sum(
    t.num_completion_tokens for t in found.values()
  )


def test_a_turn_that_is_answered_with_another_goes_on(script, replica):
  replica.adopt()
  script.to_admit = messages.Work(turns=(turn(),))
  replica.feed()
  while not script.reports:
    (next_to_end,) = replica._writing.values()
    if next_to_end.length >= 13:
      so_far = next_to_end.trajectory()
      script.to_report = messages.Work(
        turns=(
          turn(
            limit=32,
            trajectory=episode_lib.extend(
              alone(), np.array([50, 51], np.int32)
            ),
          ),
        )
      )
    replica.step()
  assert so_far.finish_reason is None
  run(replica)
  first, second = script.written()
  n = len(first.trajectory.tokens)
  assert second.trajectory.tokens[: n + 2].tolist() == [
    *first.trajectory.tokens,
    50,
    51,
  ]
  assert not second.trajectory.loss_mask[n : n + 2].any()
  assert second.trajectory.loss_mask[n + 2]


def test_another_replica_goes_on_with_what_was_reported(script, replica):
  replica.adopt()
  script.to_admit = messages.Work(turns=(turn(),))
  replica.feed()
  replica.step()
  replica.report_all()
  (partial,) = script.written()
  assert partial.trajectory.finish_reason is None
  assert partial.trajectory.num_completion_tokens == 4
  other = Script()
  channel = tiny.channel()
  second = replica_lib.Replica("s", other, tiny.scheduler(), channel=channel)
  second.adopt()
  other.to_admit = messages.Work(turns=(turn(trajectory=partial.trajectory),))
  second.feed()
  run(second)
  (ended,) = other.written()
  expected = alone()
  assert ended.trajectory.tokens.tolist() == expected.tokens.tolist()
  assert ended.trajectory.loss_mask.tolist() == expected.loss_mask.tolist()
  channel.close()


def test_what_is_cancelled_is_reported_as_aborted_and_frees_its_slots(
  script, replica
):
  replica.adopt()
  script.to_admit = messages.Work(turns=tuple(map(turn, LONG_GROUPS)))
  replica.feed()
  replica.step()
  script.to_admit = messages.Work(cancelled=(8, 10, 77))
  replica.feed()
  found = {w.group: w.trajectory for w in script.written()}
  assert found.keys() == {8, 10}
  for trajectory in found.values():
    assert trajectory.finish_reason == FinishReason.ABORTED
    assert trajectory.num_completion_tokens == 4
  assert {s.group for s in replica.scheduler.sequences()} == {9, 11}
  run(replica)
  assert sorted(w.group for w in script.written()) == [8, 9, 10, 11]


def test_what_has_ended_is_reported_once_whoever_asks_first(script, replica):
  replica.adopt()
  script.to_admit = messages.Work(turns=(turn(),))
  replica.feed()
  step = replica.scheduler.step

  def ask_in_the_middle():
    ended = step()
    replica.report_all()
    return ended

  replica.scheduler.step = ask_in_the_middle
  run(replica)
  reasons = [w.trajectory.finish_reason for w in script.written()]
  assert [r for r in reasons if r is not None] == [alone().finish_reason]


def test_a_drained_replica_has_told_all_and_holds_nothing(script, replica):
  replica.adopt()
  script.to_admit = messages.Work(turns=tuple(map(turn, LONG_GROUPS)))
  replica.feed()
  replica.step()
  replica.drain()
  assert {w.group for w in script.written()} == set(LONG_GROUPS)
  assert script.others[-1] == messages.Drained(replica="r")
  assert not replica.scheduler.sequences()
  run(replica)
  assert len(script.reports) == 1
