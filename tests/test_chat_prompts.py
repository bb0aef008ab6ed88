"""Prompts that are chats, by the tokenizer's own chat template."""

import dataclasses
import functools
import json

import chat_templates
import jax
from ml_collections import config_dict
import pytest
import test_beginning_token
import test_rows

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import rendering
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
    ([{"role": "user", "content": None}], "not a list of messages"),
    (
      [{"role": "user", "content": None, "tool_calls": []}],
      "not a list of messages",
    ),
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


def called(i, **call):
  """A chat with a call, as files have it, and as the template takes it."""
  user, assistant, tool = chat_templates.CALLED
  user = {**user, "content": f"{user['content']} {i}"}
  call = {**chat_templates.CALL, **call}
  return [user, {**assistant, "tool_calls": [call]}, tool]


def with_arguments(arguments):
  return {"function": {"name": "weather", "arguments": arguments}}


ARGUMENTS = chat_templates.CALL["function"]["arguments"]
# What a row has, besides the chat of `called`, and the tools that come of it.
COLUMNS = {
  "as it is": ({}, {}, None),
  "tools": ({}, {"tools": chat_templates.TOOLS}, chat_templates.TOOLS),
  "tools in JSON": (
    {},
    {"tools": json.dumps(chat_templates.TOOLS)},
    chat_templates.TOOLS,
  ),
  "no tools": ({}, {"tools": []}, None),
  "null tools": ({}, {"tools": None}, None),
  "arguments in JSON": (with_arguments(json.dumps(ARGUMENTS)), {}, None),
  "nulls of a column": (
    {**with_arguments({**ARGUMENTS, "unit": None}), "id": None},
    {},
    None,
  ),
}


def chat_source(tmp_path, template, values, *, skips=False):
  """The source of a run whose rows are checked."""
  tokenizer, chat_template = chat_templates.load(template)
  path = test_rows.write(tmp_path / "a.jsonl", values)
  task = sections.TaskSection(dataset=f"jsonl:{path}")
  check = functools.partial(
    rendering.check_chat, tokenizer=tokenizer, chat_template=chat_template
  )
  items = rows_lib.Rows(
    dataset=task.dataset,
    eval_percent=50,
    fields={"messages": "chat"},
    skips_bad_rows=skips,
    check_item=lambda item: check(rendering.style_of(task, ""), item, "a"),
  )
  return prompts.PromptSource(
    items=items,
    task=task,
    tokenizer=tokenizer,
    seed=0,
    max_prompt_tokens=2_000,
    chat_template=chat_template,
  )


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_calls_and_tools_of_columns_are_in_the_prompt(tmp_path, name, kind):
  call, columns, tools = COLUMNS[name]
  values = [{"chat": called(i, **call), **columns} for i in range(20)]
  source = chat_source(tmp_path, chat_templates.QWEN, values)
  if kind == "parquet":
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    # Which gives every message the entries of all of them.
    parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "a")
    items = dataclasses.replace(
      source.items, dataset=f"parquet:{tmp_path / 'a'}"
    )
    source = dataclasses.replace(source, items=items)
  source.items.check()
  prompt = prompts.PromptStream(source, TRAIN).next()
  number = prompt.item["question"].split("?")[1].split()[0]
  messages = called(number)
  _, template = chat_templates.load(chat_templates.QWEN)
  wanted = template.render(messages, tools)
  assert '{"name": "weather", "arguments": {"city": "Zürich"}}' in wanted
  backend = source.tokenizer._tokenizer
  text = backend.decode(prompt.tokens.tolist(), skip_special_tokens=False)
  if kind == "jsonl" or tools is None:
    assert text == wanted
  else:  # the order of the entries is that of the file's schema
    assert sorted(text) == sorted(wanted)
  assert "Zürich" in prompt.item["question"].split("?")[1]
  assert "tools" not in prompt.item["metadata"]


