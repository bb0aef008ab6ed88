"""Groups whose episodes answer later, in a worker and in a fleet."""

import asyncio
import collections
import itertools
import threading
import time

import environment_calls as called
import fleet_world
import numpy as np
import pytest
import tiny
import waiting
import worker_world

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import coordinator_settings as coordinator_settings_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

REPLY = np.array([50, 51], np.int32)
LONG = {"max_completion_tokens": 24}
LOOKS = 100_000
DEADLINE_S = 60.0


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


@pytest.fixture
def make_fleet(tmp_path):
  yield from fleet_world.worlds(tmp_path)


def reply(completion):
  return np.concatenate([REPLY, completion[-1:] + 20])


def two_turns(prompt):
  completion = yield prompt.tokens
  yield reply(completion)


async def two_turns_later(prompt, context):
  """The same, which waits before both turns."""
  await asyncio.sleep(0.01)
  completion = yield prompt.tokens
  yield await context.call(answer_later, completion.tolist())


async def answer_later(completion):
  await asyncio.sleep(0.001 * (sum(completion) % 7))
  return reply(np.array(completion, np.int32)).tolist()


def bits(groups):
  """What the first four groups are, bit for bit."""
  return {
    (g.index, t.member, name): getattr(t, name).tobytes()
    for g in groups
    if g.index < 4
    for t in g.trajectories
    for name in worker_world.ARRAYS
  }


def finished(world, count=4):
  world.run_until(worker_world.finished(count), LOOKS)
  return world.buffer.state().finished


def test_episodes_that_answer_later_make_the_same_groups(make_world):
  expected = finished(make_world(episode=two_turns, **LONG))
  world = make_world(episode=two_turns_later, **LONG)
  found = finished(world)
  for group in found:
    same = next(g for g in expected if g.index == group.index)
    for a, b in zip(group.trajectories, same.trajectories, strict=True):
      np.testing.assert_array_equal(a.tokens, b.tokens)
      np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
      assert a.finish_reason == b.finish_reason
      (event,) = a.events
      assert event[:3] == ("result", 1, 0)
  worker_world.check_balance(world)
  assert not world.coordinator.awaits_answers


def test_a_trajectory_ends_after_its_last_turn(make_world):
  def endless(prompt):
    yield prompt.tokens
    while True:
      yield REPLY[:1]

  async def endless_later(prompt):
    yield prompt.tokens
    while True:
      yield REPLY[:1]

  for episode in (endless, endless_later):
    world = make_world(episode=episode, environment={"max_turns": 2}, **LONG)
    groups = finished(world)
    turns = {
      int(np.count_nonzero(np.diff(t.loss_mask.astype(int)) == 1))
      for g in groups
      for t in g.trajectories
    }
    assert max(turns) == 2
    assert {t.finish_reason for g in groups for t in g.trajectories} == {
      types.FinishReason.LENGTH
    }


@pytest.mark.parametrize("when", ["at first", "after a turn"])
@pytest.mark.parametrize(
  ("fault", "words"),
  [
    ("raises", "LookupError('no such page')"),
    ("hangs", "timeout: its answers took longer than 0.3 s"),
    ("yields text", "yielded str 'text'"),
    ("yields nothing", "yielded a turn without tokens"),
    ("yields other tokens", "and the vocabulary has 97"),
    ("calls what fails", "error: LookupError: no such page"),
    ("ends a process", "died: the process of ends_its_process"),
  ],
)
def test_a_fault_of_an_environment_fails_its_group_alone(
  make_world, fault, words, when
):
  begun, closed = [], []

  async def fail(context):
    if fault == "raises":
      raise LookupError("no such page")
    if fault == "hangs":
      await asyncio.sleep(600.0)
    if fault == "calls what fails":
      await context.call(called.raises)
    if fault == "ends a process":
      await context.call(called.ends_its_process, timeout_s=600.0)
    return {
      "yields text": "text",
      "yields nothing": [],
      "yields other tokens": [97],
    }[fault]

  async def episode(prompt, context):
    is_bad = prompt.item["number"] == 1 and context.member == 1
    begun.append((prompt.item["number"], context.member))
    try:
      yield (
        (await fail(context))
        if is_bad and when == "at first"
        else (prompt.tokens)
      )
      if is_bad:
        yield await fail(context)
      elif prompt.item["number"] == 1:
        await asyncio.sleep(600.0)  # its group has to end it
    finally:
      closed.append((prompt.item["number"], context.member))

  # The one that ends a process waits for that alone.
  timeout_s = 0.3 if fault == "hangs" else 600.0
  environment = {"vocab_size": 97, "timeout_s": timeout_s}
  world = make_world(episode=episode, environment=environment)
  finished(world, 4)
  (line,) = world.lines()
  assert line["index"] == 1 and line["fate"] == "failed"
  assert line["reason"].startswith("episode: ") and words in line["reason"]
  assert len(line["num_completion_tokens"]) == worker_world.GROUP_SIZE
  assert 1 not in {g.index for g in world.buffer.state().finished}
  worker_world.check_balance(world)
  wanted = {key for key in begun if key[0] == 1}
  assert (1, 1) in wanted
  waiting.until(lambda: wanted <= set(closed))


