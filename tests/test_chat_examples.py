"""Chats as examples of supervised training: which tokens are learned."""

import dataclasses
import json

import byte_level
import chat_templates
import numpy as np
import pytest
import test_chat_prompts
import test_rows

from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

END = byte_level.END
# As Qwen's: a turn ends with a token, and a line break follows it.
TEMPLATE = (
  "{% for m in messages %}[{{ m.role }}]"
  "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
  + END
  + "{% endgeneration %}{% else %}{{ m.content }}"
  + END
  + "{% endif %}{{ '\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# The engine's Jinja does not know `generation`, which only marks.
PLAIN = TEMPLATE.replace("{% generation %}", "").replace(
  "{% endgeneration %}", ""
)
CHAT = [
  {"role": "system", "content": "Be brief."},
  {"role": "user", "content": "What is 2 + 3?"},
  {"role": "assistant", "content": "It is 5."},
  {"role": "user", "content": "And 4 + 4?"},
  {"role": "assistant", "content": "8"},
]


def learned(example, tokenizer):
  """Return the learned parts, with their special tokens, as texts."""
  edges = np.flatnonzero(np.diff(example.loss_mask.astype(int), prepend=0))
  parts = np.split(example.tokens, edges)
  masks = np.split(example.loss_mask, edges)
  backend = tokenizer._tokenizer
  return [
    backend.decode(part.tolist(), skip_special_tokens=False)
    for part, mask in zip(parts, masks, strict=True)
    if mask.any()
  ]


def chat_example(messages, template=PLAIN, tokenizer=None):
  return worked_examples_lib.chat_example(
    messages,
    chat_template_lib.ChatTemplate(template),
    tokenizer or byte_level.load(),
    "chats/1",
  )


def test_the_same_tokens_are_learned_as_transformers_marks(tmp_path):
  transformers = pytest.importorskip("transformers")
  byte_level.save(tmp_path)
  path = tmp_path / "tokenizer_config.json"
  settings = json.loads(path.read_text())
  path.write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
  reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
  wanted = reference.apply_chat_template(
    CHAT, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
  )
  example = chat_example(CHAT, tokenizer=tokenizer_lib.load(tmp_path))
  count = len(example.tokens)
  assert wanted["input_ids"][:count] == example.tokens.tolist()
  assert wanted["assistant_masks"][:count] == example.loss_mask.tolist()
  rest = wanted["input_ids"][count:]
  assert reference.decode(rest) == "\n"


def test_a_turn_without_an_end_token_gets_one():
  template = test_chat_prompts.TEMPLATE
  tokenizer = tokenizer_lib.character_level()
  chat = CHAT[1:3]
  example = chat_example(chat, template, tokenizer)
  assert tokenizer.decode(example.tokens[example.loss_mask]) == "It is 5.\n"
  assert example.tokens[-1] == tokenizer.eos_id
  assert example.loss_mask[-1]


def test_a_template_that_changes_earlier_messages_is_refused():
  template = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}"
    "{{ m.content }}|{% endif %}{% endfor %}"
  )
  with pytest.raises(
    sections.ConfigError, match="changes earlier messages of chats/1.*reply"
  ):
    chat_example(CHAT, template)


def examples(tmp_path, solver, values, **task):
  source = test_chat_prompts.source(
    tmp_path, values, fields={"messages": "chat"}, **task
  )
  section = sections.WarmStartSection(solver=solver, num_examples=2)
  return source, list(
    worked_examples_lib.WorkedExamples(source, section, max_tokens=300)
  )


def texts(example, mask):
  decode = tokenizer_lib.character_level().decode
  return decode(example.tokens[mask])


def test_a_column_of_answered_chats_gives_examples_and_prompts(tmp_path):
  values = [
    {"chat": [{**m, "content": f"{m['content']}{i}"} for m in CHAT]}
    for i in range(3)
  ]
  _, made = examples(tmp_path, "messages", values)
  for example in made:
    seen = texts(example, example.loss_mask)
    assert seen in ("It is 5.1\n81\n", "It is 5.2\n82\n")
  source, made = examples(tmp_path, "field:reply", values, system="unused")
  for example in made:
    assert texts(example, example.loss_mask) in ("81\n", "82\n")
    assert texts(example, ~example.loss_mask).endswith("\n<|assistant|>")
  item = next(iter([source.items.open("train", 0, num_workers=1).next()]))
  assert item["answer"] == item["reply"]
  assert item["messages"][-1]["role"] == "user"


def test_a_chat_without_an_answer_is_no_example(tmp_path):
  values = [
    {"chat": [{"role": "user", "content": f"a{i}"}], "answer": "1"}
    for i in range(3)
  ]
  with pytest.raises(sections.ConfigError, match="is no chat that the assis"):
    examples(tmp_path, "messages", values)


def test_rows_of_plain_text_are_no_chats(tmp_path):
  source = test_chat_prompts.source(tmp_path, test_rows.sums([1, 2, 3]))
  section = sections.WarmStartSection(solver="messages", num_examples=1)
  with pytest.raises(sections.ConfigError, match="^warm_start.solver: .*chat"):
    list(worked_examples_lib.WorkedExamples(source, section, max_tokens=300))


def asked(*answer, **message):
  """A chat that ends with an answer."""
  turn = {"role": "assistant", "content": "".join(answer), **message}
  return [{"role": "user", "content": "2 + 3?"}, turn]


