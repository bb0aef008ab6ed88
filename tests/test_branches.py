"""Episodes that begin anew, so that a member has several trajectories."""

import asyncio
import dataclasses
import json
import threading

import environment_calls as called
import fleet_world
import numpy as np
import pytest
import reward_groups
import test_async_episode
import test_replay
import test_rewriting
import test_run
import test_train_step
import tiny
import waiting
import worker_world

from jaxrl_async import types
from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.config import sections
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import scoring
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import running_group
from jaxrl_async.run import train as train_lib
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.training import packing
from jaxrl_async.training import step_metrics

LONG = {"max_completion_tokens": 24}
LOOKS = 100_000
SHOWN = np.array([50, 51], np.int32)


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


@pytest.fixture
def make_fleet(tmp_path):
  yield from fleet_world.worlds(tmp_path)


def forks(prompt, context):
  """Member m begins anew m times, each time with two tokens of its own.

  Before and in each of its branches it has a second turn if there is room.
  """
  written = yield prompt.tokens
  context.reward(1.0)
  for number in range(context.member + 1):
    if number:
      begin = np.concatenate([prompt.tokens, written[:2]])
      written = yield episode_lib.Anew(begin)
      context.reward(float(10**number))
    if context.room > len(SHOWN):
      yield SHOWN


async def forks_later(prompt, context):
  """The same, which waits before each branch."""
  turns = forks(prompt, context)
  shown = next(turns)
  while True:
    written = yield shown
    await context.call(pause, int(written[0]))
    try:
      shown = turns.send(written)
    except StopIteration:
      return


async def pause(token):
  await asyncio.sleep(0.001 * (token % 5))
  return token


def finished(world, count=4):
  world.run_until(worker_world.finished(count), LOOKS)
  return sorted(world.buffer.state().finished, key=lambda g: g.index)


def check_branches(groups):
  """Each branch begins with what `forks` says, and nothing is lost."""
  for group in groups:
    members = group.branches()
    assert [len(branches) for branches in members] == [1, 2, 3]
    for member, branches in enumerate(members):
      numbers = [member + k * types.MEMBERS for k in range(len(branches))]
      assert [t.member for t in branches] == numbers
      size = len(group.prompt.tokens)
      begin = group.prompt.tokens
      for trajectory in branches:
        assert trajectory.tokens[: len(begin)].tolist() == begin.tolist()
        assert not trajectory.loss_mask[: len(begin)].any()
        rest = (
          trajectory.tokens[len(begin) :],
          trajectory.loss_mask[len(begin) :],
        )
        shown = rest[0][~rest[1]]
        assert shown.tolist() in ([], SHOWN.tolist())
        turn = next(episode_lib.recorded_turns([trajectory])).completion
        begin = np.concatenate([begin[:size], turn.tokens[:2]])
        assert (trajectory.policy_versions >= 0).tolist() == (
          trajectory.loss_mask.tolist()
        )
        assert (trajectory.behavior_logprobs != 0).tolist() == (
          trajectory.loss_mask.tolist()
        )
        assert sum(n for _, n in trajectory.writers) == (
          trajectory.num_completion_tokens
        )
      # The rewards of all turns are with the first branch.
      assert not any(t.events for t in branches[1:])
      given = list(branches[0].turn_rewards().values())
      assert given == [float(10**k) for k in range(member + 1)]


def content(groups):
  return {
    (g.index, t.member): (t.tokens.tolist(), t.loss_mask.tolist())
    for g in groups
    for t in g.trajectories
  }


def test_each_token_that_was_written_is_learned_from_once(make_world):
  world = make_world(episode=forks, **LONG)
  groups = finished(world)
  check_branches(groups)
  worker_world.check_balance(world)
  # Some have a second turn in a later branch.
  assert any(
    episode_lib.num_turns(t) == 2
    for g in groups
    for t in g.trajectories
    if t.member >= types.MEMBERS
  )
  later = make_world(episode=forks_later, **LONG)
  found = finished(later)
  assert content(found) == content(groups)
  for group in found:
    for branches in group.branches():
      calls = [e for e in branches[0].events if e.kind == "result"]
      turns = sum(map(episode_lib.num_turns, branches))
      assert [e.turn for e in calls] == [*range(1, turns + 1)]
  worker_world.check_balance(later)


