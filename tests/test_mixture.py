"""Mixtures: turns, places, held-out questions, what a config says of them."""

import collections
import dataclasses
import itertools
import json

from ml_collections import config_dict
import pytest
import test_rows
import tiny

from jaxrl_async import types
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import mixture as mixture_lib
from jaxrl_async.data import prompts
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.data import task_sources
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.training import step_metrics

TRAIN, EVAL = source_lib.Split.TRAIN, source_lib.Split.EVAL


def rows(tmp_path, name, values, **settings):
  path = test_rows.write(tmp_path / f"{name}.jsonl", values)
  return rows_lib.Rows(dataset=f"jsonl:{path}", label=name, **settings)


@pytest.fixture
def mixture(tmp_path):
  """Three parts of one source, and two and a half of another."""
  return mixture_lib.Mixture(
    members={
      "a": rows(tmp_path, "a", test_rows.sums(range(30))),
      "b": rows(tmp_path, "b", test_rows.sums(range(100, 117)), seed=5),
    },
    weights={"a": 3.0, "b": 2.5},
  )


def exact_turns(weights, count):
  """Whoever is furthest behind what is due to him is next."""
  had, turns = dict.fromkeys(weights, 0), []
  for number in range(1, count + 1):
    due = {
      name: number * weight - had[name] * sum(weights.values())
      for name, weight in weights.items()
    }
    turns.append(max(due, key=due.__getitem__))
    had[turns[-1]] += 1
  return turns


def test_turns_are_in_proportion_at_every_place(mixture):
  turns = list(itertools.islice(mixture.turns(TRAIN, 0), 110))
  assert turns == exact_turns({"a": 6, "b": 5}, 110)
  assert turns[:11] == turns[11:22] and turns[:11].count("a") == 6
  for end in range(1, 110):
    assert abs(turns[:end].count("a") - end * 6 / 11) < 1
  for first in (1, 7, 11, 64):
    assert (
      list(itertools.islice(mixture.turns(TRAIN, first), 40))
      == (turns[first : first + 40])
    )


def test_each_member_keeps_its_own_order(mixture):
  items = test_rows.take(mixture, TRAIN, 80)
  for name, member in mixture.members.items():
    own = [x["index"] for x in items if x["source"] == name]
    alone = test_rows.take(member, TRAIN, len(own))
    assert own == [x["index"] for x in alone]


def test_it_goes_on_from_any_place(mixture):
  items = test_rows.take(mixture, TRAIN, 80)
  for first in (1, 10, 11, 47):
    assert test_rows.take(mixture, TRAIN, 20, first) == items[first:][:20]
  stream = prompts.PromptStream(test_rows.prompt_source(mixture), TRAIN)
  ids = [stream.next().prompt_id for _ in range(47)]
  assert ids[0].startswith("a/train/") and ids[1].startswith("b/train/")
  metrics = stream.metrics()
  size = {n: m.num_questions(TRAIN) for n, m in mixture.members.items()}
  assert {k: v for k, v in metrics.items() if "epoch" in k} == {
    f"data/epoch/{name}": pytest.approx(
      sum(i.startswith(name) for i in ids) / size[name]
    )
    for name in ("a", "b")
  }


def test_what_one_member_holds_out_no_other_trains_on(tmp_path):
  values = test_rows.sums(range(40))
  held_out = rows(tmp_path, "test", values[:10])
  mixture = mixture_lib.Mixture(
    members={
      "all": rows(tmp_path, "all", values),
      "some": rows(
        tmp_path, "some", values[20:], eval_dataset=held_out.dataset
      ),
    },
    weights={"all": 1.0, "some": 1.0},
  )
  asked = {
    item["question"]
    for item in test_rows.take(mixture, TRAIN, 200)
    if item is not None
  }
  evaluated = {item["question"] for item in test_rows.take(mixture, EVAL, 200)}
  assert {v["question"] for v in values[:10]} <= evaluated
  assert not asked & evaluated and len(asked) > 20


