"""Prompts that are chats, by the tokenizer's own chat template."""

import dataclasses

import jax
from ml_collections import config_dict
import pytest
import test_beginning_token
import test_rows

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

TEMPLATE = (
  "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n"
  "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER = tokenizer_lib.character_level()
TRAIN = source_lib.Split.TRAIN


def source(tmp_path, values, *, fields=None, **task):
  path = test_rows.write(tmp_path / "a.jsonl", values)
  given = {"dataset": f"jsonl:{path}", "eval_dataset": f"jsonl:{path}.eval"}
  test_rows.write(tmp_path / "a.jsonl.eval", [{**values[0], "x": 1}])
  return prompts.PromptSource(
    items=rows_lib.Rows(**given, fields=fields or {}),
    task=sections.TaskSection(**given, **task),
    tokenizer=TOKENIZER,
    seed=0,
    max_prompt_tokens=200,
    chat_template=chat_template_lib.ChatTemplate(TEMPLATE),
  )


def texts(source, split, count):
  stream = prompts.PromptStream(source, split)
  return {TOKENIZER.decode(stream.next().tokens) for _ in range(count)}


def test_the_filled_in_template_is_the_users_message(tmp_path):
  values = test_rows.sums([1, 2, 3])
  made = source(tmp_path, values, chat=True, template="What is {question}?")
  made.items.check()
  assert texts(made, TRAIN, 2) == {
    f"<|user|>What is {i} + {i} = ?\n<|assistant|>" for i in (2, 3)
  }
  made = source(tmp_path, values, chat=True, system="Think {hard}.")
  assert texts(made, source_lib.Split.EVAL, 1) == {
    "<|system|>Think {hard}.\n<|user|>1 + 1 = \n\n<|assistant|>"
  }
  assert len(made.shared_tokens) == 0


def test_the_chat_template_brings_the_token_that_begins_a_text(tmp_path):
  tokenizer = test_beginning_token.characters()
  made = dataclasses.replace(
    source(tmp_path, test_rows.sums([1, 2]), chat=True), tokenizer=tokenizer
  )
  prompt = prompts.PromptStream(made, TRAIN).next()
  text = "<|user|>2 + 2 = \n\n<|assistant|>"
  assert prompt.tokens.tolist() == TOKENIZER.encode(text).tolist()


def test_a_column_of_messages_is_the_prompt(tmp_path):
  def chat(i):
    messages = [
      {"role": "user", "content": f"a{i}", "name": None},
      {"role": "assistant", "content": "b"},
      {"role": "user", "content": "c"},
    ]
    return {"chat": messages, "answer": "1"}

  values = [chat(i) for i in range(3)]
  fields = {"messages": "chat"}
  made = source(tmp_path, values, fields=fields)
  made.items.check()
  assert texts(made, TRAIN, 2) == {
    f"<|user|>a{i}\n<|assistant|>b\n<|user|>c\n<|assistant|>" for i in (1, 2)
  }
  item = prompts.PromptStream(made, TRAIN).next().item
  assert item["question"] in ("a1\nb\nc", "a2\nb\nc")
  assert item["messages"][0].keys() == {"role", "content"}
  system = source(tmp_path, values, fields=fields, system="S")
  assert all(t.startswith("<|system|>S\n") for t in texts(system, TRAIN, 2))


@pytest.mark.parametrize(
  ("messages", "words"),
  [
    ("hello", "'hello', not a list of messages"),
    ([], "not a list of messages"),
    ([{"role": "user"}], "not a list of messages"),
    ([{"role": "user", "content": ["a"]}], "not a list of messages"),
    (
      [{"role": "assistant", "content": "b"}],
      "has messages of the assistant alone",
    ),
    (None, "the column 'chat' is empty"),
  ],
)
def test_messages_that_are_none_are_a_bad_row(tmp_path, messages, words):
  path = test_rows.write(
    tmp_path / "a.jsonl", [{"chat": messages, "answer": "1"}]
  )
  rows = rows_lib.Rows(dataset=f"jsonl:{path}", fields={"messages": "chat"})
  with pytest.raises(sections.ConfigError, match="a.jsonl:1: ") as raised:
    rows.check()
  assert words in str(raised.value)


def test_a_chat_that_the_template_refuses_is_named(tmp_path):
  made = source(tmp_path, test_rows.sums([1, 2]), chat=True)
  refusing = chat_template_lib.ChatTemplate(
    "{{ raise_exception('no system, please') }}"
  )
  made = dataclasses.replace(made, chat_template=refusing)
  with pytest.raises(sections.ConfigError, match="^task.chat: .* no system"):
    prompts.validate_task(made)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
  config = sections.Config()
  path = test_rows.write(
    tmp_path / "a.jsonl",
    [
      {**row, "chat": [{"role": "user", "content": row["question"]}]}
      for row in test_rows.sums(range(30))
    ],
  )
  for settings, field in (
    ({"chat": True}, "task.chat"),
    (
      {"fields": config_dict.ConfigDict({"messages": "chat"})},
      "task.fields",
    ),
  ):
    config.task = sections.TaskSection(dataset=f"jsonl:{path}", **settings)
    with pytest.raises(
      sections.ConfigError,
      match=f"^{field}: the tokenizer of 'quickstart' has no chat template",
    ):
      setup_lib.resolve(config, jax.devices())