def test_a_fork_of_the_same_context_draws_other_tokens(make_world):
  def twice(prompt):
    yield prompt.tokens
    yield episode_lib.Anew(prompt.tokens)

  groups = finished(make_world(episode=twice))
  differ = 0
  for group in groups:
    for first, second in group.branches():
      size = len(group.prompt.tokens)
      assert second.tokens[:size].tolist() == first.tokens[:size].tolist()
      differ += first.tokens.tolist() != second.tokens.tolist()
      # Its own number decides the tokens.
      alone = tiny.sequence(
        group.prompt.tokens,
        group=group.index,
        member=second.member,
        limit=size + worker_world.MAX_COMPLETION,
      )
      tiny.write_all(tiny.ready(), [alone])
      assert alone.trajectory().tokens.tolist() == second.tokens.tolist()
  assert differ > len(groups)


def test_the_first_prompt_may_be_anew(make_world):
  def first(prompt):
    yield episode_lib.Anew(prompt.tokens)

  expected = content(finished(make_world()))
  assert content(finished(make_world(episode=first))) == expected


@pytest.mark.parametrize(
  ("tokens", "words"),
  [
    ([], "yielded a turn without tokens"),
    ([97], "and the vocabulary has 97"),
    (episode_lib.Anew(np.arange(3)), "not an array of token ids"),
  ],
)
def test_a_prompt_that_is_none_fails_its_group(make_world, tokens, words):
  def wrong(prompt):
    yield prompt.tokens
    if prompt.item["number"] == 0:
      yield episode_lib.Anew(tokens)

  world = make_world(episode=wrong, environment={"vocab_size": 97})
  finished(world, 3)
  (line,) = [x for x in world.lines() if x["fate"] == "failed"]
  assert line["index"] == 0 and words in line["reason"]
  worker_world.check_balance(world)


# -- limits ------------------------------------------------------------------


def test_ten_forks_and_endless_ones_end(tmp_path):
  rooms, tokens = [], np.arange(10, 15)

  def ten(prompt, context):
    yield prompt.tokens
    for _ in range(10):
      yield episode_lib.Anew(tokens)
      rooms.append(context.limit - context.room)

  def endless(prompt):
    while True:
      yield episode_lib.Anew(prompt.tokens)

  def wide(prompt, context):
    yield prompt.tokens
    yield episode_lib.Anew(np.full(context.limit - 1, 9))
    yield episode_lib.Anew(np.full(context.limit, 9))

  eos, length = types.FinishReason.EOS, types.FinishReason.LENGTH
  for episode, count, last in (
    (ten, 11, eos),
    (endless, episode_lib.MAX_BRANCHES, length),
    (wide, 2, length),
  ):
    coordinator, environment, buffer, ledger = (
      test_async_episode.make_coordinator(tmp_path, episode, 1, 2)
    )
    replica = test_async_episode.WritingReplica(coordinator)
    ask = test_async_episode.messages.Ask(replica="one", version=0, room=2)
    replica.take(coordinator.admit(ask))
    while replica.turns:
      assert len(replica.turns) == 2  # a branch of each member at a time
      replica.step()
    coordinator.collect_scores()
    (group,) = buffer.state().finished
    for branches in group.branches():
      reasons = [t.finish_reason for t in branches]
      assert reasons == [eos] * (count - 1) + [last]
    environment.close(60.0)
    ledger.close()
  # Each has the whole limit: five tokens that were shown, and one written.
  assert rooms == [6] * 20


def test_turns_of_all_branches_count(make_world):
  numbers = []

  def endless(prompt, context):
    yield prompt.tokens
    while True:
      numbers.append((context.num_turns, context.room > 0))
      yield episode_lib.Anew(prompt.tokens)

  world = make_world(episode=endless, environment={"max_turns": 3})
  for group in finished(world):
    for branches in group.branches():
      assert len(branches) == 3
      assert branches[-1].finish_reason is types.FinishReason.LENGTH
  assert {n for n, _ in numbers} == {1, 2, 3} and (1, True) in numbers
  assert (3, True) not in numbers


# -- rewards -----------------------------------------------------------------


