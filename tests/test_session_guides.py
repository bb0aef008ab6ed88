"""Agents in sessions whose answers follow a schema."""

import dataclasses
import functools
import json
import sys
from typing import Literal

import chat_templates
import numpy as np
import openai
import pydantic
import pytest
import test_replay
import test_run
import test_sessions
import tiny
import worker_world

from jaxrl_async import types
from jaxrl_async.engine import sampling
from jaxrl_async.evaluation import evaluated_sets
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.run import train as train_lib
from jaxrl_async.sessions import episode as session_episode
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import episodes
from jaxrl_async.training import packing

play = test_sessions.play
TOKENIZER = tokenizer_lib.character_level()
SCHEMA = {"type": "string", "maxLength": 6}
FORMAT = {
  "type": "json_schema",
  "json_schema": {"name": "word", "schema": SCHEMA},
}


class Place(pydantic.BaseModel):
  """What an agent asks for as a class."""

  city: Literal["Bern", "Basel"]
  inhabitants: int = pydantic.Field(ge=0, le=9)


PLACE = '{"city": "Bern", "inhabitants": 5}'


async def asks_for_forms(access, item):
  """Ask in every way that guides an answer, in one chat."""
  messages = [test_sessions.user("question")]
  tools = {"tools": chat_templates.TOOLS}

  async def say(**options):
    choice = await test_sessions.say(access, messages, **options)
    messages.extend(
      [choice.message.model_dump(exclude_none=True), test_sessions.user("go")]
    )
    return choice.message

  form = {"name": "place", "schema": Place.model_json_schema()}
  answer = await say(
    response_format={"type": "json_schema", "json_schema": form}
  )
  assert json.loads(answer.content)["city"] == "Bern"
  await say(response_format={"type": "json_object"})
  async with test_sessions.client(access) as calls:
    parsed = await calls.chat.completions.parse(
      model=access.model, messages=messages, response_format=Place
    )
    assert parsed.choices[0].message.parsed == Place(city="Bern", inhabitants=5)
    done = await calls.completions.create(
      model=access.model,
      prompt="a",
      max_tokens=100,
      extra_body={"response_format": FORMAT},
    )
    assert done.choices[0].text == PLACE
  named = {"type": "function", "function": {"name": "weather"}}
  for choice in ("required", named):
    answer = await say(tool_choice=choice, **tools)
    assert answer.tool_calls[0].function.name == "weather"
  answer = await say(tool_choice="auto", **tools)
  return float(answer.content == PLACE)


async def asks_for_nonsense(access, item):
  form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
  form["json_schema"]["schema"]["type"] = "nonsense"
  with pytest.raises(openai.BadRequestError) as caught:
    await test_sessions.say(
      access, [test_sessions.user("hello")], response_format=form
    )
  assert caught.value.param == "response_format"
  await test_sessions.say(access, [test_sessions.user("hello")])
  return 1.0


async def asks_for_words(access, item):
  """Two answers of a form, and a free one; the reward counts characters."""
  async with openai.AsyncOpenAI(
    base_url=access.base_url, api_key=access.api_key, timeout=None
  ) as calls:
    create = functools.partial(calls.completions.create, model=access.model)
    guided = {"extra_body": {"response_format": FORMAT}}
    first = await create(prompt="12", max_tokens=8, **guided)
    free = await create(prompt="34", max_tokens=4)
    await create(prompt="5" + first.choices[0].text[:2], max_tokens=8, **guided)
  return float(len(free.choices[0].text))


def named(function):
  return f"{__name__}:{function.__name__}"


def script(begin=0):
  """Return what answers the calls of `asks_for_forms` from one of them on."""
  lines = iter([*[PLACE] * 4, test_sessions.CALL, test_sessions.CALL, PLACE])
  for _ in range(begin):
    next(lines)
  return lambda text: next(lines)


@pytest.mark.parametrize("count", [0, 2, 5])
def test_calls_may_ask_for_a_form_and_the_record_has_it(play, count):
  whole = play(named(asks_for_forms), script())
  assert whole.failure == "" and whole.reward == 1.0
  grammars = [ends.guide for ends in whole.ends]
  assert [bool(grammar) for grammar in grammars] == [True] * 6 + [False]
  assert ["Basel" in grammar for grammar in grammars[:3]] == [True, False, True]
  assert "weather" in grammars[4]
  recorded, events = whole.recorded(count)
  again = play(
    named(asks_for_forms), script(count), recorded=recorded, events=events
  )
  assert again.failure == "" and again.tokens == whole.tokens