@pytest.mark.slow
def test_rows_and_questions_of_reasoning_gym_mix_in_proportion(tmp_path):
  params = {"min_terms": 2, "max_terms": 4}
  mixture = mixture_lib.Mixture(
    members={
      "sums": gym.ReasoningGym(name="chain_sum", params=params, seed=1),
      "rows": rows(tmp_path, "rows", test_rows.sums(range(50))),
    },
    weights={"sums": 1.0, "rows": 3.0},
  )
  mixture.check()
  source = test_rows.prompt_source(mixture)
  stream = prompts.PromptStream(source, TRAIN)
  found = collections.Counter(stream.next().item["source"] for _ in range(400))
  assert 80 < found["sums"] < 120  # of reasoning-gym, every second index
  state = json.loads(json.dumps(stream.state()))
  rest = [stream.next().prompt_id for _ in range(20)]
  stream.close()
  again = prompts.PromptStream(source, TRAIN)
  again.restore(state)
  assert [again.next().prompt_id for _ in range(20)] == rest
  again.close()
  assert mixture.num_questions(EVAL) is None
  assert [s.value for s in mixture.splits] == ["train", "warm_start", "eval"]


def test_a_step_tells_the_mean_reward_of_each_source():
  def group(source, score):
    made = tiny.written_group(types.Admission(index=0, birth=0, deadline=1))
    (trajectory,) = made.trajectories
    prompt = dataclasses.replace(made.prompt, item={"source": source})
    return dataclasses.replace(
      made,
      prompt=prompt,
      trajectories=[dataclasses.replace(trajectory, reward=tiny.reward(score))],
    )

  groups = [group("a", 0.0), group("b", 1.0), group("a", 0.5)]
  metrics = step_metrics.of_groups(groups, 0)
  of_sources = {k: v for k, v in metrics.items() if "source" in k}
  assert of_sources == {"reward/source/a": 0.25, "reward/source/b": 1.0}
  assert not any("source" in k for k in step_metrics.of_groups(groups[:1], 0))


def test_weights_of_any_size_give_short_periods(tmp_path):
  member = rows(tmp_path, "a", test_rows.sums(range(30)))
  for weights in ((0.7, 0.3), (1e6, 1e-3), (0.123456, 7.77777, 3.141592)):
    names = "abc"[: len(weights)]
    mixture = mixture_lib.Mixture(
      members=dict.fromkeys(names, member),
      weights=dict(zip(names, weights, strict=True)),
    )
    shares = mixture._shares(TRAIN)
    assert sum(shares.values()) <= 100_001
    for name, weight in zip(names, weights, strict=True):
      exact = weight / sum(weights)
      found = shares[name] / sum(shares.values())
      assert found == pytest.approx(exact, abs=2e-5)


def task(**given):
  return sections.TaskSection(
    sources=config_dict.ConfigDict(given), chat=True, template="T {question}"
  )


def test_a_config_names_members_with_settings_of_their_own(tmp_path):
  path = test_rows.write(
    tmp_path / "a.jsonl", [{"problem": "p", "gold": "1"}] * 3
  )
  given = task(
    files={
      "dataset": f"jsonl:{path}",
      "weight": 2,
      "fields": {"question": "problem", "answer": "gold"},
      "on_bad_row": "skip",
      "eval_dataset": f"jsonl:{path}",
    },
    sums={
      "dataset": "reasoning_gym:chain_sum",
      "weight": 0.5,
      "params": {"min_terms": 2},
      "template": "{expression}",
      "chat": False,
    },
  )
  task_sources.check(given)
  made = setup_lib.of_task(given, seed=3)
  files, sums = made.members.values()
  assert files.skips_bad_rows and files.in_template == ("question",)
  assert files.label == "files" and files.seed == 3
  assert sums == gym.ReasoningGym(
    name="chain_sum", params={"min_terms": 2}, seed=3
  )
  assert made.weights == {"files": 2, "sums": 0.5}
  members = task_sources.members_of(given)
  assert members["files"].chat and not members["sums"].chat
  assert task_sources.needs_chat(given) == "task.sources.files.chat"
  with pytest.raises(
    sections.ConfigError, match=r"^task\.sources\.files\.dataset: jsonl:.* held"
  ):
    made.check()