def test_a_member_is_scored_once_on_all_its_turns(make_world):
  def score(item, completions):
    return [float(sum(t.reward for t in c.turns)) for c in completions]

  rewards = tiny.Rewards(score)
  world = make_world(episode=forks, rewards=rewards, **LONG)
  groups = finished(world)
  submitted = {item["number"]: found for item, found in rewards.submitted}
  decode = rewards._tokenizer.decode
  for group in groups:
    completions = submitted[group.index]
    assert len(completions) == worker_world.GROUP_SIZE
    for branches, completion in zip(group.branches(), completions, strict=True):
      written = [t.tokens[t.loss_mask] for t in branches]
      assert completion.tokens.tolist() == np.concatenate(written).tolist()
      turns = [*episode_lib.recorded_turns(branches)]
      assert [t.prompt for t in completion.turns] == [
        decode(t.prompt) for t in turns
      ]
      assert [t.num_tokens for t in completion.turns] == [
        len(t.completion.tokens) for t in turns
      ]
      # 1 for the first turn, 10 for the one that begins the second branch.
      given = [sum(10.0**k for k in range(len(branches)))]
      assert {t.score for t in branches} == {*given}
  worker_world.check_balance(world)
  # The ledger has a line of members.
  world.ledger.add_trained(groups, step=1, skipped_update=False)
  for line, group in zip(world.lines(), groups, strict=True):
    assert line["rewards"] == [1.0, 11.0, 111.0]
    assert line["num_completion_tokens"] == [
      sum(t.num_completion_tokens for t in b) for b in group.branches()
    ]


def branched(texts, *, index=0, scores=None):
  """A group of members, each of them a list of branches of turns of text."""
  trajectories = []
  for member, branches in enumerate(texts):
    for number, turns in enumerate(branches):
      trajectories.append(reward_groups.trajectory(*turns))
      trajectories[-1].member = member + number * types.MEMBERS
  group = types.RolloutGroup(
    admission=types.Admission(index=index, birth=0, deadline=9),
    prompt=types.Prompt(prompt_id="", tokens=np.arange(3), item={}),
    trajectories=trajectories,
  )
  outcome = [*map(tiny.reward, scores or [0.0] * len(texts))]
  return running_group.scored(group, outcome)


def test_scores_of_tokens_go_to_the_branch_of_the_token():
  reward = types.Reward(
    score=2.0, token_scores={0: 1.0, 2: 3.0, 3: 4.0}, answer="a"
  )
  failed = scoring.RewardFailure("error: no")
  texts = [[("a", "b", "c", "de"), ("f", "g")], [("a", "b"), ("a", "bcd")]]
  group = branched([*texts, [("h", "ij")]], scores=[reward, failed, 1.0])
  first, second, third = group.trajectories
  assert first.reward.token_scores == {0: 1.0, 2: 3.0}
  assert second.reward.token_scores == {0: 4.0}
  assert first.score == second.score == 2.0 and second.reward.answer == "a"
  assert third.score == 1.0
  assert types.whole([first, second]).reward == reward
  assert group.dropped == (
    types.Dropped(member=1, num_completion_tokens=4, reason="error: no"),
  )
  assert group.num_completion_tokens == 10


