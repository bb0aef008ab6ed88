"""Calls in what policies write, however they are written."""

import json

import chat_templates
from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from jaxrl_async.tools import formats

CALL = formats.Call("f", {"x": {"y": ["}", 1]}})
BODY = '{"name": "f", "arguments": {"x": {"y": ["}", 1]}}}'
IN_LLAMA = BODY.replace("arguments", "parameters")


def hermes(*bodies):
  return "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@pytest.mark.parametrize(
  "text, before, found",
  [
    ("no call at all {}", "no call at all {}", []),
    ("", "", []),
    (f"Let me see.\n{hermes(BODY)}", "Let me see.\n", [CALL]),
    (hermes(BODY, BODY) + "done", "", [CALL, CALL]),
    # The end of the turn came first.
    (f"<tool_call>{BODY}", "", [CALL]),
    (f"<tool_call>{BODY}\n", "", [CALL]),
    (hermes('{"name": "f"}'), "", [formats.Call("f", {})]),
    (hermes('{"name": "f", "arguments": null}'), "", [formats.Call("f", {})]),
    # Arguments as a text in JSON, as OpenAI has them.
    (
      hermes(json.dumps({"name": "f", "arguments": '{"a": "\\u00fc"}'})),
      "",
      [formats.Call("f", {"a": "ü"})],
    ),
    (
      hermes('{"type": "function", "function": {"name": "f"}}'),
      "",
      [formats.Call("f", {})],
    ),
    # A mark in a text of the call, and a text of two lines.
    (
      hermes('{"name": "f", "arguments": {"a": "</tool_call><think>\n"}}'),
      "",
      [formats.Call("f", {"a": "</tool_call><think>\n"})],
    ),
    # Thoughts.
    (
      f"<think>{hermes(BODY)}</think>no",
      f"<think>{hermes(BODY)}</think>no",
      [],
    ),
    (f"<think>a</think>{hermes(BODY)}", "<think>a</think>", [CALL]),
    (
      f"{hermes(BODY)}</think>{hermes(BODY)}",
      f"{hermes(BODY)}</think>",
      [CALL],
    ),
    (f"<think>never {hermes(BODY)}", f"<think>never {hermes(BODY)}", []),
  ],
)
def test_calls_of_hermes_are_found(text, before, found):
  assert formats.hermes(text) == formats.Parsed(before, tuple(found))


@pytest.mark.parametrize(
  "body, reason",
  [
    ("f(1)", "it is no JSON: Expecting value, character 0"),
    ('{"name": "f", "arguments": {"x": 1}', "it is no JSON: Expecting ','"),
    ("[]", "it is no object"),
    ('{"arguments": {}}', "it has no name"),
    ('{"name": ""}', "it has no name"),
    ('{"name": 3}', "it has no name"),
    ('{"name": "f", "arguments": [1]}', "its arguments are no object"),
    ('{"name": "f", "args": {"x": 1}}', "it has no arguments, but 'args'"),
    (
      '{"name": "f", "arguments": " {x"}',
      "its arguments are no JSON: Expecting property name enclosed in double"
      " quotes, character 1",
    ),
    ('{"name": "f", "arguments": {"x": NaN}}', "NaN is no number"),
    ('{"name": "f", "arguments": {"x": 1e999}}', "Out of range float"),
    ('{"name": "f", "arguments": {"x": "\\ud800"}}', "a text in it is not"),
    (f'{{"name": "f", "arguments": {"[" * 5000}', "it is nested too deeply"),
    (f'{{"name": "f", "arguments": {{"x": {"1" * 5000}}}}}', "Exceeds"),
    (f"{BODY} and more", "</tool_call> does not follow"),
  ],
)
def test_a_malformed_call_comes_with_its_reason_and_hides_no_other(
  body, reason
):
  parsed = formats.hermes(f"a{hermes(body, BODY)}")
  assert parsed.text == "a" and parsed.calls == [CALL]
  (malformed,) = parsed.malformed
  assert malformed.reason.startswith(reason) and malformed.text == body
  assert parsed.found == (malformed, CALL)


