"""Episodes that answer later, what they call, and what is recorded of it."""

import asyncio
import functools
import json
import threading
import time

import environment_calls as called
import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.rollout import call_outcome
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

PROMPT = types.Prompt(
  prompt_id="tiny/train/0", tokens=np.arange(3, dtype=np.int32), item={}
)
WRITTEN = tiny.turn(np.array([7, 8], np.int32))
LIMIT = 64
CLOSE_S = 30.0


@pytest.fixture
def make():
  """Makes environments, and closes them after the test."""
  made = []

  def make(episode, **options):
    made.append(environment_lib.Environment(episode, **options))
    return made[-1]

  yield make
  for one in made:
    one.close(CLOSE_S)


def play(environment, num_turns=1, **options):
  """Plays an episode; gives what it yields, and its conversation."""
  one = environment.open(PROMPT, key=(0, 2), limit=LIMIT, **options)
  shown = [environment.settled(one.begin()).tokens]
  for _ in range(num_turns):
    shown.append(environment.settled(one.send(WRITTEN)).tokens)
  return shown, one


def calls(make, *arguments, **options):
  """What one call comes to: its result or its reason, and its event."""
  found = []

  async def episode(prompt, context):
    yield prompt.tokens
    try:
      found.append(await context.call(*arguments, **options))
    except episode_lib.CallError as error:
      found.append(error.reason)

  _, one = play(make(episode))
  (event,) = one.context.events
  return found[0], event


def test_a_call_gives_what_is_stored_of_its_result(make):
  for function in (called.keys, functools.partial(called.returns, "a")):
    found, event = calls(make, function)
    assert found == function() and type(found) is type(function())
    assert event[:3] == ("result", 1, 0)
  assert calls(make, called.naps, 0.0)[0] == 0.0


def nested(depth):
  """A list in a list in a list, and so on."""
  made = []
  for _ in range(depth):
    made = [made]
  return made


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ([called.raises], "error: LookupError: no such page"),
    ([called.ends_its_process], "died: the process of ends_its_process ended"),
    ([called.sleeps, 60.0], "timeout: sleeps took longer than 1 s"),
    ([called.naps, 60.0], "timeout: naps took longer than 1 s"),
    ([called.returns_an_object], "unstorable: the call returned"),
    ([lambda: 1], "error: ValueError: "),
    ([called.returns, lambda: 1], "error: "),
    ([called.returns, nested(900)], "error: RecursionError: "),
  ],
)
def test_a_call_that_fails_is_an_error_with_its_reason(make, arguments, words):
  reason, event = calls(make, *arguments, timeout_s=1.0)
  assert reason.startswith(words)
  assert event == ("error", 1, 0, reason)


def test_a_result_has_a_bound():
  kind, text = call_outcome.of_value("x" * (call_outcome.MAX_BYTES - 2))
  assert kind is types.EventKind.RESULT
  kind, text = call_outcome.of_value("x" * (call_outcome.MAX_BYTES - 1))
  assert kind is types.EventKind.ERROR
  assert text.startswith("unstorable: the call returned 16777217 bytes")


def test_a_call_is_tried_again_as_often_as_asked(make, tmp_path):
  for retries, expected in ((2, 3), (1, "error: ConnectionError: not yet")):
    path = tmp_path / str(retries)
    found, _ = calls(make, called.fails_until, path, 3, retries=retries)
    assert found == expected
    assert len(called.lines(path)) == retries + 1


def test_recorded_calls_are_not_made_again(make, tmp_path):
  path = tmp_path / "calls"

  async def episode(prompt, context):
    written = yield prompt.tokens
    counts = await asyncio.gather(
      context.call(called.note, str(path), "a"),
      context.call(called.note_there, str(path), "b"),
    )
    context.reward(0.5, parts={"right": 1.0})
    with pytest.raises(episode_lib.CallError):
      await context.call(called.raises)
    yield np.array([*counts, *written])

  (first, second), one = play(make(episode))
  assert sorted(second.tolist()) == [1, 2, 7, 8]
  assert sorted(called.lines(path)) == ["a", "b"]
  events = one.context.events
  kinds = ["result", "result", "error", "reward", "parts"]
  assert [e.kind for e in events] == kinds
  assert [e.number for e in events] == [0, 1, 2, -1, -1]
  of_turn = [(e.turn, json.loads(e.text)) for e in events[3:]]
  assert of_turn == [(0, 0.5), (0, {"right": 1.0})]

  again, other = play(make(episode, is_replay=True), events=events)
  np.testing.assert_array_equal(again[1], second)
  assert other.context.events == events
  assert len(called.lines(path)) == 2
  # What is missing is made again, or fails a replay.
  play(make(episode), events=events[1:])
  assert sorted(called.lines(path)) == ["a", "a", "b"]
  with pytest.raises(episode_lib.EpisodeError, match="not in the record"):
    play(make(episode, is_replay=True), events=events[1:])


