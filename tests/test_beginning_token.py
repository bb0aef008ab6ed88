"""A token that begins each text: there once, in training and in serving."""

import contextlib

import llama_tokenizer
import numpy as np
import pytest
import serving_world

from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import rendering
from jaxrl_async.data import source as source_lib
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.data.reasoning_gym import gym
from jaxrl_async.text import tokenizer as tokenizer_lib


def characters():
  """A token a character, after one that begins each text."""
  tokenizer = tokenizer_lib.character_level()
  llama_tokenizer.put_first(tokenizer._tokenizer, tokenizer_lib.PAD_TOKEN)
  return tokenizer


def test_prompts_have_it_and_worked_solutions_do_not():
  tokenizer = characters()
  task, warm_start = sections.TaskSection(), sections.WarmStartSection()
  warm_start.num_examples = 3
  source = prompts.PromptSource(
    items=gym.ReasoningGym(name=task.dataset, params={}, seed=0),
    task=task,
    tokenizer=tokenizer,
    seed=0,
    max_prompt_tokens=500,
  )
  stream = prompts.PromptStream(source, source_lib.Split.TRAIN)
  with contextlib.closing(stream):
    prompt = stream.next()
  begin = tokenizer.pad_id
  assert prompt.tokens[0] == begin
  text = rendering.render(task.template, prompt.item, task.dataset)
  np.testing.assert_array_equal(prompt.tokens[1:], tokenizer.encode(text))
  examples = worked_examples_lib.WorkedExamples(
    source, warm_start, max_tokens=2_000
  )
  for example in examples:
    assert example.tokens[~example.loss_mask][0] == begin
    assert begin not in example.tokens[example.loss_mask]


@pytest.fixture(scope="module")
def serving():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(serving_world, "TOKENIZER", characters())
    with serving_world.Serving(tokenizer=serving_world.TOKENIZER) as made:
      yield made


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["ab", ["ab"], [0, 67, 68], [[0, 67, 68]]])
def test_a_text_has_it_and_tokens_are_taken_as_they_are(serving, prompt):
  body = serving_world.body(prompt=prompt, max_tokens=2, seed=1)
  answer = serving.post(json=body).json()
  assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.slow
def test_a_chat_brings_its_own(serving):
  # Without a template it is the message and a newline.
  body = serving_world.chat(max_tokens=2)
  answer = serving.post("/v1/chat/completions", json=body).json()
  assert answer["usage"]["prompt_tokens"] == 2