def test_a_group_that_takes_too_long_fails_while_its_episodes_wait(make_world):
  async def episode(prompt):
    yield prompt.tokens
    if prompt.item["number"] == 0:
      await asyncio.sleep(600.0)

  world = make_world(episode=episode, max_group_s=3.0)
  world.run_until(
    lambda state: state.finished and 0 not in world.coordinator.groups(), LOOKS
  )
  (line,) = [x for x in world.lines() if x["index"] == 0]
  assert "rollout.max_group_seconds" in line["reason"]
  worker_world.check_balance(world)


def test_a_cut_lets_groups_go_on_that_wait_for_their_environment(make_world):
  release = threading.Event()

  async def episode(prompt):
    completion = yield prompt.tokens
    while not release.is_set():
      await asyncio.sleep(0.01)
    yield reply(completion)

  expected = finished(make_world(episode=two_turns, **LONG))
  world = make_world(episode=episode, **LONG)
  # All members of the groups that may start have written a turn.
  num_all = 4 * worker_world.GROUP_SIZE
  world.run_until(lambda state: world.environment.num_waiting == num_all, LOOKS)
  world.worker.cut(0)
  assert all(r.replica is None for r in world.coordinator._running.values())
  assert not world.coordinator._waiting
  release.set()
  found = finished(world)
  for group in found:
    same = next(g for g in expected if g.index == group.index)
    for a, b in zip(group.trajectories, same.trajectories, strict=True):
      np.testing.assert_array_equal(a.tokens, b.tokens)
  worker_world.check_balance(world)


# -- checkpoints -------------------------------------------------------------


@pytest.mark.parametrize("blocks", [False, True])
def test_a_run_that_goes_on_does_not_make_recorded_calls_again(
  make_world, tmp_path, blocks
):
  """The second call of each member is in flight at the checkpoint."""
  path, release = tmp_path / "calls", threading.Event()
  function = called.note if blocks else called.note_there

  async def wait():
    while not release.is_set():
      await asyncio.sleep(0.01)

  async def episode(prompt, context):
    name = f"{prompt.item['number']} {context.member}"
    await context.call(function, str(path), f"reset {name}", timeout_s=60.0)
    completion = yield prompt.tokens
    context.reward(1.0)
    await context.call(function, str(path), f"first {name}", timeout_s=60.0)
    if prompt.item["number"] > 0:
      await context.call(wait, timeout_s=600.0)
    await context.call(function, str(path), f"last {name}", timeout_s=60.0)
    yield reply(completion)
    context.reward(0.5)

  first = make_world(episode=episode, **LONG)
  num_waiting = 3 * worker_world.GROUP_SIZE
  first.run_until(
    lambda state: (
      len(state.finished) == 1
      and len([x for x in called.lines(path) if x.startswith("first")])
      == 4 * worker_world.GROUP_SIZE
      and first.environment.num_waiting == num_waiting
    ),
    LOOKS,
  )
  # The last lines were written before their results have arrived.
  waiting.until(
    lambda: all(
      len(t.events) == 3
      for g in first.worker.groups().values()
      for t in g.trajectories
    ),
  )
  state, groups = first.buffer.state(), first.worker.groups()
  outstanding_lib.write(
    tmp_path,
    [
      outstanding_lib.OutstandingGroup(status="running", group=g)
      for g in groups.values()
    ],
  )
  first.environment.close(DEADLINE_S)

  stored = {o.group.index: o.group for o in outstanding_lib.read(tmp_path)}
  assert stored.keys() == groups.keys() == {1, 2, 3}
  second = make_world(
    episode=episode,
    prompts=tiny.Prompts(first.coordinator.stream.count),
    **LONG,
  )
  second.buffer.restore(state)
  second.coordinator.restore([stored[a.index] for a in state.running])
  # A second checkpoint at once holds what the first one held.
  for index, group in second.coordinator.groups().items():
    for a, b in zip(
      group.trajectories, stored[index].trajectories, strict=True
    ):
      assert [e for e in b.events if e.number >= 0] == [
        e for e in a.events if e.number >= 0
      ]
      np.testing.assert_array_equal(a.tokens, b.tokens)
  second.scheduler.stats.generated_tokens = (
    first.scheduler.stats.generated_tokens
  )
  release.set()
  found = finished(second)
  counts = collections.Counter(called.lines(path))
  expected = {
    f"{what} {number} {member}"
    for what in ("reset", "first", "last")
    for number in range(4)
    for member in range(worker_world.GROUP_SIZE)
  }
  assert expected <= counts.keys() and set(counts.values()) == {1}
  for group in found:
    for trajectory in group.trajectories:
      rewards = {0: 1.0, 1: 0.5}
      if episode_lib.num_turns(trajectory) == 1:  # there was no room
        del rewards[1]
      assert trajectory.turn_rewards() == rewards
  worker_world.check_balance(second)