def test_an_episode_goes_on_where_its_trajectory_stopped(make):
  def here(prompt, context):
    for number in range(3):
      written = yield prompt.tokens + number + context.num_turns
      context.reward(float(written[0]))

  async def there(prompt, context):
    for number in range(3):
      written = yield prompt.tokens + number + context.num_turns
      context.reward(float(written[0]))

  for episode in (here, there):
    whole, one = play(make(episode), num_turns=3)
    assert whole[3] is None
    trajectory = episode_lib.First(whole[0]).trajectory(2)
    for number in (1, 2):
      trajectory = episode_lib.extend(trajectory, WRITTEN.tokens)
      trajectory.loss_mask[-2:] = True
      if number == 1:
        trajectory = episode_lib.extend(trajectory, whole[1])
    environment = make(episode)
    # Within the second completion, after it, and in what is no record of it.
    other = environment.open(PROMPT, key=(0, 2), limit=9, recorded=[trajectory])
    assert not len(environment.settled(other.begin()).tokens)
    trajectory.finish_reason = types.FinishReason.EOS
    other = environment.open(
      PROMPT, key=(0, 2), limit=LIMIT, recorded=[trajectory]
    )
    shown = environment.settled(other.begin()).tokens
    np.testing.assert_array_equal(shown, whole[2])
    assert other.context.events == one.context.events[:2]
    assert other.context.room == LIMIT - len(trajectory.tokens) - 3
    trajectory.tokens[0] += 1
    other = environment.open(
      PROMPT, key=(0, 2), limit=LIMIT, recorded=[trajectory]
    )
    with pytest.raises(episode_lib.EpisodeError, match="other prompts"):
      environment.settled(other.begin())


def test_an_episode_is_told_of_its_member_its_room_and_its_turns(make):
  seen = []

  async def episode(prompt, context):
    for _ in range(3):
      seen.append((context.member, context.num_turns, context.room))
      yield prompt.tokens
    seen.append((context.member, context.num_turns, context.room))

  play(make(episode, max_turns=3), num_turns=3)
  assert seen == [(2, 0, 64), (2, 1, 59), (2, 2, 54), (2, 3, 0)]


A, B, END = 7, 8, tokenizer_lib.character_level().eos_id


@pytest.mark.parametrize(
  ("written", "ends", "reason"),
  [
    ([A, B], {}, "eos"),  # as the run says, whatever that was
    ([A, B], {"max_tokens": 3}, "eos"),
    ([A, B], {"max_tokens": 2}, "length"),
    ([A, END], {"max_tokens": 2}, "eos"),
    ([A, B], {"max_tokens": 2, "stop_token_ids": [B]}, "eos"),
    ([A, B], {"max_tokens": 2, "stop": "text of B"}, "eos"),
  ],
)
def test_an_episode_is_told_whether_a_turn_was_cut_off(
  make, written, ends, reason
):
  tokenizer = tokenizer_lib.character_level()
  if "stop" in ends:
    ends = {**ends, "stop": tokenizer.decode([B])}
  seen = []

  def episode(prompt, context):
    yield episode_lib.Until(prompt.tokens, **ends)
    seen.append(context.written.finish_reason)

  one = make(episode, tokenizer=tokenizer).open(PROMPT, key=(0, 0), limit=LIMIT)
  assert one.begin().ends == episode_lib.Until([], **ends).ends
  one.send(tiny.turn(np.array(written, np.int32)))
  assert seen == [reason]


@pytest.mark.parametrize(
  "ends",
  [{"max_tokens": -1}, {"stop": [""]}, {"stop_token_ids": range(9)}]
  + [{"stop_token_ids": [2**31]}, {"guide": {"type": "object"}}],
)
def test_an_end_that_no_turn_can_have_fails_the_episode(make, ends):
  def episode(prompt):
    yield episode_lib.Until(prompt.tokens, **ends)

  with pytest.raises(episode_lib.EpisodeError, match=next(iter(ends))):
    play(make(episode))


def test_a_sync_episode_cannot_wait_for_a_call(make):
  def episode(prompt, context):
    yield prompt.tokens
    context.call(called.keys)

  with pytest.raises(episode_lib.EpisodeError, match="only an async gen"):
    play(make(episode))


@pytest.mark.parametrize("value", [float("nan"), "much", None])
def test_a_reward_is_a_number_and_for_a_turn(make, value):
  def episode(prompt, context):
    yield prompt.tokens
    context.reward(value)

  def early(prompt, context):
    context.reward(1.0)
    yield prompt.tokens

  with pytest.raises(episode_lib.EpisodeError, match="reward|float"):
    play(make(episode))
  with pytest.raises(episode_lib.EpisodeError, match="before the first turn"):
    play(make(early))


