"""Episodes that a config names, the checks of them, and the reward episode."""

import json

import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.config import rules
from jaxrl_async.config import sections
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import named
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import named_episodes
from jaxrl_async.text import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.character_level()
HERE = "episodes_of_tests"
PROMPT = types.Prompt(
  prompt_id="tiny/train/0", tokens=np.arange(3, dtype=np.int32), item={}
)


def test_a_name_stands_for_an_episode_with_its_params():
  assert named_episodes.find("", {}) is episode_lib.single_turn
  found = named_episodes.find(f"{HERE}:with_params", {"hint": "ab"})
  environment = environment_lib.Environment(found, tokenizer=TOKENIZER)
  one = environment.open(PROMPT, key=(0, 0), limit=9)
  shown = environment.settled(one.begin()).tokens
  assert TOKENIZER.decode(shown) == "ab"


@pytest.mark.parametrize(
  ("name", "params", "words"),
  [
    (
      "tool",
      {},
      "no episode 'tool'; use one of agent, budgets, openenv, tools",
    ),
    ("no_such_module:f", {}, "cannot be imported: ModuleNotFoundError"),
    (f"{HERE}:missing", {}, "has no function"),
    (f"{HERE}:NOTHING", {}, "has no function"),
    (f"{HERE}:with_params", {}, "missing a required .*argument: 'hint'"),
    (f"{HERE}:plain", {"hint": "a"}, "unexpected keyword argument 'hint'"),
    (f"{HERE}:never_yields", {}, "never yields"),
    ("", {"hint": "a"}, "takes no params"),
  ],
)
def test_what_is_no_episode_is_refused_in_one_line(name, params, words):
  task = sections.TaskSection(episode=name)
  task.episode_params.update(params)
  with pytest.raises(sections.ConfigError, match=words) as raised:
    assembly.episode_of(task)
  text = str(raised.value)
  assert text.startswith("task.episode: ") and "\n" not in text


def test_params_without_an_episode_are_refused():
  config = sections.Config()
  rules.check(config)
  config.task.episode_params.hint = "a"
  with pytest.raises(sections.ConfigError, match="^task.episode_params: "):
    rules.check(config)
  config.task.episode = f"{HERE}:waits"
  rules.check(config)


def trajectory(rewards, parts=()):
  """Two turns of two tokens and of one."""
  mask = np.array([0, 0, 1, 1, 0, 1], bool)
  return types.Trajectory(
    member=0,
    tokens=np.arange(10, 16, dtype=np.int32),
    loss_mask=mask,
    behavior_logprobs=np.zeros(6, np.float32),
    policy_versions=np.where(mask, 0, -1).astype(np.int32),
    finish_reason=types.FinishReason.EOS,
    events=(
      *(types.Event("reward", turn, -1, str(value)) for turn, value in rewards),
      *(types.Event("parts", 0, -1, json.dumps(named)) for named in parts),
    ),
  )


def scored(*of, parts=()):
  scorer = named.scorer("episode", {})
  completions = completion_lib.of_group(
    completion_lib.pack([trajectory(rewards, parts) for rewards in of]),
    TOKENIZER,
  )
  return [scorer({}, one) for one in completions]


def test_the_reward_episode_is_the_sum_and_is_put_where_it_was_earned():
  first, second, third = scored(
    [(0, 1.0), (1, 0.25), (0, -0.5)], [(1, 2.0)], []
  )
  assert first.score == 0.75 and first.token_scores == {1: 0.5, 2: 0.25}
  assert second.score == 2.0 and second.token_scores == {2: 2.0}
  assert third.score == 0.0 and third.token_scores == {}
  assert [one.parts for one in (first, second, third)] == [{}] * 3
  # Scorers of tokens always return a mapping.
  (alone,) = scored([])
  assert alone.token_scores == {}


def test_the_parts_that_an_episode_gave_add_up_by_name():
  (one,) = scored([(0, 1.0)], parts=({"a": 1.0, "b": 2.0}, {"a": 0.5}))
  assert one.parts == {"a": 1.5, "b": 2.0}
