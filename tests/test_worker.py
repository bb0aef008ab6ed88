"""The worker: from admission to the buffer, with everything on the way.

Most tests run it in this thread: a score, a step or a prompt stops it.
"""

import json
import threading

import numpy as np
import pytest
import tiny

from jaxrl_async import buffer as buffer_lib
from jaxrl_async import ledger as ledger_lib
from jaxrl_async import metrics
from jaxrl_async import tokenizer as tokenizer_lib
from jaxrl_async import types
from jaxrl_async.rewards import service
from jaxrl_async.rollout import worker as worker_lib

DEADLINE_S = 60.0
GROUP_SIZE = 3
MAX_COMPLETION = 14


class WatchedBuffer(buffer_lib.Buffer):
  """Calls `on_wait` when the worker has nothing to decode."""

  on_wait = staticmethod(lambda: None)

  def wait_for_admission(self, engine_version, seen_version, timeout_s):
    self.on_wait()
    return super().wait_for_admission(engine_version, seen_version, timeout_s)


class World:
  """A worker and what it works with; P = 2 groups a step, staleness 1."""

  def __init__(self, path, *, rewards=None, prompts=None, **options):
    self.buffer = WatchedBuffer(2, 1)
    self.rewards = rewards or tiny.Rewards()
    self.channel = tiny.channel()
    self.path = path / "ledger.jsonl"
    self.ledger = ledger_lib.Ledger(self.path, ledger_lib.LedgerState())
    self.scheduler = tiny.scheduler(cls=tiny.SteppedScheduler)
    self.adopted = []
    episode = options.pop("episode", None)
    settings = {
      "group_size": GROUP_SIZE,
      "max_completion_tokens": MAX_COMPLETION,
      "temperature": 1.0,
      "filter_zero_std": False,
      "max_failed_groups": 3,
    }
    self.worker = worker_lib.RolloutWorker(
      worker_lib.WorkerSettings(**(settings | options)),
      scheduler=self.scheduler,
      stream=prompts or tiny.Prompts(),
      buffer=self.buffer,
      channel=self.channel,
      rewards=self.rewards,
      ledger=self.ledger,
      tokenizer=tokenizer_lib.character_level(),
      busy=metrics.BusyClock(),
      on_adopt=self.adopted.append,
      **({"episode": episode} if episode else {}),
    )

  def run_until(self, is_over):
    """Runs in this thread until the buffer's state satisfies `is_over`."""
    num_looks = 0

    def look(num_steps=0):
      nonlocal num_looks
      num_looks += 1
      assert num_looks < 300
      if is_over(self.buffer.state()):
        self.worker.stop()

    self.scheduler.after_step = self.buffer.on_wait = look
    self.worker.run()
    self.scheduler.after_step = self.buffer.on_wait = lambda *_: None
    self.worker._is_stopping = False

  def lines(self):
    return [json.loads(line) for line in self.path.read_text().splitlines()]

  def in_flight(self):
    return [*self.worker.groups().values(), *self.buffer.state().finished]


@pytest.fixture
def make_world(tmp_path):
  worlds = []

  def make(**options):
    path = tmp_path / str(len(worlds))
    path.mkdir()
    worlds.append(World(path, **options))
    worlds[-1].buffer.set_policy_version(0)
    return worlds[-1]

  yield make
  for world in worlds:
    world.ledger.close()
    world.channel.close()


def finished(count):
  return lambda state: len(state.finished) >= count


def check_balance(world):
  state = world.ledger.state()
  ledger_lib.check_balance(
    generated=world.scheduler.stats.generated_tokens,
    trained=state.trained_tokens,
    filtered=state.filtered_tokens,
    failed=state.failed_tokens,
    in_flight=sum(g.num_completion_tokens for g in world.in_flight()),
  )
  assert world.scheduler.stats.generated_tokens > 0


def same_writing(group, other):
  """The same tokens; logprobs but for the shape of the program."""
  for a, b in zip(group.trajectories, other.trajectories, strict=True):
    assert (a.member, a.finish_reason) == (b.member, b.finish_reason)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.loss_mask, b.loss_mask)
    np.testing.assert_allclose(
      a.behavior_logprobs, b.behavior_logprobs, atol=1e-4
    )