def test_parts_of_budgets_are_not_for_other_episodes(make):
  def episode(prompt, context):
    yield prompt.tokens
    context.reward(0.0, parts={"right": 1.0, types.THOUGHT_TOKENS: 2.0})

  words = "'budget/thought_tokens' .* those of the episode budgets"
  with pytest.raises(episode_lib.EpisodeError, match=words):
    play(make(episode))


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
  ("yielded", "words"),
  [
    (None, "yielded None"),
    ([], "without tokens"),
    ("text", "yielded str 'text', not an array"),
    ([1.5], "not integers"),
    ([[1, 2]], "not an array"),
    ([[1], [1, 2]], "not token ids"),
    ([3, 100], "token 100, and the vocabulary has 100"),
    ([-1], "token -1"),
    ([2**70], "yielded list"),
    (object(), "not an array"),
  ],
)
def test_what_is_no_prompt_fails_the_episode(make, yielded, words, is_async):
  def here(prompt):
    yield prompt.tokens
    yield yielded

  async def there(prompt):
    yield prompt.tokens
    yield yielded

  with pytest.raises(episode_lib.EpisodeError, match=words):
    play(make(there if is_async else here, vocab_size=100))


@pytest.mark.parametrize(
  "error", [LookupError("no such page"), SystemExit(3), TimeoutError("mine")]
)
def test_what_an_async_episode_raises_is_its_failure(make, error):
  async def episode(prompt):
    yield prompt.tokens
    raise error

  environment = make(episode, timeout_s=60.0)
  with pytest.raises(episode_lib.EpisodeError) as raised:
    play(environment)
  assert str(raised.value) == repr(error)
  assert raised.value.__cause__ is error

  async def other(prompt):
    yield prompt.tokens

  assert play(make(other))[0][1] is None


def test_an_async_episode_that_never_begins_fails(make):
  async def episode(prompt):
    return
    yield prompt.tokens

  with pytest.raises(episode_lib.EpisodeError, match="before its first turn"):
    play(make(episode))


def test_an_episode_that_hangs_is_closed_when_its_time_is_up(make):
  closed = threading.Event()

  async def episode(prompt):
    try:
      yield prompt.tokens
      await asyncio.sleep(600.0)
    finally:
      closed.set()

  environment = make(episode, timeout_s=0.2)
  with pytest.raises(episode_lib.EpisodeError, match=r"timeout: .*0\.2 s"):
    play(environment)
  assert closed.wait(CLOSE_S)


def test_an_episode_that_holds_the_loop_fails_too(make, monkeypatch):
  monkeypatch.setattr(environment_lib, "_GRACE_S", 0.1)
  release = threading.Event()

  async def episode(prompt):
    yield prompt.tokens
    release.wait(CLOSE_S)

  environment = make(episode, timeout_s=0.2)
  try:
    with pytest.raises(episode_lib.EpisodeError, match="timeout"):
      play(environment)
  finally:
    release.set()
  assert environment.num_waiting == 0


def test_the_turns_of_the_policy_are_not_its_time(make):
  async def episode(prompt):
    yield prompt.tokens
    yield prompt.tokens

  environment = make(episode, timeout_s=0.5)
  one = environment.open(PROMPT, key=(0, 0), limit=LIMIT)
  environment.settled(one.begin())
  time.sleep(0.6)
  assert environment.settled(one.send(WRITTEN)).tokens is not None


def test_a_closed_episode_ends_its_calls_and_is_left_by_its_own_task(make):
  entered, left = [], []
  is_calling, is_left = threading.Event(), threading.Event()

  async def episode(prompt, context):
    entered.append(asyncio.current_task())
    try:
      yield prompt.tokens
      is_calling.set()
      await context.call(called.sleeps, 600.0, timeout_s=600.0)
    finally:
      left.append(asyncio.current_task())
      is_left.set()

  environment = make(episode)
  one = environment.open(PROMPT, key=(0, 0), limit=LIMIT)
  environment.settled(one.begin())
  assert one.send(WRITTEN) is None
  assert is_calling.wait(CLOSE_S)
  one.close()
  assert environment.num_waiting == 0
  assert is_left.wait(CLOSE_S)
  environment.close(CLOSE_S)
  assert left == entered and len(left) == 1
  assert environment.answers.empty()


def test_which_arguments_an_episode_takes_is_found_from_it():
  def plain(prompt):
    yield prompt.tokens

  async def with_context(prompt, context, *, tools=()):
    yield prompt.tokens

  def with_params(prompt, attempts=2):
    yield prompt.tokens

  class Made:
    async def __call__(self, prompt, context):
      yield prompt.tokens

  bound = functools.partial(with_context, tools=(1,))
  wants = environment_lib.wants_context
  assert [wants(x) for x in (plain, with_context, bound, with_params)] == [
    *(False, True, True, False)
  ]
  found = [environment_lib.is_async(x) for x in (plain, bound, Made())]
  assert found == [False, True, True] and wants(Made())
