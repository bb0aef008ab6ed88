"""Rewards of several terms: in the config, and as a weighted sum."""

import functools
import types as py_types

import metrics_page
from ml_collections import config_dict
import numpy as np
import pytest
import reward_groups
import reward_scorers

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.rewards import match
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import reward_terms
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rewards import term as term_lib


def completion(text, num_tokens=4):
  return types.Completion(
    text=text,
    turns=(),
    tokens=np.zeros((num_tokens,), np.int32),
    finish_reason=types.FinishReason.EOS,
  )


def task(**rewards):
  section = sections.TaskSection()
  section.rewards = config_dict.ConfigDict(rewards)
  return section


def make_term(scorer=reward_scorers.length, **fields):
  return term_lib.Term(
    **{"scorer": scorer, "timeout_s": 5.0, "num_retries": 0, **fields}
  )


@pytest.fixture(scope="module")
def make_service():
  made = []

  def make(*terms):
    made.append(reward_groups.service(*terms))
    made[-1].warm_up()
    return made[-1]

  yield make
  for service in made:
    service.close()


# -- the sum ------------------------------------------------------------------


def test_the_score_is_the_weighted_sum_and_each_term_a_part():
  terms = [
    make_term(name="right", weight=2.0),
    make_term(name="short", weight=-0.5),
  ]
  right = types.Reward(
    score=1.0, parts={"a": 3.0}, token_scores={0: 1.0, 2: 1.0}, answer="7"
  )
  short = types.Reward(score=4.0, token_scores={2: 4.0}, answer="8")
  (summed,) = term_lib.combined(terms, [[right], [short]])
  assert summed == types.Reward(
    score=2.0 * 1.0 - 0.5 * 4.0,
    parts={"right": 1.0, "right/a": 3.0, "short": 4.0},
    token_scores={0: 2.0, 2: 2.0 * 1.0 - 0.5 * 4.0},
    answer="7",
  )


def test_token_scores_are_none_only_where_no_term_has_them():
  terms = [make_term(name="a"), make_term(name="b")]
  none, empty = (
    types.Reward(score=1.0),
    types.Reward(score=1.0, token_scores={}),
  )
  sums = term_lib.combined(terms, [[none, none], [none, empty]])
  assert [reward.token_scores for reward in sums] == [None, {}]


def test_a_single_reward_without_a_name_stays_as_it_is():
  reward = types.Reward(score=1.0, parts={"a": 1.0}, token_scores={1: 2.0})
  assert term_lib.combined([make_term()], [[reward]]) == [reward]
  (named,) = term_lib.combined([make_term(name="x")], [[reward]])
  assert named.parts == {"x": 1.0, "x/a": 1.0}


# -- in the reward processes --------------------------------------------------


def test_terms_are_scored_in_processes_with_limits_and_counters_of_their_own(
  make_service, tmp_path
):
  service = make_service(
    make_term(name="length", weight=0.5),
    make_term(
      functools.partial(match.overlong, max_tokens=4, buffer_tokens=2),
      name="overlong",
    ),
    make_term(reward_scorers.fails_first, name="late", num_retries=1),
  )
  item = {"path": str(tmp_path / "tried")}
  rewards = reward_groups.submit(service, item, ["=abc", "=aa"])
  assert rewards.result() == [
    types.Reward(
      score=0.5 * 3 - 1.0 + 1.0,
      parts={"length": 3.0, "overlong": -1.0, "late": 1.0},
      answer="abc",
    ),
    types.Reward(
      score=0.5 * 2 - 0.5 + 1.0,
      parts={"length": 2.0, "overlong": -0.5, "late": 1.0},
      answer="aa",
    ),
  ]
  metrics = service.metrics()
  assert not metrics_page.unexplained(metrics)
  assert metrics["reward_service/errors"] == 1
  assert metrics["reward_service/late/errors"] == 1
  assert metrics["reward_service/length/errors"] == 0
  assert metrics["reward_service/overlong/latency_s"] > 0
  assert service.metrics()["reward_service/overlong/latency_s"] == 0


def test_a_term_that_fails_for_good_fails_the_group_and_is_named(make_service):
  service = make_service(
    make_term(name="fine"),
    make_term(reward_scorers.hangs, name="slow", timeout_s=0.2, num_retries=1),
    make_term(reward_scorers.raises, name="bad", num_retries=2),
  )
  failure = reward_groups.submit(service, {}, ["=a"]).result()
  assert isinstance(failure, service_lib.RewardFailure)
  assert failure.reason == (
    "timeout: a score took longer than 0.2 s (reward slow)"
  )
  metrics = service.metrics()
  counts = {
    name: value
    for name, value in metrics.items()
    if not name.endswith("latency_s")
  }
  assert counts == {
    "reward_service/timeouts": 2,
    "reward_service/errors": 3,
    "reward_service/lost/timeout": 1,
    "reward_service/lost/died": 0,
    "reward_service/lost/error": 1,
    "reward_service/lost/nan": 0,
    "reward_service/fine/timeouts": 0,
    "reward_service/fine/errors": 0,
    "reward_service/slow/timeouts": 2,
    "reward_service/slow/errors": 0,
    "reward_service/bad/timeouts": 0,
    "reward_service/bad/errors": 3,
  }