def test_groups_reach_the_buffer_written_and_scored(make_world):
  world = make_world()
  world.run_until(finished(3))
  groups = world.buffer.state().finished
  assert world.adopted == [0]
  for group in groups:
    assert group.birth == 0
    assert group.deadline == 1
    assert group.prompt.item == {"number": group.index}
    times = [group.times_s[n] for n in ("admitted", "generated", "scored")]
    assert times == sorted(times)
    assert [t.member for t in group.trajectories] == [0, 1, 2]
    assert [t.reward for t in group.trajectories] == [0, 1, 2]
    n = len(group.prompt.tokens)
    for t in group.trajectories:
      np.testing.assert_array_equal(t.tokens[:n], group.prompt.tokens)
      assert 0 < t.num_completion_tokens <= MAX_COMPLETION
      assert t.finish_reason in (types.FinishReason.EOS, "length")
      (expected,) = tiny.trainer_logprobs(tiny.params(), [t.tokens])
      np.testing.assert_allclose(
        t.behavior_logprobs[n:], expected[n:], atol=1e-4
      )
  assert len({tuple(t.tokens) for g in groups for t in g.trajectories}) > 6
  check_balance(world)


def test_completions_are_scored_in_the_order_of_the_members(make_world):
  world = make_world()
  world.run_until(finished(2))
  decode = tokenizer_lib.character_level().decode
  texts = {item["number"]: texts for item, texts in world.rewards.submitted}
  for group in world.buffer.state().finished:
    assert texts[group.index] == [
      decode(t.tokens[t.loss_mask]) for t in group.trajectories
    ]


def test_no_more_is_admitted_than_the_bound_allows(make_world):
  # Versions 0 and 1 may use what version 0 begins: 2 steps of 2 groups.
  world = make_world()
  world.run_until(finished(3))
  state = world.buffer.state()
  assert state.next_index == 4


def test_in_a_thread_it_follows_the_trainer_over_several_steps(make_world):
  world = make_world()
  thread = threading.Thread(target=world.worker.run)
  thread.start()
  try:
    batches = []
    for step in range(4):
      batch = world.buffer.get_batch(step, DEADLINE_S)
      assert batch is not None
      batches.append(batch)
      weights = tiny.engine_params(0, seed=step % 2).weights
      world.channel.publish(weights, step + 1)
      world.buffer.set_policy_version(step + 1)
  finally:
    world.buffer.close()
    thread.join(DEADLINE_S)
  assert not thread.is_alive()
  assert "ended" in world.worker.status()
  for step, batch in enumerate(batches):
    assert len(batch) == 2
    for group in batch:
      for t in group.trajectories:
        assert step - t.policy_versions[t.loss_mask].min() <= 1
  assert world.adopted == sorted(set(world.adopted))
  assert max(world.adopted) > 1
  taken = sum(g.num_completion_tokens for b in batches for g in b)
  rest = sum(g.num_completion_tokens for g in world.in_flight())
  assert taken + rest == world.scheduler.stats.generated_tokens


def test_a_paused_worker_stands_between_two_calls_and_goes_on(make_world):
  world = make_world()
  thread = threading.Thread(target=world.worker.run)
  with pytest.raises(TimeoutError, match="no pause in 0.01 s"):
    with world.worker.paused(0.01):  # it has not begun
      raise AssertionError
  try:
    with world.worker._gate:  # so that the pause comes first
      world.worker._num_pausers += 1
    thread.start()
    with world.worker.paused(DEADLINE_S):
      with world.worker._gate:
        world.worker._num_pausers -= 1
      assert "paused" in world.worker.status()
      assert world.worker.groups() == {}
      assert world.scheduler.version == -1
      assert world.buffer.get_batch(0, 0.05) is None
      with world.worker.paused(DEADLINE_S):
        pass
      assert world.scheduler.num_steps == 0
    assert world.buffer.get_batch(0, DEADLINE_S) is not None
    with world.worker.paused(DEADLINE_S):
      check = world.scheduler.num_steps
      tokens = world.scheduler.stats.generated_tokens
      state = world.buffer.state()
      assert world.worker.groups().keys() == {a.index for a in state.running}
      assert world.scheduler.num_steps == check
      assert world.scheduler.stats.generated_tokens == tokens
  finally:
    world.worker.stop()
    thread.join(DEADLINE_S)
  assert not thread.is_alive()
  with world.worker.paused(0.01):  # an ended worker stands still, too
    pass