def test_a_row_that_the_template_does_not_write_is_named_or_left_out(tmp_path):
  values = [
    {"chat": [{"role": "user", "content": f"a{i}"}], "answer": "1"}
    for i in range(20)
  ]
  values[3]["chat"].insert(0, {"role": "developer", "content": "Be brief."})
  values[5]["chat"][0]["content"] = "a<|im_end|>"
  source = chat_source(tmp_path, chat_templates.QWEN, values)
  with pytest.raises(sections.ConfigError) as refused:
    source.items.check()
  message = str(refused.value)
  assert "2 of 20 rows" in message and "\n" not in message
  assert "a.jsonl:4: the chat template does not write the content" in message
  assert "a.jsonl:6: a message has the special token '<|im_end|>'" in message
  source = chat_source(tmp_path, chat_templates.QWEN, values, skips=True)
  source.items.check()
  assert source.items.num_bad() == 2


def test_a_run_checks_its_chats_and_its_questions_by_row(tmp_path):
  chat_templates.save(tmp_path / "tokenizer", chat_templates.QWEN)
  values = test_rows.sums(range(20))
  values[3]["question"] = "1<|im_start|>"
  path = test_rows.write(tmp_path / "a.jsonl", values)
  config = sections.Config()
  config.model.tokenizer = str(tmp_path / "tokenizer")
  for is_chat in (False, True):
    config.task = sections.TaskSection(dataset=f"jsonl:{path}", chat=is_chat)
    source = setup_lib.source_of(config)
    if not is_chat:
      source.check()
      continue
    with pytest.raises(sections.ConfigError, match="a.jsonl:4: .*im_start"):
      source.check()


def test_a_reply_that_only_calls_is_no_answer(tmp_path):
  path = test_rows.write(tmp_path / "a.jsonl", [{"chat": called(1)[:2]}] * 2)
  fields = {"messages": "chat"}
  rows = rows_lib.Rows(
    dataset=f"jsonl:{path}", eval_dataset=f"jsonl:{path}", fields=fields
  )
  item = rows.open("eval", 0, num_workers=1).next()
  assert "answer" not in item and "weather" in item["reply"]
  assert item["turn"]["tool_calls"] == [chat_templates.CALL]
  assert [message["role"] for message in item["messages"]] == ["user"]


def test_the_tools_of_the_task_are_shown_to_chats_that_name_none(tmp_path):
  tokenizer, template = chat_templates.load(chat_templates.QWEN)
  task = sections.TaskSection(
    episode="tools",
    episode_params=config_dict.ConfigDict(
      {"tools": ["tool_functions:multiply"]}
    ),
  )
  tools = setup_lib.tools_of(task, tokenizer, template)
  assert [tool["function"]["name"] for tool in tools] == ["multiply"]
  item = {
    "index": 0,
    "question": "q",
    "messages": [{"role": "user", "content": "2 * 3?"}],
  }
  values = test_rows.sums([1])
  made = dataclasses.replace(
    source(tmp_path, values, chat=True),
    tokenizer=tokenizer,
    chat_template=template,
    tools=tools,
  )
  shown = tokenizer.decode(made.prompt("train", item).tokens)
  assert json.dumps(tools[0], ensure_ascii=False) in shown
  own = {**item, "tools": chat_templates.TOOLS}
  shown = tokenizer.decode(made.prompt("train", own).tokens)
  assert "weather" in shown and "multiply" not in shown
  assert not setup_lib.tools_of(sections.TaskSection(), tokenizer, template)
  task.episode_params.describe = False
  assert not setup_lib.tools_of(task, tokenizer, template)
  # A template that passes over tools is refused when a prompt is made.
  deaf = dataclasses.replace(
    made, chat_template=chat_template_lib.ChatTemplate(TEMPLATE)
  )
  with pytest.raises(sections.ConfigError, match="does not write the name of"):
    deaf.prompt("train", item)