def test_a_term_scores_the_items_of_its_sources_only(make_service):
  service = make_service(
    make_term(name="a", sources=("first", "third")),
    make_term(reward_scorers.raises, name="b", sources=("second",)),
  )
  said = [reward_groups.trajectory("Q", "=ab")]
  (reward,) = service.submit({"source": "third"}, said).result()
  assert (reward.score, reward.parts) == (2.0, {"a": 2.0})
  failure = service.submit({"source": "second"}, said).result()
  assert failure.reason.endswith("(reward b)")
  for item, source in (({"source": "fourth"}, "'fourth'"), ({}, "None")):
    failure = service.submit(item, said).result()
    assert failure.reason == (
      f"error: no reward is for an item of the source {source}"
    )


# -- in the config ------------------------------------------------------------


def test_a_config_names_terms_and_defaults_are_the_tasks():
  section = task(
    right={"function": "mathematics", "weight": 2, "timeout_s": 20.0},
    form={"function": "matches", "params": {"pattern": "a+"}, "retries": 4},
    local={"function": "http://localhost:80/x", "sources": ["gsm8k"]},
  )
  form, local, right = reward_terms.of_task(section)  # by name
  assert right.scorer is mathematics.score
  assert (right.weight, right.timeout_s, right.num_retries) == (2.0, 20.0, 1)
  assert form.scorer({}, completion("aaa")) == 1.0
  assert form.scorer({}, completion("aab")) == 0.0
  assert (form.weight, form.timeout_s, form.num_retries) == (1.0, 10.0, 4)
  assert local.sources == ("gsm8k",)
  assert local.scorer.url == "http://localhost:80/x"


def test_without_rewards_the_only_term_is_task_reward():
  section = sections.TaskSection()
  section.reward, section.reward_timeout_s = "mathematics", 3.0
  (only,) = reward_terms.of_task(section)
  assert only == term_lib.Term(
    scorer=mathematics.score, timeout_s=3.0, num_retries=1
  )


@pytest.mark.parametrize(
  ("entry", "words"),
  [
    ({"function": "maths"}, "there is no reward 'maths'; use one of"),
    ({"function": "no_such_module:f"}, "cannot be imported"),
    ({"function": "matches"}, "missing a required .*argument: 'pattern'"),
    (
      {"function": "exact", "params": {"pattern": "x"}},
      "'exact' cannot be called with an item, a completion and the params"
      " pattern: got an unexpected keyword argument 'pattern'",
    ),
    ({"function": "http://"}, "'http://' is not the address of a server"),
    ({"function": "http://a:b/"}, "is not the address of a server"),
    ({"function": "http://me:pass@host/"}, "a user name in the address"),
    (
      {"function": "http://host/", "params": {"a": 1}},
      "is a server, which takes no params",
    ),
  ],
)
def test_a_term_that_does_not_exist_is_one_line(entry, words):
  with pytest.raises(sections.ConfigError, match=words) as wrong:
    reward_terms.of_task(task(mine=entry))
  assert str(wrong.value).startswith("task.rewards.mine: ")


def test_a_run_that_scores_code_says_how_programs_are_kept_in(monkeypatch):
  box = sandbox_lib.Sandbox(sandbox_lib.Kind.UNSHARE, has_user=True)
  asked = []

  def find(*, allow_unsafe):
    asked.append(allow_unsafe)
    return box

  monkeypatch.setattr(sandbox_lib, "find", find)
  terms = reward_terms.of_task(
    task(
      a={"function": "code"},
      b={"function": "code", "params": {"sandbox": "unsafe"}},
    )
  )
  assert (
    reward_terms.try_out(terms)
    == ["programs run in a sandbox made by unshare"] * 2
  )
  assert asked == [False, True]
  box = py_types.SimpleNamespace(kind=sandbox_lib.Kind.UNSAFE)
  assert reward_terms.try_out(terms)[1].startswith("WARNING: there is no")


@pytest.mark.parametrize(
  ("reward", "item", "message"),
  [
    ("code", {"metadata": {}}, "it has no tests"),
    ("code", {"metadata": {"tests": None}}, "it has no tests"),
    ("code", {"metadata": {"cases": []}}, "it has no tests"),
    ("code", {"metadata": {"cases": "1"}}, "no list of cases"),
    ("code", {"metadata": {"cases": [{"stdin": "1"}]}}, "no text as 'stdout'"),
    ("exact", {}, "it has no answer"),
    ("numeric", {}, "it has no answer"),
    ("numeric", {"answer": "3 or 4"}, "is not one number"),
    ("mathematics", {}, "it has no answer"),
    ("reasoning_gym", {"answer": "1"}, "no question of reasoning-gym"),
  ],
)
def test_items_that_cannot_be_scored_are_refused(reward, item, message):
  task = sections.TaskSection(reward=reward)
  item = {"question": "q", "source": "mine", "index": 3, **item}
  prompt = types.Prompt(
    prompt_id="mine/train/3", tokens=np.zeros(1, np.int32), item=item
  )
  with pytest.raises(sections.ConfigError) as raised:
    reward_terms.check_prompts(reward_terms.of_task(task), [prompt])
  assert str(raised.value).startswith("task.reward: the completions of mine/tr")
  assert message in str(raised.value)
  # A reward for other sources does not mind.
  task = sections.TaskSection(
    rewards=config_dict.ConfigDict(
      {"a": {"function": reward, "sources": ["other"]}}
    )
  )
  reward_terms.check_prompts(reward_terms.of_task(task), [prompt])