def test_what_cannot_be_followed_is_refused_by_name(play):
  found = play(named(asks_for_nonsense))
  assert found.failure == "" and found.reward == 1.0


def test_an_episode_may_guide_its_turns_and_fails_if_it_cannot(monkeypatch):
  def guided(prompt):
    yield episode_lib.Until(prompt.tokens, guide=prompt.item["grammar"])

  def opened(grammar):
    environment = worker_world.environment_lib.Environment(
      guided, tokenizer=TOKENIZER
    )
    prompt = types.Prompt(
      prompt_id="p", tokens=tiny.prompt(3), item={"grammar": grammar}
    )
    return environment.open(prompt, key=(0, 0), limit=20).begin()

  assert opened('start: "a"').ends.guide == 'start: "a"'
  with pytest.raises(episode_lib.EpisodeError, match="guide: "):
    opened("start: nowhere")
  monkeypatch.setitem(sys.modules, "llguidance", None)
  with pytest.raises(episode_lib.EpisodeError, match="extra `guided`"):
    opened('start: "a"')


# -- what is learned from ------------------------------------------------------


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


WORLD = {
  "episode": functools.partial(
    session_episode.run_agent, agent=named(asks_for_words)
  ),
  "environment": {"tokenizer": TOKENIZER},
  "engine": {"end_tokens": TOKENIZER.end_tokens},
  "max_completion_tokens": 24,
  "temperature": 0.4,
}


def test_tokens_that_are_learned_from_have_the_logprobs_of_the_policy(
  make_world,
):
  world = make_world(**WORLD)
  world.run_until(worker_world.finished(4), 100_000)
  groups = world.buffer.state().finished
  num_steered, num_guided = 0, 0
  for trajectory in (t for g in groups for t in g.trajectories):
    (own,) = tiny.trainer_logprobs(
      tiny.params(), [trajectory.tokens], temperature=WORLD["temperature"]
    )
    gained = trajectory.behavior_logprobs - own
    steered = list(trajectory.steered)
    mask = trajectory.learned_mask
    assert trajectory.loss_mask[steered].all() and not mask[steered].any()
    assert mask.sum() == trajectory.num_completion_tokens - len(steered)
    most = -np.log1p(-sampling.MAX_LEFT_OUT) + 2e-4
    assert (np.abs(gained[mask]) < most).all()
    assert (gained[steered] > most - 4e-4).all()
    num_steered += len(steered)
    if trajectory.tokens[0] != TOKENIZER.encode("3")[0]:
      num_guided += trajectory.num_completion_tokens
  assert 0 < num_steered < num_guided
  stats = world.scheduler.stats
  assert stats.steered_tokens >= num_steered
  assert stats.guided_tokens >= num_guided
  worker_world.check_balance(world)
  kl = evaluated_sets.mismatch_kl(
    [t for g in groups for t in g.trajectories],
    lambda found: [
      tiny.trainer_logprobs(
        tiny.params(), [t.tokens], temperature=WORLD["temperature"]
      )[0]
      for t in found
    ],
  )
  assert kl < 1e-5


def test_a_guided_turn_goes_on_elsewhere_where_its_grammar_was(make_world):
  alone = make_world(**WORLD)
  alone.run_until(worker_world.finished(4), 100_000)
  world = make_world(**WORLD)
  num_looks = 0

  def disturb(num_steps=0):
    nonlocal num_looks
    num_looks += 1
    if num_looks % 3 == 0:  # all sequences go to the replica once more
      world.replica.give_back()
      world.coordinator.drained("replica 0")
      world.coordinator.adopted(
        worker_world.coordinator_lib.messages.Adopted(
          replica="replica 0", version=0
        )
      )

  step = world.replica.step

  def step_and_disturb():
    step()
    disturb()

  world.replica.step = step_and_disturb
  world.run_until(worker_world.finished(4), 100_000)
  both = [
    {group.index: group for group in one.buffer.state().finished}
    for one in (alone, world)
  ]
  assert both[0].keys() == both[1].keys()
  for index, group in both[0].items():
    others = both[1][index].trajectories
    for one, two in zip(group.trajectories, others, strict=True):
      assert one.tokens.tolist() == two.tokens.tolist()
      assert one.steered == two.steered
  assert num_looks > 6