# -- many --------------------------------------------------------------------


NUM_GROUPS, SIZE = 125, 8


class WritingReplica:
  """A replica that writes a token for each turn at once."""

  def __init__(self, coordinator):
    self.coordinator = coordinator
    self.turns = []
    self.num_turns = 0

  def take(self, work):
    self.turns += work.turns

  def step(self):
    turns, self.turns = self.turns, []
    written = []
    for turn in turns:
      self.num_turns += 1
      begin = len(turn.trajectory.tokens)
      written.append(
        messages.Written(
          group=turn.admission.index,
          begin=begin,
          trajectory=types.Trajectory(
            member=turn.trajectory.member,
            tokens=np.array([6], np.int32),
            loss_mask=np.array([True]),
            behavior_logprobs=np.zeros(1, np.float32),
            policy_versions=np.zeros(1, np.int32),
            finish_reason=types.FinishReason.EOS,
          ),
        )
      )
    if written:
      report = messages.Report(replica="one", written=tuple(written))
      self.take(self.coordinator.report(report))


def make_coordinator(
  tmp_path, episode, num_groups, group_size, seconds=time.perf_counter
):
  """A coordinator whose only replica is a test."""
  environment = environment_lib.Environment(episode)
  buffer = buffer_lib.Buffer(num_groups, 0)
  buffer.set_policy_version(0)
  ledger = ledger_lib.Ledger(
    tmp_path / "ledger.jsonl", ledger_lib.LedgerState()
  )
  coordinator = coordinator_lib.Coordinator(
    coordinator_settings_lib.CoordinatorSettings(
      group_size=group_size,
      max_completion_tokens=100,
      max_tokens=100,
      num_slots=64,
      temperature=1.0,
      filter_zero_std=False,
      reads_token_scores=False,
      max_failed_groups=9,
      max_filtered_groups=1000,
    ),
    stream=tiny.Prompts(),
    buffer=buffer,
    rewards=tiny.Rewards(),
    ledger=ledger,
    busy=metrics_lib.BusyClock(seconds=seconds),
    environment=environment,
  )
  coordinator.adopted(messages.Adopted(replica="one", version=0))
  return coordinator, environment, buffer, ledger


def test_conversations_that_start_slowly_leave_their_room_to_others(tmp_path):
  may_start = asyncio.Event()
  now_s = 0.0

  async def episode(prompt, context):
    await may_start.wait()
    yield prompt.tokens

  coordinator, environment, _, ledger = make_coordinator(
    tmp_path, episode, 4, 2, seconds=lambda: now_s
  )
  ask = messages.Ask(replica="one", version=0, room=4)
  coordinator.admit(ask)
  coordinator.admit(ask)
  assert coordinator.num_starting("one") == 4 == 2 * len(coordinator.groups())
  now_s = 1.0  # the engine has room that nobody uses
  assert coordinator.num_starting("one") == 0
  coordinator.admit(ask)
  assert len(coordinator.groups()) == 4 == coordinator.num_starting("one")
  environment.close(DEADLINE_S)
  ledger.close()


def test_a_replica_gets_one_group_after_the_other(tmp_path):
  may_start, now_s = asyncio.Event(), itertools.count(step=1.0)

  async def episode(prompt, context):
    await may_start.wait()
    yield prompt.tokens

  # Each look at the clock finds starts that take long.
  coordinator, environment, _, ledger = make_coordinator(
    tmp_path, episode, 8, 2, seconds=lambda: next(now_s)
  )
  fleet = fleet_lib.Fleet(
    coordinator,
    lambda place: pytest.fail("no replica is started"),
    None,
    num_replicas=1,
    replica_timeout_s=DEADLINE_S,
    start_timeout_s=DEADLINE_S,
    busy=metrics_lib.BusyClock(),
    note=print,
  )
  fleet._members[0].name, fleet._members[0].version = "one", 0
  for number in range(1, 5):
    assert fleet._give({0: []}, 0) == 2
    assert len(coordinator.groups()) == number
  environment.close(DEADLINE_S)
  ledger.close()


