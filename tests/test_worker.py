"""The worker: from admission to the buffer, with everything on the way.

Most tests run it in this thread: a score, a step or a prompt stops it.
"""

import threading

import numpy as np
import pytest
import tiny
import worker_world

from jaxrl_async import types
from jaxrl_async.rewards import cut_scores
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.weights import weight_transfer

DEADLINE_S = 60.0


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


def test_groups_reach_the_buffer_written_and_scored(make_world):
  world = make_world()
  world.run_until(worker_world.finished(3))
  groups = world.buffer.state().finished
  assert world.adopted == [0]
  for group in groups:
    assert (group.admission.birth, group.admission.deadline) == (0, 1)
    assert group.prompt.item == {"number": group.index}
    times = [group.times_s[n] for n in ("admitted", "generated", "scored")]
    assert times == sorted(times)
    assert [t.member for t in group.trajectories] == [0, 1, 2]
    assert [t.score for t in group.trajectories] == [0, 1, 2]
    n = len(group.prompt.tokens)
    for t in group.trajectories:
      np.testing.assert_array_equal(t.tokens[:n], group.prompt.tokens)
      assert 0 < t.num_completion_tokens <= worker_world.MAX_COMPLETION
      assert t.finish_reason in (types.FinishReason.EOS, "length")
      (expected,) = tiny.trainer_logprobs(tiny.params(), [t.tokens])
      np.testing.assert_allclose(
        t.behavior_logprobs[n:], expected[n:], atol=1e-4
      )
  assert len({tuple(t.tokens) for g in groups for t in g.trajectories}) > 6
  worker_world.check_balance(world)


def test_completions_are_scored_in_the_order_of_the_members(make_world):
  world = make_world()
  world.run_until(worker_world.finished(2))
  decode = tokenizer_lib.character_level().decode
  texts = {item["number"]: texts for item, texts in world.rewards.submitted}
  for group in world.buffer.state().finished:
    assert [c.text for c in texts[group.index]] == [
      decode(t.tokens[t.loss_mask]) for t in group.trajectories
    ]


def test_no_more_is_admitted_than_the_bound_allows(make_world):
  # Versions 0 and 1 may use what version 0 begins: 2 steps of 2 groups.
  world = make_world()
  world.run_until(worker_world.finished(3))
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
    with world.worker._gate._condition:  # so that the pause comes first
      world.worker._gate._num_pausers += 1
    thread.start()
    with world.worker.paused(DEADLINE_S):
      with world.worker._gate._condition:
        world.worker._gate._num_pausers -= 1
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


def test_a_pause_is_awaited_by_the_clock_of_the_gate():
  looks = []

  def seconds():  # stands still, as while the thread compiles
    looks.append(0.0)
    if len(looks) == 20:
      thread.start()
    return 0.0

  gate = rollout_side.Gate(seconds)
  thread = threading.Thread(target=gate.passes)
  with gate.paused(0.01, lambda: "compiling"):
    assert len(looks) >= 20
  thread.join(DEADLINE_S)
  assert not thread.is_alive()


def test_a_newer_version_is_fetched_beside_decoding_and_adopted_between_calls(
  make_world,
):
  world = make_world()
  seen, may_read = [], threading.Event()
  adopt = world.channel.adopt

  def slow_adopt(newer_than):
    if newer_than == 0:
      assert may_read.wait(DEADLINE_S)
    return adopt(newer_than)

  def after_step(num_steps):
    seen.append(world.scheduler.version)
    if num_steps == 2:
      world.channel.publish(tiny.engine_params(0, seed=1).weights, 1)
    if num_steps == 5:
      assert not world.replica.has_newer_weights()
      may_read.set()
      world.replica.wait_for_weights(DEADLINE_S)
      assert world.replica.has_newer_weights()
    if num_steps == 7:
      world.worker.stop()

  world.channel.adopt = slow_adopt
  # Step 0 has its batch, so that version 1 may exist.
  world.run_until(worker_world.finished(2))
  assert world.buffer.get_batch(0, 0.0)
  world.scheduler.num_steps = 0
  world.scheduler.after_step = after_step
  world.worker.run()
  assert seen == [0, 0, 0, 0, 0, 1, 1]
  assert world.adopted == [0, 1]


def test_a_version_that_cannot_be_read_ends_the_worker(make_world):
  world = make_world()

  def broken(newer_than):
    raise weight_transfer.WeightTransferError("version 0 is not adopted")

  world.channel.adopt = broken
  with pytest.raises(weight_transfer.WeightTransferError, match="version 0 is"):
    world.worker.run()
  assert "ended" in world.worker.status()


def test_the_status_says_since_when(make_world):
  world = make_world()
  world.worker._gate.show("decoding")
  text, since_s = world.worker._gate._status
  world.worker._gate.show("decoding")
  assert world.worker._gate._status == (text, since_s)
  assert "decoding since " in world.worker.status()
  world.worker._gate._status = (text, since_s - 3000.0)
  assert "decoding since 30" in world.worker.status()
  world.worker._gate.show("paused")
  assert "paused since 30" not in world.worker.status()