def trajectory(steered=(), score=2.0, scores=None):
  """Two tokens of a prompt, four written, one shown and two written."""
  mask = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1], bool)
  return types.Trajectory(
    member=0,
    tokens=np.arange(9, dtype=np.int32),
    loss_mask=mask,
    behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
    policy_versions=np.where(mask, 3, -1).astype(np.int32),
    finish_reason=types.FinishReason.EOS,
    steered=steered,
    reward=types.Reward(score=score, token_scores=scores),
  )


def test_a_batch_learns_from_no_token_that_was_steered():
  group = tiny.written_group(types.Admission(index=0, birth=3, deadline=4))
  one = trajectory((3, 4, 8))
  group = dataclasses.replace(group, trajectories=[one, trajectory()])
  groups = packing.without_steered([group])
  batch, segments = packing.pack(
    groups,
    np.ones(2, np.float32),
    tokens_per_row=16,
    rows_per_microbatch=1,
    num_minibatches=1,
  )
  found = packing.unpack(batch.loss_mask, segments)
  assert np.flatnonzero(found[0]).tolist() == [2, 5, 7]
  assert np.flatnonzero(found[1]).tolist() == [2, 3, 4, 5, 7, 8]
  assert one.num_completion_tokens == 6  # the books count all of them
  assert (
    packing.without_steered(
      [dataclasses.replace(group, trajectories=[trajectory()])]
    )[0]
    .trajectories[0]
    .loss_mask.sum()
    == 6
  )


@pytest.mark.parametrize(
  "steered,expected",
  [
    ((), {2: 1.0, 5: 0.5, 8: 2.0}),
    ((5, 8), {2: 1.0, 4: 0.5, 7: 2.0}),
    ((2, 3, 8), {5: 0.5, 7: 2.0}),
    ((2, 3, 4, 5, 7, 8), {}),
  ],
)
def test_rewards_are_where_something_is_learned(steered, expected):
  one = trajectory(steered, scores={0: 1.0, 3: 0.5})
  made = episodes.fields([one], shaped=lambda x: x, token_scale=1.0)
  (rewards,) = made[episodes.REWARDS]
  assert {i: rewards[i] for i in np.flatnonzero(rewards)} == expected


def test_branches_taken_together_know_their_steered_tokens():
  second = dataclasses.replace(trajectory((7,)), member=types.MEMBERS)
  assert types.whole([trajectory((2, 8)), second]).steered == (2, 8, 16)


# -- a whole run ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_of_guided_agents_is_trained_continued_and_replayed(tmp_path):
  num_steps = 4
  config = test_replay.make_config(2)
  config.rollout = dataclasses.replace(config.rollout, temperature=0.4)
  config.task.episode = "agent"
  config.task.episode_params.agent = named(asks_for_words)
  config.task.reward = "episode"
  train_lib.run(config, tmp_path)
  config.train = dataclasses.replace(config.train, num_steps=num_steps)
  summary = json.loads(train_lib.run(config, tmp_path))
  test_run.check_ledger(tmp_path, summary)
  lines = test_run.lines(tmp_path, "ledger")
  assert {line["fate"] for line in lines} == {types.Fate.TRAINED.value}
  steps = test_run.lines(tmp_path, "metrics")[1:]
  assert all(step.get("staleness/max", 0) <= 4 for step in steps)
  trained = [step for step in steps if "policy/loss" in step]
  assert len(trained) == num_steps
  assert all(np.isfinite(step["policy/loss"]) for step in trained)
  # What is learned from was drawn from the policy's own distribution.
  assert all(
    step["offpolicy/mismatch_kl"] < 1e-4
    for step in trained
    if "offpolicy/mismatch_kl" in step
  )
  assert sum(step["rollout/guided_tokens"] for step in trained) > 0
  assert any(0 < step["rollout/unlearned_frac"] < 1 for step in trained)
  found = test_replay.play(tmp_path)
  assert found.last_step == num_steps and found.has_state
  assert found.generated == test_replay.num_tokens(tmp_path, last=num_steps)