@pytest.mark.parametrize("scale", list(sections.AdvantageScale))
@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
def test_members_are_compared_and_not_branches(baseline, scale):
  rng = np.random.default_rng(0)
  counts = [[1, 3, 2], [2, 1, 1, 5]]
  scores = [rng.normal(size=len(x)).tolist() for x in counts]
  groups = [
    branched([[("q", "ab")] * k for k in x], index=i, scores=scores[i])
    for i, x in enumerate(counts)
  ]
  section = sections.AlgorithmSection(advantage=baseline, advantage_scale=scale)
  found = algorithm_lib.advantages(section)(groups)
  flat = [s for x in scores for s in x]
  centred = []
  for own in scores:
    for i, one in enumerate(own):
      others = {
        "group": own,
        "leave_one_out": own[:i] + own[i + 1 :],
        "batch": flat,
      }[baseline]
      centred.append(one - sum(others) / len(others))
  of_batch = np.std(centred)
  expected = []
  for own, count in zip(scores, counts, strict=True):
    mean = sum(own) / len(own)
    deviation = (sum((x - mean) ** 2 for x in own) / len(own)) ** 0.5
    divisor = {
      sections.AdvantageScale.STD: deviation + 1e-6,
      sections.AdvantageScale.BATCH_STD: of_batch + 1e-6,
      sections.AdvantageScale.NONE: 1.0,
    }[scale]
    for k in count:
      expected += [centred.pop(0) / divisor] * k
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_turns_are_compared_over_branches():
  """Turn k of a member with turn k of another that has not begun anew."""
  section = sections.AlgorithmSection(
    advantage="segment", advantage_scale=sections.AdvantageScale.NONE
  )
  rewards = [
    types.Reward(score=1.0, token_scores={1: 2.0}),
    types.Reward(score=0.0, token_scores={0: 4.0}),
  ]
  one = [("a", "b", "c", "d"), ("e", "f")]
  other = [("a", "b", "c", "d", "e", "f")]
  group = branched([one, other], scores=rewards)
  found = algorithm_lib.advantages(section)([group])
  # Returns of the turns: 3, 3, 1 and 4, 0, 0.
  assert [x.tolist() for x in found] == [
    [0.0, -0.5, 0.0, 1.5],
    [0.0, 0.5],
    [0.0, 0.5, 0.0, -1.5, 0.0, -0.5],
  ]


def test_metrics_and_samples_are_of_members():
  group = branched([[("a", "b")] * 4, [("a", "bcd")]], scores=[1.0, 0.0])
  found = step_metrics.of_groups([group], 1)
  assert found["reward/mean"] == 0.5 and found["reward/std"] == 0.5
  assert found["completion/tokens_mean"] == 3.5
  assert found["completion/branches_mean"] == 2.5
  assert step_metrics.pass_at_k([group], 1.0) == {
    "reward/pass@1": 0.5,
    "reward/pass@2": 1.0,
  }


def test_equal_scores_of_members_are_left_out(make_world):
  rewards = tiny.Rewards(
    lambda item, c: [item["number"] % 2 * x for x in (0, 0, 1)]
  )
  world = make_world(
    episode=forks, rewards=rewards, filter_zero_std=True, **LONG
  )
  groups = finished(world, 2)
  assert all(g.index % 2 for g in groups)
  assert {x["fate"] for x in world.lines()} == {"filtered"}
  worker_world.check_balance(world)


# -- training ----------------------------------------------------------------


def test_unequal_numbers_of_branches_are_packed_and_trained():
  """16 members with one to seven branches each, over three minibatches."""
  rng = np.random.default_rng(0)
  groups = test_train_step.groups(count=2, size=64)
  for group in groups:
    given = iter(group.trajectories)
    kept = []
    for member in range(16):
      score = tiny.reward(rng.random())
      for number in range(1 + member % 7):
        branch = next(given)
        branch.member = member + number * types.MEMBERS
        branch.reward = score
        kept.append(branch)
    group.trajectories = kept
  trainer = test_train_step.make_trainer(minibatches=3)
  section = sections.AlgorithmSection()
  trainer.batch_settings = dataclasses.replace(
    trainer.batch_settings, advantages=algorithm_lib.advantages(section)
  )
  batch = trainer.prepare(groups)
  trajectories = [t for g in groups for t in g.trajectories]
  for packed, name in (
    (batch.arrays.tokens, "tokens"),
    (batch.arrays.loss_mask, "loss_mask"),
  ):
    found = packing.unpack(packed, batch.segments)
    for one, trajectory in zip(found, trajectories, strict=True):
      np.testing.assert_array_equal(one, getattr(trajectory, name))
  advantages = packing.unpack(batch.arrays.advantages, batch.segments)
  found = iter(advantages)
  for group in groups:
    scores = [b[0].score for b in group.branches()]
    assert len(scores) == 16
    for branches in group.branches():
      value = (branches[0].score - np.mean(scores)) / (np.std(scores) + 1e-6)
      for _ in branches:
        np.testing.assert_allclose(next(found), value, rtol=1e-5)
  pending = trainer.step(test_train_step.VERSION, batch)
  num_loss_tokens = float(np.sum(pending.sums["num_loss_tokens"]))
  assert num_loss_tokens == sum(t.num_completion_tokens for t in trajectories)
  values, is_bad = pending.metrics()
  assert not any(is_bad) and values["policy/grad_norm"] > 0


