"""A replica alone: the coordinator is a script."""

import dataclasses

import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.planning import aot
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import running_group
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.types import FinishReason
from jaxrl_async.weights import weight_transfer

LONG_GROUPS = (8, 9, 10, 11)  # member 2 of these writes much


def make_replica(name, link, channel, **settings):
  return replica_lib.Replica(
    name,
    link,
    tiny.scheduler(**settings),
    channel=channel,
    tokenizer=tokenizer_lib.character_level(),
  )


def turn(group=8, trajectory=None, limit=24, **stops):
  if trajectory is None:
    trajectory = episode_lib.First(tiny.prompt(5)).trajectory(2)
  return messages.Turn(
    admission=types.Admission(index=group, birth=0, deadline=1),
    trajectory=trajectory,
    limit=limit,
    temperature=1.0,
    **stops,
  )


class Script:
  """Answers with what it was given, once; keeps what it was told."""

  def __init__(self):
    self.asks, self.reports, self.others = [], [], []
    self.to_admit = self.to_report = messages.Work()
    self.known = {}

  def admit(self, ask):
    self.asks.append(ask)
    work, self.to_admit = self.to_admit, messages.Work()
    return self.handed_out(work)

  def report(self, report):
    self.reports.append(
      messages.Report(
        replica=report.replica, written=tuple(map(self.whole, report.written))
      )
    )
    work, self.to_report = self.to_report, messages.Work()
    return self.handed_out(work)

  def handed_out(self, work):
    for turn in work.turns:
      key = turn.admission.index, turn.trajectory.member
      self.known[key] = turn.trajectory
    return work

  def whole(self, written):
    """What was written, after what was known before."""
    key = written.group, written.trajectory.member
    known, new = self.known[key], written.trajectory
    assert written.begin == len(known.tokens)
    assert len(written.trajectory.tokens) or written.trajectory.finish_reason
    assert new.loss_mask.all()
    (self.known[key],) = running_group.joined(
      [known], [[running_group.Piece("r", new)]]
    )
    return written._replace(trajectory=self.known[key])

  def adopted(self, adopted):
    self.others.append(adopted)

  def written(self):
    """All that was reported, in order."""
    return [one for report in self.reports for one in report.written]


@pytest.fixture
def script():
  return Script()


@pytest.fixture
def replica(script):
  channel = tiny.channel()
  made = make_replica("r", script, channel)
  yield made
  channel.close()


def run(replica, max_steps=50):
  for _ in range(max_steps):
    if not replica.can_step:
      return
    replica.step()
  raise AssertionError("turns do not end")


def versions_of(written):
  """The versions that wrote the tokens of a trajectory."""
  trajectory = written.trajectory
  return {*trajectory.policy_versions[trajectory.loss_mask].tolist()}


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
  replica.has_newer_weights()  # begins to fetch them
  replica.wait_for_weights(60.0)
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
  assert script.asks[-1].room == 0  # nothing would be written soon


@pytest.mark.parametrize("kv_on_adopt", sections.KvOnAdopt)
def test_new_weights_interrupt_unless_they_are_to_wait(script, kv_on_adopt):
  channel = tiny.channel()
  replica = make_replica("r", script, channel, kv_on_adopt=kv_on_adopt)
  replica.adopt()
  script.to_admit = messages.Work(turns=(turn(),))
  replica.feed()
  replica.step()
  weights = tiny.engine_params(0, seed=1).weights
  channel.publish(weights, 1)
  waits = kv_on_adopt is sections.KvOnAdopt.WAIT
  if waits:
    assert not replica.may_adopt()
    replica.feed()
    assert script.asks[-1].room == 0
    run(replica)
    channel.publish(weights, 2)
  while not replica.may_adopt():
    replica.wait_for_weights(60.0)
  replica.adopt()
  assert replica.version == (2 if waits else 1)
  replica.feed()
  assert script.asks[-1].room > 0
  run(replica)
  (found,) = script.written()
  assert versions_of(found) == ({0} if waits else {0, 1})
  channel.close()


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
  second = make_replica("s", other, channel)
  second.adopt()
  other.to_admit = messages.Work(turns=(turn(trajectory=partial.trajectory),))
  second.feed()
  run(second)
  (ended,) = other.written()
  expected = alone()
  assert ended.trajectory.tokens.tolist() == expected.tokens.tolist()
  assert ended.trajectory.loss_mask.tolist() == expected.loss_mask.tolist()
  channel.close()


def cut(trajectory, num_tokens):
  """The beginning of a trajectory, as a report in the middle has it."""
  return dataclasses.replace(
    trajectory,
    tokens=trajectory.tokens[:num_tokens],
    loss_mask=trajectory.loss_mask[:num_tokens],
    behavior_logprobs=trajectory.behavior_logprobs[:num_tokens],
    policy_versions=trajectory.policy_versions[:num_tokens],
    finish_reason=None,
  )