# -- rewards ---------------------------------------------------------------


def fail_odd(item, texts):
  if item["number"] % 2:
    return service_lib.RewardFailure("error: odd", f"line {item['number']}")
  return [1.0] * len(texts)


def test_a_failed_reward_is_a_line_of_the_ledger_and_frees_its_place(
  make_world,
):
  world = make_world(rewards=tiny.Rewards(fail_odd), max_failed_groups=2)
  world.run_until(worker_world.finished(3))
  state = world.buffer.state()
  assert all(group.index % 2 == 0 for group in state.finished)
  # The bound counts outstanding groups: failed ones made room for others.
  assert state.next_index > 4
  failed = world.lines()
  assert failed and all(line["index"] % 2 for line in failed)
  for line in failed:
    assert (line["fate"], line["reason"]) == ("failed", "error: odd")
    assert line["rewards"] == [None] * worker_world.GROUP_SIZE
    assert line["index"] not in {a.index for a in state.running}
  assert world.ledger.state().failed_tokens == sum(
    sum(line["num_completion_tokens"]) for line in failed
  )
  worker_world.check_balance(world)


@pytest.mark.parametrize("filtered", [False, True])
def test_a_group_goes_on_without_the_member_that_cannot_be_scored(
  make_world, filtered
):
  failure = service_lib.RewardFailure("timeout: too long")

  def score(item, texts):
    scores = [1.0] * len(texts) if filtered else list(range(len(texts)))
    return [*scores[:-1], failure]

  world = make_world(
    rewards=tiny.Rewards(score), max_failed_groups=1, filter_zero_std=filtered
  )
  if filtered:
    world.run_until(lambda state: state.next_index > 4)
  else:
    world.run_until(worker_world.finished(2))
    groups = world.buffer.state().finished
    for group in groups:
      assert [t.member for t in group.trajectories] == [
        *range(worker_world.GROUP_SIZE - 1)
      ]
      assert [t.score for t in group.trajectories] == [
        *range(worker_world.GROUP_SIZE - 1)
      ]
    world.ledger.add_trained(
      world.buffer.get_batch(0, 1.0), step=0, skipped_update=False
    )
    world.buffer.set_policy_version(1)
  lines = world.lines()
  assert {line["fate"] for line in lines} == {
    "filtered" if filtered else "trained"
  }
  told = {g.index: (g, why) for g, fate, why in world.untrained if why}
  for line in lines:
    (dropped,) = line["dropped"]
    alone, why = told[line["index"]]
    assert [t.member for t in alone.trajectories] == [dropped["member"]]
    assert why == dropped["reason"]
    assert dropped["member"] == worker_world.GROUP_SIZE - 1
    assert dropped["reason"] == "timeout: too long"
    assert dropped["num_completion_tokens"] > 0
    assert len(line["rewards"]) == worker_world.GROUP_SIZE - 1
  assert world.ledger.state().failed_tokens == sum(
    line["dropped"][0]["num_completion_tokens"] for line in lines
  )
  worker_world.check_balance(world)


def test_what_is_left_alone_of_a_group_says_nothing_of_its_question(make_world):
  failure = service_lib.RewardFailure("error: no")

  def score(item, texts):
    num_scored = 1 + item["number"] % 2
    return [1.0] * num_scored + [failure] * (len(texts) - num_scored)

  # One group at a time, so that they end in order.
  world = make_world(
    rewards=tiny.Rewards(score),
    group_size=4,
    filter_zero_std=True,
    max_filtered_groups=3,
  )
  with pytest.raises(coordinator_lib.RewardError) as raised:
    world.run_until(lambda state: False)
  assert str(raised.value).endswith(
    "the last reward was 1: 3 completions of this group could not be scored"
    " (error: no)"
  )


def test_too_many_failures_in_a_row_raise_with_the_first_traceback(make_world):
  def score(item, texts):
    if item["number"] in (0, 2, 3, 4):
      return service_lib.RewardFailure("error: no", f"line {item['number']}")
    return [0.0] * len(texts)

  # One group at a time, so that they end in order: 0 fails, 1 does not.
  world = make_world(rewards=tiny.Rewards(score), group_size=4)
  with pytest.raises(coordinator_lib.RewardError) as raised:
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
  world.run_until(worker_world.finished(3))
  filtered = world.lines()
  assert filtered and {line["fate"] for line in filtered} == {"filtered"}
  assert all(line["index"] % 2 for line in filtered)
  assert filtered[0]["rewards"] == [0.5] * worker_world.GROUP_SIZE
  assert all(g.index % 2 == 0 for g in world.buffer.state().finished)
  worker_world.check_balance(world)
  other = make_world(rewards=tiny.Rewards(score))
  other.run_until(worker_world.finished(3))
  assert other.lines() == []


