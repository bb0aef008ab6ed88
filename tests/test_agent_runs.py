"""Runs whose trajectories are written for agents."""

import collections
import dataclasses
import functools
import json

import fleet_world
import httpx
import numpy as np
import pytest
import test_replay
import test_run
import worker_world

from jaxrl_async import types
from jaxrl_async.run import train as train_lib
from jaxrl_async.sessions import episode as session_episode
from jaxrl_async.text import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.character_level()
HEARD = collections.defaultdict(list)  # by agent: what it was answered


async def ask(calls, access, tokens, **ends):
  """Continue token ids, as the package verifiers does."""
  answer = await calls.post(
    access.base_url.removesuffix("/v1") + "/inference/v1/generate",
    json={"token_ids": tokens, "sampling_params": ends},
    timeout=None,
  )
  answer.raise_for_status()
  return answer.json()["choices"][0]


async def two_turns_and_a_fork(access, item):
  """Ask, go on, and begin anew with a part; the reward is a number of tokens.

  What it asks depends only on what it is answered, and so does what ends it.
  """
  headers = {"authorization": f"Bearer {access.api_key}"}
  async with httpx.AsyncClient(headers=headers) as calls:
    begun = TOKENIZER.encode(f"{item.get('number', 3)} + 4\n").tolist()
    first = await ask(calls, access, begun)
    written = first["token_ids"]
    heard = [first]
    if len(written) < 8:
      ends = {"max_tokens": 3}
      short = await ask(calls, access, [*begun, *written, 30, 31], **ends)
      is_cut = short["finish_reason"] == "length"
      ended = short["token_ids"][-1] in TOKENIZER.end_tokens
      assert is_cut == (len(short["token_ids"]) == 3 and not ended)
      heard.append(short)
    ends = {"stop_token_ids": [*range(40, 48)], "stop": ["1", "2"]}
    last = await ask(calls, access, [*begun, *written[:2]], **ends)
    stops = {*ends["stop_token_ids"], *TOKENIZER.encode("12").tolist()}
    assert not stops.intersection(last["token_ids"][:-1])
    heard.append(last)
  HEARD[access.api_key] = heard
  return types.Reward(
    score=float(len(written)), parts={"calls": float(len(heard))}
  )


def named(function):
  return f"{__name__}:{function.__name__}"


WORLD = {
  "episode": functools.partial(
    session_episode.run_agent, agent=named(two_turns_and_a_fork)
  ),
  "environment": {"tokenizer": TOKENIZER},
  "max_completion_tokens": 24,
}


def check(groups):
  """Agents heard what is learned from, with its logprobs."""
  heard = [
    (choice["token_ids"], [x["logprob"] for x in choice["logprobs"]["content"]])
    for agent in HEARD.values()
    for choice in agent
  ]
  for group in groups:
    for branches in group.branches():
      assert len(branches) == 2
      assert branches[0].turn_rewards()
      for trajectory in branches:
        edges = np.flatnonzero(np.diff(trajectory.loss_mask.astype(int))) + 1
        parts = np.split(np.arange(len(trajectory.tokens)), edges)
        for own in parts[1::2]:
          logprobs = trajectory.behavior_logprobs[own].tolist()
          assert (trajectory.tokens[own].tolist(), logprobs) in heard


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


@pytest.fixture
def make_fleet(tmp_path):
  yield from fleet_world.worlds(tmp_path)


def test_what_agents_hear_is_what_is_learned_from(make_world):
  world = make_world(**WORLD)
  world.run_until(worker_world.finished(4), 100_000)
  groups = world.buffer.state().finished
  check(groups)
  worker_world.check_balance(world)


def test_a_fleet_goes_on_with_agents_whose_replica_is_killed(make_fleet):
  world = make_fleet(max_group_s=0.0, **WORLD)
  world.begin()
  groups = world.train(2)
  name, _ = fleet_world.writers(groups).most_common(1)[0]
  world.handles[int(name.removeprefix("replica "))].kill()
  groups += world.train(3, first=2)
  world.check_books()
  check(groups)


@pytest.mark.slow
def test_a_run_of_agents_is_trained_continued_and_replayed(tmp_path):
  config = test_replay.make_config(4)
  config.task.episode = "agent"
  config.task.episode_params.agent = named(two_turns_and_a_fork)
  config.task.reward = "episode"
  train_lib.run(config, tmp_path)
  config.train = dataclasses.replace(
    config.train, num_steps=test_replay.NUM_STEPS
  )
  summary = json.loads(train_lib.run(config, tmp_path))
  test_run.check_ledger(tmp_path, summary)
  lines = test_run.lines(tmp_path, "ledger")
  assert {line["fate"] for line in lines} == {types.Fate.TRAINED.value}
  steps = test_run.lines(tmp_path, "metrics")[1:]
  assert all(step.get("staleness/max", 0) <= 4 for step in steps)
  assert all(2 <= step["reward/parts/calls"] <= 3 for step in steps)
  assert all({2.0, 3.0} >= {*line["reward_parts"]["calls"]} for line in lines)
  num_heard = len(HEARD)
  found = test_replay.play(tmp_path)
  assert found.last_step == test_replay.NUM_STEPS and found.has_state
  assert found.generated == test_replay.num_tokens(tmp_path)
  assert len(HEARD) == num_heard  # no agent has run