# -- checkpoints, replay, fleets ---------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_goes_on_in_a_branch_equals_one_that_was_not_stopped(
  make_world, tmp_path, is_async
):
  path, release, held = tmp_path / "calls", threading.Event(), []

  async def wait():
    held.append(None)
    while not release.is_set():
      await asyncio.sleep(0.01)

  async def noted(prompt, context):
    turns, written = forks(prompt, context), None
    while True:
      try:
        shown = turns.send(written)
      except StopIteration:
        return
      written = yield shown
      name = f"{prompt.item['number']} {context.member} {context.num_turns}"
      await context.call(called.note_there, str(path), name)
      if context.num_turns == 3:
        await context.call(wait, timeout_s=600.0)

  episode = noted if is_async else forks
  expected = finished(make_world(episode=forks, **LONG))
  first = make_world(episode=episode, **LONG)

  def is_over(state):
    """A checkpoint comes while later branches are written, or all wait."""
    first.worker.replica.report_all()
    if is_async:
      running = first.coordinator._running.values()
      unfinished = [m for r in running for m in r.unfinished]
      return (
        first.coordinator.stream.count == 4
        and len(unfinished) == len(held) == first.environment.num_waiting
      )
    groups = first.worker.groups().values()
    return any(
      t.member >= types.MEMBERS
      and t.finish_reason is None
      and t.loss_mask.any()
      for g in groups
      for t in g.trajectories
    )

  first.run_until(is_over, LOOKS)
  state, groups = first.buffer.state(), first.worker.groups()
  assert any(len(b) > 1 for g in groups.values() for b in g.branches())
  outstanding_lib.write(
    tmp_path,
    [
      outstanding_lib.OutstandingGroup(status="running", group=g)
      for g in groups.values()
    ],
  )
  stored = {o.group.index: o.group for o in outstanding_lib.read(tmp_path)}
  assert content(stored.values()) == content(groups.values())
  first.environment.close(60.0)
  second = make_world(
    episode=episode,
    prompts=tiny.Prompts(first.coordinator.stream.count),
    **LONG,
  )
  second.buffer.restore(state)
  second.coordinator.restore([stored[a.index] for a in state.running])
  again = second.coordinator.groups()
  if not is_async:
    assert content(again.values()) == content(groups.values())
  second.scheduler.stats.generated_tokens = (
    first.scheduler.stats.generated_tokens
  )
  release.set()
  found = finished(second)
  assert content(found) == content(expected)
  check_branches(found)
  worker_world.check_balance(second)
  if is_async:
    lines = called.lines(path)
    turns = sum(episode_lib.num_turns(t) for g in found for t in g.trajectories)
    assert len(set(lines)) == len(lines) == turns


def test_a_branch_that_was_begun_otherwise_is_refused():
  def other(prompt):
    yield prompt.tokens
    yield SHOWN

  group = branched([[("q", "a"), ("r", "b")]])
  group.trajectories[1].tokens[0] = SHOWN[0]
  group.prompt.tokens = group.trajectories[0].tokens[:1]
  environment = environment_lib.Environment(other)
  opened = environment.open(
    group.prompt, key=(0, 0), limit=9, recorded=group.trajectories
  )
  with pytest.raises(episode_lib.EpisodeError, match="other prompts than"):
    opened.begin()


def test_branches_are_written_again_to_the_bit(tmp_path):
  recorded = test_rewriting.Recorded(tmp_path, forks, {}, num_groups=6)
  groups = recorded.write()
  versions = [
    len(set(t.policy_versions.tolist())) for t in groups[-1].trajectories
  ]
  assert max(versions) > 2
  found = test_rewriting.rewrite(groups, forks, {})
  for group in groups:
    for branches in group.branches():
      again = found[group.index, branches[0].member]
      assert again.is_done
      for a, b in zip(again.branches, branches, strict=True):
        assert a.member == b.member
        assert a.finish_reason is b.finish_reason
        for array in types.TOKEN_ARRAYS:
          np.testing.assert_array_equal(getattr(a, array), getattr(b, array))