def ended(script, replica, made):
  """The only trajectory that a turn ends as."""
  script.reports.clear()
  script.to_admit = messages.Work(turns=(made,))
  replica.feed()
  run(replica)
  (written,) = script.written()
  return written.trajectory


def test_a_stop_text_ends_a_turn_wherever_it_was_interrupted(script, replica):
  replica.adopt()
  whole = alone()
  text = tokenizer_lib.character_level().decode(whole.tokens[9:13])
  assert len(text) == 4 and len(whole.tokens) > 13
  expected = ended(script, replica, turn(stop=(text, "never")))
  assert expected.finish_reason is FinishReason.STOP
  assert expected.tokens.tolist() == whole.tokens[:13].tolist()
  assert expected.loss_mask[5:].all()
  # From 10 on, the stop text has begun in what another replica wrote.
  for num_tokens in range(5, 13):
    begun = cut(whole, num_tokens)
    found = ended(script, replica, turn(trajectory=begun, stop=(text,)))
    assert found.finish_reason is FinishReason.STOP, num_tokens
    assert found.tokens.tolist() == expected.tokens.tolist()
    # A prefill makes the cache of what is begun, with other roundings.
    np.testing.assert_allclose(
      found.behavior_logprobs[:13], expected.behavior_logprobs, atol=2e-6
    )


def test_a_stop_text_of_an_earlier_turn_does_not_end_the_next(script, replica):
  replica.adopt()
  first = cut(alone(), 9)
  text = tokenizer_lib.character_level().decode(first.tokens[6:9])
  again = episode_lib.extend(first, np.array([50, 51], np.int32))
  found = ended(script, replica, turn(trajectory=again, stop=(text,)))
  assert len(found.tokens) > 12 and found.finish_reason != FinishReason.STOP
  # Nor does one that begins in what the turn was shown.
  across = tokenizer_lib.character_level().decode(found.tokens[10:12])
  assert len(across) == 2
  again = ended(script, replica, turn(trajectory=again, stop=(across,)))
  assert again.tokens.tolist() == found.tokens.tolist()


@pytest.mark.parametrize("what", ["adopt", "preempt"])
def test_a_stop_text_is_found_across_an_interruption(script, replica, what):
  replica.adopt()
  whole = alone()
  text = tokenizer_lib.character_level().decode(whole.tokens[7:11])
  script.to_admit = messages.Work(turns=(turn(stop=(text,)),))
  replica.feed()
  scheduler = replica.scheduler
  scheduler.step()  # 4 of 6 tokens, the first 2 of the stop text among them
  (sequence,) = scheduler.sequences()
  assert sequence.length == 9
  if what == "adopt":
    scheduler.adopt(tiny.engine_params(1), 1)
  else:
    scheduler._drain()
    scheduler._preempt(list(scheduler._entries.values()))
  run(replica)
  (written,) = script.written()
  assert written.trajectory.finish_reason is FinishReason.STOP
  assert written.trajectory.tokens.tolist() == whole.tokens[:11].tolist()


def test_a_stop_token_ends_a_turn(script, replica):
  replica.adopt()
  whole = alone()
  token = int(whole.tokens[10])
  assert token not in whole.tokens[5:10]
  found = ended(script, replica, turn(stop_token_ids=(token,)))
  assert found.finish_reason is FinishReason.STOP
  assert found.tokens.tolist() == whole.tokens[:11].tolist()


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


def test_a_replica_that_gives_back_has_told_all_and_holds_nothing(
  script, replica
):
  replica.adopt()
  script.to_admit = messages.Work(turns=tuple(map(turn, LONG_GROUPS)))
  replica.feed()
  replica.step()
  replica.give_back()
  assert {w.group for w in script.written()} == set(LONG_GROUPS)
  assert not replica.scheduler.sequences()
  run(replica)
  assert len(script.reports) == 1


class Damaging:
  """A channel whose versions a test can damage."""

  def __init__(self, directory):
    self.directory = directory
    self.weights = tiny.engine_params(0).weights
    target = aot.placed(self.weights, tiny.engine().params_sharding.weights)
    self.channel = weight_transfer.OrbaxChannel(directory, "now", target)

  def publish(self, version, *, is_damaged=False):
    self.channel.publish(self.weights, version)
    assert self.channel.wait_for_version(version - 1, 60.0)
    if is_damaged:
      (self.directory / "incarnation-now" / str(version) / "stranger").touch()


def adopt(replica):
  while not replica.may_adopt():
    replica.wait_for_weights(60.0)
  replica.adopt()


def test_a_damaged_version_is_passed_over_and_the_next_one_waited_for(tmp_path):
  damaging = Damaging(tmp_path)
  channel, publish = damaging.channel, damaging.publish
  replica = make_replica("a", Script(), channel)
  publish(0)
  adopt(replica)
  publish(1, is_damaged=True)
  replica.adopt()
  assert replica.version == 0 and not replica.has_newer_weights()
  assert channel.unreadable == 1
  publish(2)
  adopt(replica)
  assert replica.version == 2
  replica.close(has_failed=False)
  channel.close()