@pytest.mark.parametrize(
  "text, before, found",
  [
    ("no call at all {}", "no call at all {}", []),
    (IN_LLAMA, "", [CALL]),
    (f"\n{IN_LLAMA}", "\n", [CALL]),
    (f"<|python_tag|>{IN_LLAMA}", "", [CALL]),
    (f"I see.<|python_tag|>{IN_LLAMA}; {BODY}", "I see.", [CALL, CALL]),
    (f"{IN_LLAMA}\n{IN_LLAMA}", "", [CALL, CALL]),
    (f"so\n<|python_tag|> {BODY} <|python_tag|>{BODY}", "so\n", [CALL, CALL]),
    ("so <|python_tag|>", "so <|python_tag|>", []),
    (f"I call {IN_LLAMA} now.", "I call ", [CALL]),
    (f"<think>{BODY}</think>{BODY}", f"<think>{BODY}</think>", [CALL]),
    (f"{BODY}</think>{BODY}", f"{BODY}</think>", [CALL]),
    (f"<think>{BODY}", f"<think>{BODY}", []),
    ('{"type": "function", "name": "f"}', "", [formats.Call("f", {})]),
    ("the set {1, 2} of {3}", "the set {1, 2} of {3}", []),
  ],
)
def test_calls_of_llama_are_found(text, before, found):
  assert formats.llama(text) == formats.Parsed(before, tuple(found))


@pytest.mark.parametrize(
  "text, reason",
  [
    ("{'name': 'f'}", "it is no JSON"),
    ('{"a": 1}', "it has no name"),
    ('<|python_tag|>f.call(query="x")', "it is no JSON: Expecting value"),
    ('He is {"name": "Bob", "age": 3}.', "it has no arguments, but 'age'"),
    ('so {"name": "f", "parameters": {"x": ', "it is no JSON"),
  ],
)
def test_what_llama_meant_as_a_call_comes_with_the_reason(text, reason):
  parsed = formats.llama(text)
  assert [x.reason.startswith(reason) for x in parsed.found] == [True]


_PIECES = st.sampled_from(
  [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"),
    *(
      "{",
      "}",
      "[",
      "]",
      '"',
      ":",
      ",",
      ";",
      " ",
      "\n",
      "\\",
      '{"name":',
      "1e999",
    ),
    *('"f"', '"arguments":', '"parameters":', "\ud800", "ü", "NaN", BODY),
  ]
)


@settings(deadline=None)
@given(
  st.sampled_from(sorted(formats.FORMATS)),
  st.lists(_PIECES | st.text(max_size=3), max_size=30).map("".join),
)
def test_no_text_raises_and_none_is_lost(name, text):
  parsed = formats.FORMATS[name].parse(text)
  assert text.startswith(parsed.text)
  assert bool(parsed.found) or parsed.text == text
  for each in parsed.calls:
    json.dumps(each.arguments, allow_nan=False, ensure_ascii=False).encode()
  for each in parsed.malformed:
    assert each.text in text and each.reason


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
  "piece",
  [
    "<tool_call>",
    '<tool_call>{"a":[',
    "{",
    '{"name":',
    '{"name":[',
    "[",
    "<think>",
    '{"name":"f","arguments":{"a":',
  ],
)
def test_a_long_text_takes_no_time(piece):
  for form in formats.FORMATS.values():
    form.parse(piece * (20_000 // len(piece)))
    form.parse(piece * (20_000 // len(piece)) + "</think>")


@settings(deadline=None)
@given(
  st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text()))
)
@example({"": "</think>"})
@example({"a": ["</tool_call><think>", "</think><tool_call>"]})
def test_any_call_is_read_as_it_was_written(arguments):
  for name, form in formats.FORMATS.items():
    body = {"name": name, form.arguments: arguments}
    text = json.dumps(body, ensure_ascii=len(arguments) % 2 == 0)
    if name == "hermes":
      text = hermes(text)
    assert form.parse(text).found == (formats.Call(name, arguments),)


def test_the_format_is_found_in_the_chat_template():
  assert formats.in_template(chat_templates.QWEN) == "hermes"
  assert formats.in_template(chat_templates.THINKING) is None
  assert formats.in_template('{{- "<|python_tag|>" }}') == "llama"
  llama32 = """{{- '{"name": "' + call.name + '", ' }}{{- '"parameters": ' }}"""
  assert formats.in_template(llama32) == "llama"
  coder = "<tool_call>\\n<function={{ call.name }}>"
  assert formats.in_template(coder) is None


def test_marks_are_read_although_they_are_special_tokens():
  tokenizer, _ = chat_templates.load(chat_templates.QWEN)
  form = formats.Format(formats.hermes, ("<|user|>", "<think>"), "arguments")
  text = "a<|user|>b<think><|im_end|>"
  shown = formats.text_of(tokenizer.encode(text), tokenizer, form)
  assert shown == "a<|user|>b<think>"