def test_an_episode_with_more_branches_than_recorded_is_refused(tmp_path):
  def more(prompt, context):
    yield from forks(prompt, context)
    yield episode_lib.Anew(prompt.tokens)

  groups = test_rewriting.Recorded(tmp_path, forks, {}, num_groups=2).write()
  with pytest.raises(test_rewriting.rewriting_lib.RewritingError):
    test_rewriting.rewrite(groups, more, {})


def test_a_fleet_goes_on_in_branches_of_a_replica_that_is_killed(make_fleet):
  world = make_fleet(episode=forks_later, max_group_s=0.0, **LONG)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(2)
  name, _ = fleet_world.writers(groups).most_common(1)[0]
  world.handles[int(name.removeprefix("replica "))].kill()
  groups += world.train(3, first=2)
  world.check_books()
  assert sorted(g.index for g in groups) == list(range(len(groups)))
  assert len(fleet_world.writers(groups)) >= 2
  check_branches(groups)


# -- evaluations -------------------------------------------------------------


def test_questions_are_answered_in_branches(make_world):
  asked = test_async_episode.questions(4)
  written = test_async_episode.written_alone(asked, forks)
  expected = test_async_episode.content(written)
  for one in written:
    turns = [*episode_lib.recorded_turns([one.trajectory])]
    numbers = [*one.trajectory.turn_rewards().values()]
    assert numbers == [float(10**k) for k in range(one.question.sample + 1)]
    assert len(turns) > one.question.sample
    assert len(one.branches) == one.question.sample + 1
    whole = types.whole(one.branches)
    assert whole.tokens.tolist() == one.trajectory.tokens.tolist()
    made = completion_lib.of_trajectory(
      one.trajectory, test_async_episode.tokenizer_lib.character_level()
    )
    assert len(made.turns) == len(turns)
  rewards = tiny.Rewards(lambda item, found: [len(c.turns) for c in found])
  for one in answers_lib.scored([written], rewards=rewards, num_slots=4):
    assert one.trajectory.score == len(
      [*episode_lib.recorded_turns([one.trajectory])]
    )
  assert len(rewards.submitted) == len(asked)
  for episode in (forks, forks_later):
    assert (
      test_async_episode.content(
        test_async_episode.written_alone(asked, episode)
      )
      == expected
    )
    world = make_world(episode=episode, **LONG)
    answers = world.coordinator.questions.ask(asked, 0, is_alone=True)
    world.run_until(lambda state, a=answers: a.qsize() == len(asked), LOOKS)
    found = [answers.get() for _ in range(len(asked))]
    assert test_async_episode.content(found) == expected


# -- whole runs --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_whose_episode_forks_is_trained_continued_and_replayed(tmp_path):
  config = test_replay.make_config(2)
  config.task.episode = "episodes_of_tests:forks"
  config.task.reward = "episode"
  train_lib.run(config, tmp_path)
  num_steps = 4
  config.train = dataclasses.replace(config.train, num_steps=num_steps)
  summary = json.loads(train_lib.run(config, tmp_path))
  test_run.check_ledger(tmp_path, summary)
  steps = test_run.lines(tmp_path, "metrics")[1:]
  assert len(steps) == num_steps
  for step in steps:
    assert step["completion/branches_mean"] == 3.5  # 2, 3, 4 and 5
    assert step["staleness/max"] <= 4
  # The trainer sees what evaluations wrote as the engine did.
  mismatches = [
    line["eval/mismatch_kl"]
    for line in test_run.lines(tmp_path, "metrics")
    if "eval/mismatch_kl" in line
  ]
  assert mismatches and max(mismatches) < 1e-6
  lines = test_run.lines(tmp_path, "ledger")
  assert {len(x["rewards"]) for x in lines} == {4}
  found = test_replay.play(tmp_path)
  assert found.last_step == num_steps and found.has_state
  assert found.generated == test_replay.num_tokens(tmp_path, last=num_steps)
  step = test_replay.a_checkpoint_between(tmp_path, 1, num_steps - 1)
  assert test_replay.play(tmp_path, from_step=step).has_state