def test_a_newer_version_is_adopted_between_two_calls(make_world):
  world = make_world()
  seen = []

  def after_step(num_steps):
    seen.append(world.scheduler.version)
    if num_steps == 2:
      world.channel.publish(tiny.engine_params(0, seed=1).weights, 1)
    if num_steps == 6:
      world.worker.stop()

  # Step 0 has its batch, so that version 1 may exist.
  world.run_until(finished(2))
  assert world.buffer.get_batch(0, 0.0)
  world.scheduler.num_steps = 0
  world.scheduler.after_step = after_step
  world.worker.run()
  assert seen[:2] == [0, 0] and set(seen[2:]) == {1}
  assert world.adopted == [0, 1]


def test_the_status_says_since_when(make_world):
  world = make_world()
  world.worker._show("decoding")
  text, since_s = world.worker._status
  world.worker._show("decoding")
  assert world.worker._status == (text, since_s)
  assert "decoding since 0.0 s" in world.worker.status()
  world.worker._status = (text, since_s - 3.0)
  assert "decoding since 3." in world.worker.status()
  world.worker._show("paused")
  assert "paused since 0.0 s" in world.worker.status()


# -- rewards ---------------------------------------------------------------


def fail_odd(item, texts):
  if item["number"] % 2:
    return service.RewardFailure("error: odd", f"line {item['number']}")
  return [1.0] * len(texts)


def test_a_failed_reward_is_a_line_of_the_ledger_and_frees_its_place(
  make_world,
):
  world = make_world(rewards=tiny.Rewards(fail_odd), max_failed_groups=2)
  world.run_until(finished(3))
  state = world.buffer.state()
  assert all(group.index % 2 == 0 for group in state.finished)
  # The bound counts outstanding groups: failed ones made room for others.
  assert state.next_index > 4
  failed = world.lines()
  assert failed and all(line["index"] % 2 for line in failed)
  for line in failed:
    assert (line["fate"], line["reason"]) == ("failed", "error: odd")
    assert line["rewards"] == [None] * GROUP_SIZE
    assert line["index"] not in {a.index for a in state.running}
  assert world.ledger.state().failed_tokens == sum(
    sum(line["num_completion_tokens"]) for line in failed
  )
  check_balance(world)


def test_too_many_failures_in_a_row_raise_with_the_first_traceback(make_world):
  def score(item, texts):
    if item["number"] in (0, 2, 3, 4):
      return service.RewardFailure("error: no", f"line {item['number']}")
    return [0.0] * len(texts)

  # One group at a time, so that they end in order: 0 fails, 1 does not.
  world = make_world(rewards=tiny.Rewards(score), group_size=4)
  with pytest.raises(worker_lib.RewardError) as raised:
    world.run_until(lambda state: False)
  message = str(raised.value)
  assert "3 groups in a row failed (task.max_failed_groups)" in message
  assert "group 2: error: no\nline 2" in message
  assert [line["index"] for line in world.lines()] == [0, 2, 3, 4]
  assert "ended" in world.worker.status()


def test_groups_without_a_signal_are_filtered_when_asked_for(make_world):
  def score(item, texts):
    is_flat = item["number"] % 2
    return [0.5 if is_flat else float(i) for i in range(len(texts))]

  world = make_world(rewards=tiny.Rewards(score), filter_zero_std=True)
  world.run_until(finished(3))
  filtered = world.lines()
  assert filtered and {line["fate"] for line in filtered} == {"filtered"}
  assert all(line["index"] % 2 for line in filtered)
  assert filtered[0]["rewards"] == [0.5] * GROUP_SIZE
  assert all(g.index % 2 == 0 for g in world.buffer.state().finished)
  check_balance(world)
  other = make_world(rewards=tiny.Rewards(score))
  other.run_until(finished(3))
  assert other.lines() == []