def test_too_many_filtered_groups_in_a_row_end_the_run_with_the_setting(
  make_world,
):
  def score(item, texts):
    is_flat = item["number"] not in (0, 3)
    return [0.5 if is_flat else float(i) for i in range(len(texts))]

  # One group at a time, so that they end in order: 0 and 3 are not filtered.
  world = make_world(
    rewards=tiny.Rewards(score),
    group_size=4,
    filter_zero_std=True,
    max_filtered_groups=3,
  )
  with pytest.raises(coordinator_lib.RewardError) as raised:
    world.run_until(lambda state: False)
  assert str(raised.value) == (
    "3 groups in a row had equal rewards and were left out"
    " (algorithm.filter_zero_std); the last reward was 0.5: the questions are"
    " too easy or too hard"
  )
  assert [line["index"] for line in world.lines()] == [1, 2, 4, 5, 6]
  worker_world.check_balance(world)


def test_slow_scores_do_not_stop_decoding(make_world):
  world = make_world(rewards=tiny.Rewards(num_polls=8))
  world.run_until(worker_world.finished(1))
  assert len(world.rewards.submitted) > 1
  worker_world.check_balance(world)


class LatePrompts(tiny.Prompts):
  """Every prompt is there only after the worker has looked a few times."""

  def __init__(self, num_looks):
    super().__init__()
    self.num_looks = self.looks_left = num_looks
    self.scheduler = None
    self.was_idle = []  # the scheduler, while there was no prompt

  def is_ready(self, timeout_s=0.0):
    self.looks_left -= 1
    if self.looks_left > 0:
      self.was_idle.append(self.scheduler.is_idle)
    return self.looks_left <= 0

  def next(self):
    assert self.looks_left <= 0, "it would have held up the thread"
    self.looks_left = self.num_looks
    return super().next()


def test_a_question_that_is_not_made_yet_holds_nobody_up(make_world):
  late = LatePrompts(3)
  world = make_world(prompts=late)
  late.scheduler = world.scheduler
  world.run_until(worker_world.finished(3))
  indices = [group.index for group in world.buffer.state().finished]
  assert sorted(indices) == [0, 1, 2]
  assert set(late.was_idle) == {True, False}
  worker_world.check_balance(world)


def test_a_group_whose_tokens_are_scored_teaches_something(make_world):
  def score(item, completions):
    scores = {0: 1.0} if item["number"] % 2 == 0 else None
    reward = types.Reward(score=0.5, token_scores=scores)
    return [reward] * len(completions)

  settings = {"filter_zero_std": True, "reads_token_scores": True}
  world = make_world(rewards=tiny.Rewards(score), **settings)
  world.run_until(worker_world.finished(3))
  assert {line["index"] % 2 for line in world.lines()} == {1}
  assert {g.index % 2 for g in world.buffer.state().finished} == {0}
  worker_world.check_balance(world)


def test_equal_scores_of_answers_after_budgets_teach_nothing(make_world):
  def score(item, completions):
    flat = item["number"] % 2
    return [
      types.Reward(
        score=0.5,
        parts={
          types.THOUGHT_TOKENS: 9.0,
          cut_scores.part(2): 0.0 if flat else float(i),
        },
        token_scores={0: 0.0},
      )
      for i in range(len(completions))
    ]

  settings = {"filter_zero_std": True, "reads_token_scores": True}
  world = make_world(rewards=tiny.Rewards(score), budgets=(2,), **settings)
  world.run_until(worker_world.finished(3))
  assert {line["index"] % 2 for line in world.lines()} == {1}
  assert {g.index % 2 for g in world.buffer.state().finished} == {0}
  worker_world.check_balance(world)


def test_branches_are_learned_whatever_parts_their_episode_gives(make_world):
  def episode(prompt, context):
    for number in range(3):
      yield episode_lib.Anew(prompt.tokens) if number else prompt.tokens
      context.reward(1.0, parts={"thought_tokens": 120.0})

  world = make_world(episode=episode)
  world.run_until(worker_world.finished(2))
  for group in world.buffer.state().finished:
    for branches in group.branches():
      assert branches[0].reward_parts() == {"thought_tokens": 360}
      assert len(branches) == 3 and types.learned(branches) == branches


def test_scores_of_tokens_that_nothing_reads_teach_nothing(make_world):
  def score(item, completions):
    flat = item["number"] % 2
    return [
      types.Reward(score=0.5 if flat else float(i), token_scores={0: 1.0})
      for i in range(len(completions))
    ]

  world = make_world(rewards=tiny.Rewards(score), filter_zero_std=True)
  world.run_until(worker_world.finished(3))
  assert {line["index"] % 2 for line in world.lines()} == {1}
  assert {g.index % 2 for g in world.buffer.state().finished} == {0}
  worker_world.check_balance(world)