IM_END = chat_templates.END
# Template, chat, and what is learned of its last turn.
TURNS = {
  "an end of turns": (chat_templates.QWEN, asked("5"), f"5{IM_END}"),
  "spaces that the template takes away": (
    chat_templates.THINKING,
    asked(" 5\n"),
    f"<think>\n\n</think>\n\n5{IM_END}",
  ),
  "thoughts": (
    chat_templates.THINKING,
    asked("5", reasoning_content="2 and 3\n"),
    f"<think>\n2 and 3\n</think>\n\n5{IM_END}",
  ),
  "thoughts in the content": (
    chat_templates.THINKING,
    asked("<think>\nSo.</think>5"),
    f"<think>\nSo.\n</think>\n\n5{IM_END}",
  ),
  "a call": (
    chat_templates.QWEN,
    asked("", tool_calls=[chat_templates.CALL]),
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
    f"</tool_call>{IM_END}",
  ),
  "an end where the next turn begins": (
    chat_templates.ROLES,
    asked("5"),
    "5<|user|>",
  ),
  "the same after a line break": (
    chat_templates.ROLES.replace("{{- '<|", "{{- '\\n<|"),
    asked("5"),
    "5\n<|user|>",
  ),
  "an end where the answer of a tool begins": (
    chat_templates.CALLING,
    asked("", tool_calls=[chat_templates.CALL]),
    'weather({"city": "Zürich"})<|tool|>',
  ),
  "no end": (
    test_chat_prompts.TEMPLATE.replace("|", ""),
    asked("5"),
    f"5\n{IM_END}",
  ),
}


def tokenizer_of(template):
  """The tokenizer, for which the end of a turn may be the user's beginning."""
  tokenizer, made = chat_templates.load(template)
  backend = tokenizer._tokenizer
  ends = [backend.token_to_id(name) for name in ("<|user|>", "<|tool|>")]
  return made, tokenizer_lib.Tokenizer(
    backend,
    eos_token=IM_END,
    pad_token="<|endoftext|>",
    end_tokens=ends,
  )


@pytest.mark.parametrize("name", TURNS)
def test_the_last_turn_is_learned_as_the_template_writes_it(tmp_path, name):
  source, messages, wanted = TURNS[name]
  template, tokenizer = tokenizer_of(source)
  alone = worked_examples_lib.chat_example(
    messages, template, tokenizer, "a", is_last_alone=True
  )
  assert learned(alone, tokenizer) == [wanted]
  # The same as of the last turn of a chat in which each is learned.
  values = [{"chat": messages}, {"chat": [*messages[:-1], messages[-1]]}]
  for i, row in enumerate(values):
    row["chat"][0] = {"role": "user", "content": f"{i}?"}
  made = test_chat_prompts.source(tmp_path, values, fields={"messages": "chat"})
  made = dataclasses.replace(
    made, tokenizer=tokenizer, chat_template=template, max_prompt_tokens=999
  )
  for solver in ("messages", "field:reply"):
    section = sections.WarmStartSection(solver=solver, num_examples=1)
    (example,) = worked_examples_lib.WorkedExamples(
      made, section, max_tokens=2_000
    )
    assert learned(example, tokenizer) == [wanted]
    prompt = prompts.PromptStream(made, "train").next()
    assert example.tokens[: len(prompt.tokens)].tolist() == (
      prompt.tokens.tolist()
    )
  text = messages[-1]["content"]
  if text == "5" and "reasoning_content" not in messages[-1]:
    # A completion that is a text stays as it is, and ends as turns end.
    raw = worked_examples_lib.completed(prompt, text, made)
    end = wanted.rpartition("5")[2].strip()
    assert learned(raw, tokenizer) == [f"5{end}"]
    again = worked_examples_lib.answered(prompt, f"5{IM_END}", made)
    assert learned(again, tokenizer) == [f"5{IM_END}"]
    with pytest.raises(ValueError, match="special token '<.im_end.>'"):
      worked_examples_lib.completed(prompt, f"5{IM_END}", made)


def test_each_turn_ends_where_the_next_one_begins():
  template, tokenizer = tokenizer_of(chat_templates.ROLES)
  example = worked_examples_lib.chat_example(CHAT, template, tokenizer, "a")
  assert learned(example, tokenizer) == ["It is 5.<|user|>", "8<|user|>"]
  whole = template.render(CHAT, is_prompt=False)
  backend = tokenizer._tokenizer
  text = backend.decode(example.tokens.tolist(), skip_special_tokens=False)
  assert text == f"{whole}<|user|>"


def test_a_turn_that_does_not_follow_its_prompt_is_refused():
  template, tokenizer = tokenizer_of(chat_templates.OPENED)
  for alone in (False, True):
    with pytest.raises(sections.ConfigError, match="^task.chat: .*otherwise"):
      worked_examples_lib.chat_example(
        asked("5"), template, tokenizer, "a", is_last_alone=alone
      )


def test_a_chat_of_which_the_template_drops_a_call_is_no_example():
  template, tokenizer = tokenizer_of(chat_templates.ROLES)
  with pytest.raises(sections.ConfigError, match="^task.chat: a: .*a call in"):
    worked_examples_lib.chat_example(
      asked("5", tool_calls=[chat_templates.CALL]), template, tokenizer, "a"
    )