def test_slow_scores_do_not_stop_decoding(make_world):
  world = make_world(rewards=tiny.Rewards(num_polls=8))
  world.run_until(finished(1))
  assert len(world.rewards.submitted) > 1
  check_balance(world)


# -- episodes --------------------------------------------------------------

REPLY = np.array([50, 51], np.int32)


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
  world.run_until(finished(3))
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
  check_balance(world)


def test_an_episode_that_raises_fails_its_group_alone(make_world):
  def episode(prompt):
    yield prompt.tokens
    if len(prompt.tokens) == 4:  # every fourth prompt
      raise LookupError("no such page")

  world = make_world(episode=episode)
  world.run_until(finished(4))
  (line, *_) = world.lines()
  assert line["index"] == 1
  assert line["reason"] == "episode: LookupError('no such page')"
  assert len(line["num_completion_tokens"]) == GROUP_SIZE
  assert 1 not in {g.index for g in world.buffer.state().finished}
  check_balance(world)


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
  world.run_until(finished(4))
  (line,) = world.lines()
  assert line["index"] == 1 and line["fate"] == "failed"
  assert line["reason"].startswith("episode: ") and words in line["reason"]
  assert 1 not in {g.index for g in world.buffer.state().finished}
  check_balance(world)


def test_an_episode_that_yields_nothing_to_append_fails_its_group(make_world):
  def episode(prompt):
    yield prompt.tokens
    if prompt.item["number"] == 2:
      yield np.zeros(0, np.int32)

  world = make_world(episode=episode)
  world.run_until(finished(4))
  (line,) = world.lines()
  assert line["index"] == 2
  assert line["reason"] == "episode: yielded a turn without tokens"
  check_balance(world)


def test_episodes_that_never_begin_end_the_run_with_the_first_traceback(
  make_world,
):
  def episode(prompt):
    raise LookupError("no such page")
    yield prompt.tokens

  world = make_world(episode=episode)
  with pytest.raises(worker_lib.RewardError) as raised:
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


@pytest.mark.parametrize("is_multi_turn", [False, True])
def test_partial_groups_are_taken_up_and_finish_as_if_never_interrupted(
  make_world, is_multi_turn
):
  options = {"max_completion_tokens": 24} if is_multi_turn else {}
  if is_multi_turn:
    options["episode"] = two_turns
  whole = make_world(**options)
  whole.run_until(finished(4))
  expected = {g.index: g for g in whole.buffer.state().finished}

  first = make_world(**options)
  first.run_until(lambda state: is_partial(first))
  state, groups = first.buffer.state(), first.worker.groups()
  assert groups.keys() == {a.index for a in state.running}
  generated = first.scheduler.stats.generated_tokens

  second = make_world(
    prompts=tiny.Prompts(first.worker.stream.count), **options
  )
  second.buffer.restore(state)
  second.worker.restore([(a, groups[a.index]) for a in state.running])
  second.scheduler.stats.generated_tokens = generated
  second.run_until(finished(4))
  continued = {g.index: g for g in second.buffer.state().finished}
  assert continued.keys() == expected.keys() == {0, 1, 2, 3}
  for index, group in continued.items():
    same_writing(group, expected[index])
    assert [t.reward for t in group.trajectories] == [0, 1, 2]
    assert group.prompt.prompt_id == f"tiny/train/{index}"
  check_balance(second)


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
  second.worker.restore([(a, groups[a.index]) for a in state.running])
  second.run_until(finished(4))
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
    prompts=tiny.Prompts(first.worker.stream.count), episode=changed, **options
  )
  second.buffer.restore(state)
  second.worker.restore([(a, groups[a.index]) for a in state.running])
  second.scheduler.stats.generated_tokens = sum(
    t.num_completion_tokens
    for g in [*groups.values(), *state.finished]
    for t in g.trajectories
  )
  second.run_until(finished(4))
  (line,) = second.lines()
  assert line["index"] == lost and line["fate"] == "failed"
  words = {"raises": "no such page", "says something else": "other prompts"}
  assert words[change] in line["reason"]
  assert line["num_completion_tokens"] == [
    t.num_completion_tokens for t in groups[lost].trajectories
  ]
  assert lost not in {g.index for g in second.buffer.state().finished}
  check_balance(second)