def test_a_group_that_fails_at_its_replica_goes_on_with_no_member(tmp_path):
  environment = None

  async def episode(prompt, context):
    yield prompt.tokens
    if context.member == 0:
      raise LookupError("no such page")
    while environment.answers.empty():  # until that one has failed
      await asyncio.sleep(0.001)
    yield prompt.tokens

  coordinator, environment, _, ledger = make_coordinator(
    tmp_path, episode, 1, 3, seconds=lambda: 0.0
  )
  ask = messages.Ask(replica="one", version=0, room=3)
  assert not coordinator.admit(ask).turns
  assert not coordinator.admit(ask).turns  # the room is taken
  turns = []
  while len(turns) < 3:
    time.sleep(0.001)
    for work in coordinator.collect_answers().values():
      turns += work.turns
  replica = WritingReplica(coordinator)
  replica.turns = [t for t in turns if t.trajectory.member < 2]
  replica.step()
  assert not replica.turns
  waiting.until(lambda: environment.answers.qsize() == 2)
  assert coordinator.collect_answers() == {"one": messages.Work(cancelled=(0,))}
  assert coordinator.collect_answers() == {}
  assert coordinator.groups().keys() == {0}
  # The last member is reported, and the group ends.
  replica.turns = [t for t in turns if t.trajectory.member == 2]
  replica.step()
  assert not coordinator.groups() and not coordinator.awaits_answers
  assert "no such page" in (tmp_path / "ledger.jsonl").read_text()
  environment.close(DEADLINE_S)
  ledger.close()


def test_a_thousand_conversations_do_not_hold_the_engines_thread(tmp_path):
  num_waiting, slept_s = 0, 0.0
  all_are_there = asyncio.Event()

  async def tool(seconds):
    nonlocal num_waiting, slept_s
    num_waiting, slept_s = num_waiting + 1, slept_s + seconds
    if num_waiting == NUM_GROUPS * SIZE:
      all_are_there.set()
    await all_are_there.wait()
    await asyncio.sleep(seconds)

  async def episode(prompt, context):
    rng = np.random.default_rng([prompt.item["number"], context.member])
    for _ in range(3):
      yield prompt.tokens
      await context.call(tool, float(rng.uniform(0.05, 0.5)), timeout_s=60.0)

  coordinator, environment, buffer, ledger = make_coordinator(
    tmp_path, episode, NUM_GROUPS, SIZE
  )
  replica = WritingReplica(coordinator)
  begun_s, busy_s = time.monotonic(), time.thread_time()
  num_rounds = 0
  while len(buffer.state().finished) < NUM_GROUPS:
    num_rounds += 1
    coordinator.collect_scores()
    for work in coordinator.collect_answers().values():
      replica.take(work)
    ask = messages.Ask(replica="one", version=0, room=64 - len(replica.turns))
    replica.take(coordinator.admit(ask))
    replica.step()
    assert time.monotonic() - begun_s < 5 * DEADLINE_S
    time.sleep(0.005)
  environment.close(DEADLINE_S)
  ledger.close()
  assert replica.num_turns == 3 * SIZE * NUM_GROUPS
  # All of them waited at once, and this thread came round all the time.
  assert all_are_there.is_set() and slept_s > 800
  assert num_rounds > 20
  assert time.thread_time() - busy_s < slept_s / 20


# -- evaluations -------------------------------------------------------------


def questions(count):
  stream = tiny.Prompts()
  settings = questions_lib.AnswerSettings(
    samples=2, temperature=1.0, max_completion_tokens=24
  )
  prompts = [stream.next() for _ in range(count)]
  return questions_lib.of_set("held_out", prompts, settings)


def content(answers):
  return sorted(
    (
      *(one.question.number, one.question.sample),
      one.trajectory.tokens.tobytes(),
      one.trajectory.loss_mask.tobytes(),
    )
    for one in answers
  )


def written_alone(asked, episode):
  environment = environment_lib.Environment(episode)
  steps = answers_lib.write(
    tiny.ready(), asked, tokenizer_lib.character_level(), environment
  )
  found = [one for step in steps for one in step]
  environment.close(DEADLINE_S)
  return found


