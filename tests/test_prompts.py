"""Prompts: splits, resuming, lengths, and what a wrong task says."""

import contextlib
import itertools

from ml_collections import config_dict
import numpy as np
import pytest

from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.rewards import reasoning
from jaxrl_async.text import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.character_level()


def chain_sum(template="{expression}\n", dataset="chain_sum", **params):
  params = params or {
    "min_terms": 3,
    "max_terms": 6,
    "min_digits": 1,
    "max_digits": 1,
  }
  return sections.TaskSection(
    dataset=dataset,
    params=config_dict.ConfigDict(params),
    template=template,
  )


def source(task=None, *, seed=0, max_prompt_tokens=24):
  task = task or chain_sum()
  return prompts.PromptSource(
    items=gym.ReasoningGym(
      name=task.dataset, params=task.params.to_dict(), seed=seed
    ),
    task=task,
    tokenizer=TOKENIZER,
    seed=seed,
    max_prompt_tokens=max_prompt_tokens,
  )


@pytest.fixture
def stream():
  """Makes streams and ends their processes."""
  with contextlib.ExitStack() as stack:

    def make(
      task=None,
      split=source_lib.Split.TRAIN,
      *,
      num_workers=1,
      max_barren=2_000,
      **more,
    ):
      made = prompts.PromptStream(
        source(task, **more),
        split,
        num_workers=num_workers,
        max_barren=max_barren,
      )
      return stack.enter_context(contextlib.closing(made))

    yield make


def test_no_question_belongs_to_two_splits(stream):
  texts = {}
  for split, count in (("train", 750), ("warm_start", 600), ("eval", 150)):
    # Two-term sums: few enough that each split meets most of them.
    task = chain_sum(min_terms=2, max_terms=2, max_digits=1)
    each = stream(task, source_lib.Split(split))
    found = [each.next() for _ in range(count)]
    assert all(p.prompt_id.startswith(f"chain_sum/{split}/") for p in found)
    texts[split] = {p.item["question"] for p in found}
  for a, b in itertools.combinations(texts, 2):
    assert not texts[a] & texts[b]
  assert sum(map(len, texts.values())) > 150  # of 200
  assert len(texts["eval"]) < len(texts["warm_start"]) < len(texts["train"])


def test_a_prompt_depends_on_seed_split_and_index_only(stream):
  by_one, by_three = stream(), stream(num_workers=3)
  for _ in range(40):
    prompt, again = by_one.next(), by_three.next()
    assert prompt.prompt_id == again.prompt_id
    assert prompt.item == again.item
    np.testing.assert_array_equal(prompt.tokens, again.tokens)
  assert by_one.state() == by_three.state()
  first = {
    (seed, split): stream(seed=seed, split=split).next().item["question"]
    for seed in (0, 1, 255)
    for split in source_lib.Split
  }
  assert len(set(first.values())) == len(first)


def test_a_prompt_is_the_filled_in_template(stream):
  task = chain_sum("Q: {question} [{num_terms}, {difficulty[num_terms][0]}]")
  prompt = stream(task, max_prompt_tokens=200).next()
  item = prompt.item
  assert TOKENIZER.decode(prompt.tokens) == (
    f"Q: {item['question']} [{item['metadata']['num_terms']}, 3]"
  )
  assert reasoning.score_answer(item, item["answer"]) == 1.0


def test_a_restored_stream_goes_on_exactly(stream):
  uninterrupted = stream(max_prompt_tokens=15)
  for _ in range(20):
    uninterrupted.next()
  state = uninterrupted.state()
  rest = [uninterrupted.next() for _ in range(20)]
  resumed = stream(max_prompt_tokens=15)
  resumed.restore(state)
  for prompt in rest:
    again = resumed.next()
    assert again.prompt_id == prompt.prompt_id
    np.testing.assert_array_equal(again.tokens, prompt.tokens)
  assert resumed.state() == uninterrupted.state()
  with pytest.raises(KeyError):
    resumed.restore({"next_index": 3})


def test_a_stream_without_a_prompt_that_fits_is_an_error(stream):
  with pytest.raises(
    sections.ConfigError, match="rollout.max_prompt_tokens: 9, .* has 10 tokens"
  ):
    stream(max_prompt_tokens=9).next()


def test_prompts_that_are_far_too_long_are_not_all_tokenized(
  stream, monkeypatch
):
  monkeypatch.setattr(prompts, "_MAX_BARREN_TOKENS", 50_000)
  task = chain_sum("x" * 10_000 + "{expression}\n")
  long = stream(task, max_prompt_tokens=9_999)
  with pytest.raises(
    sections.ConfigError, match=r"max_prompt_tokens: 9999, .* has 1001\d tokens"
  ):
    long.next()
  assert long._seen["num_too_long"] == 5


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"dataset": "chain_sums"}, "task.dataset: .*did you mean chain_sum"),
    ({"dataset": "zzz"}, "task.dataset: .*'zzz'; there is "),
    ({"dataset": "composite"}, "task.dataset: composite cannot be used: it"),
    (
      {"dataset": "word_sorting", "min_words": 10**6, "max_words": 10**6},
      "task.dataset: word_sorting failed to make item 0: ValueError: ",
    ),
    ({"dataset": "codeio"}, "task.dataset: codeio cannot be used: .* clock"),
    ({"min_term": 3}, r"task.params.min_term: .*did you mean min_terms"),
    ({"seed": 3}, "task.params.seed: is set by the run"),
    ({"min_terms": 5, "max_terms": 4}, "task.params: .*max_terms must be"),
    ({"min_terms": "a"}, "task.params: chain_sum refuses"),
    ({"template": "{expresion}"}, "task.template: .*did you mean expression"),
    ({"template": "{question"}, "task.template: "),
    ({"template": "{}"}, "task.template: "),
    ({"template": "{num_terms[3]}"}, "task.template: "),
    ({"template": "é {question}"}, "task.dataset: .*U\\+00E9"),
  ],
)
def test_a_wrong_task_is_named_in_one_line(changes, message):
  with pytest.raises(sections.ConfigError, match=message) as raised:
    prompts.validate_task(source(chain_sum(**changes), max_prompt_tokens=200))
  assert "\n" not in str(raised.value)


def test_a_seed_out_of_range_is_named():
  for seed in (-1, 256):
    with pytest.raises(sections.ConfigError, match="seed: .*0 to 255"):
      prompts.validate_task(source(seed=seed))


def test_a_right_task_passes():
  prompts.validate_task(source())