def test_questions_are_answered_with_the_episode_of_the_run(make_world):
  asked = questions(6)
  expected = content(written_alone(asked, two_turns))
  assert any(
    np.frombuffer(mask, bool)[:-1].tobytes().count(b"\1\0")
    for *_, mask in expected
  )
  assert content(written_alone(asked, two_turns_later)) == expected
  for episode in (two_turns, two_turns_later):
    for is_alone in (True, False):
      world = make_world(episode=episode, **LONG)
      written = world.coordinator.questions.ask(asked, 0, is_alone=is_alone)
      world.run_until(lambda state, w=written: w.qsize() == 12, LOOKS)
      found = [written.get() for _ in range(12)]
      assert content(found) == expected
      assert len(found[0].trajectory.events) == (
        episode is two_turns_later and len(found[0].trajectory.events)
      )


def test_questions_whose_episodes_start_slowly_do_not_begin_all_at_once():
  may_start = threading.Event()

  async def episode(prompt):
    while not may_start.is_set():
      await asyncio.sleep(0.01)
    yield prompt.tokens

  environment = environment_lib.Environment(episode)
  asked = questions_lib.Questions(
    max_tokens=32, num_slots=4, environment=environment
  )
  answers = asked.ask(questions(20), 0, is_alone=True)
  ask = messages.Ask(replica="one", version=0, room=3)
  for expected in (3, 6, 7, 7):
    assert not asked.admit(ask) and environment.num_waiting == expected
  other = messages.Ask(replica="another", version=0, room=3)
  assert not asked.admit(other) and environment.num_waiting == 10
  may_start.set()
  for _ in range(10):
    asked.take(environment.answers.get(timeout=DEADLINE_S))
  assert len(asked.admit(ask)) == 7 and not environment.num_waiting
  assert asked.num_missing == 40 and answers.empty()
  environment.close(DEADLINE_S)


def two_short_turns(prompt):
  for _ in range(2):
    yield episode_lib.Until(prompt.tokens, max_tokens=3)


def test_questions_are_answered_in_turns_with_limits(make_world):
  asked = questions(4)
  expected = content(written_alone(asked, two_short_turns))
  world = make_world(episode=two_short_turns, **LONG)
  written = world.coordinator.questions.ask(asked, 0, is_alone=True)
  world.run_until(lambda state: written.qsize() == 8, LOOKS)
  found = [written.get() for _ in range(8)]
  assert content(found) == expected
  sizes = [
    len(turn.completion.tokens)
    for one in found
    for turn in episode_lib.recorded_turns([one.trajectory])
  ]
  assert len(sizes) == 16 and max(sizes) == 3


def test_an_episode_that_fails_leaves_its_question_without_a_score(make_world):
  async def episode(prompt):
    yield prompt.tokens
    if prompt.item["number"] == 1:
      raise LookupError("no such page")

  written = written_alone(questions(3), episode)
  assert len(written) == 6
  failed = [one for one in written if one.failure]
  assert {one.question.number for one in failed} == {1} and len(failed) == 2
  assert failed[0].failure.reason == "episode: LookupError('no such page')"
  scored = answers_lib.scored(
    [written], rewards=tiny.Rewards(), num_slots=tiny.SIZES.num_slots
  )
  rewards = {
    (one.question.number, one.trajectory.reward is None) for one in scored
  }
  assert rewards == {(0, False), (1, True), (2, False)}


# -- fleets ------------------------------------------------------------------


def test_a_fleet_goes_on_with_groups_that_wait_for_their_environment(
  make_fleet,
):
  world = make_fleet(episode=two_turns_later, max_group_s=0.0, **LONG)
  world.begin()
  groups = world.train(2)
  # A replica that has written ends while episodes wait; its groups go to the
  # others.
  name, _ = fleet_world.writers(groups).most_common(1)[0]
  world.handles[int(name.removeprefix("replica "))].kill()
  groups += world.train(3, first=2)
  world.check_books()
  assert sorted(g.index for g in groups) == list(range(len(groups)))
  assert len({name for name in fleet_world.writers(groups)}) >= 2
  for group in groups:
    for t in group.trajectories:
      ends = np.flatnonzero(t.loss_mask[:-1] & ~t.loss_mask[1:])
      if len(ends):
        shown = t.tokens[ends[0] + 1 : ends[0] + 4]
        np.testing.assert_array_equal(shown, reply(t.tokens[: ends[0] + 1]))
      assert [e[:3] for e in t.events] == [("result", 1, 0)]
