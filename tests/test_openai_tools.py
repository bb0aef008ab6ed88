"""Tools over HTTP: the calls that a scripted policy writes, and agents."""

import contextlib
import json

import chat_templates
import numpy as np
import openai
import pytest
import serving_world
import tiny

from jaxrl_async import types
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.serving import guided
from jaxrl_async.serving import tool_calls
from jaxrl_async.text import guides as guides_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.tools import formats

TOKENIZER, TEMPLATE = chat_templates.load(chat_templates.QWEN)
CALL = (
  '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n'
  "</tool_call>"
)
LLAMA = '{"name": "weather", "parameters": {"city": "Zürich"}}'
ARGUMENTS = {"city": "Zürich"}
USER = [{"role": "user", "content": "How is it in Zürich?"}]
WANTED = {"model": "tiny", "messages": USER, "tools": chat_templates.TOOLS}


class Scripted(scheduler_lib.Scheduler):
  """A scheduler that writes what a script says, some tokens in each step."""

  version = 0

  def __init__(self, script):
    self.script = script
    self.prompts, self.guides = [], []
    self.engine = tiny.engine()
    self._texts = {}

  @property
  def is_idle(self):
    return not self._texts

  def sequences(self):
    return list(self._texts)

  def submit(self, sequence):
    self.guides.append(sequence.guide)
    self.prompts.append(TOKENIZER.decode_all(sequence.written().tolist()))
    text = self.script(self.prompts[-1])
    tokens = [*TOKENIZER.encode(text).tolist(), TOKENIZER.eos_id]
    self._texts[sequence] = tokens[: sequence.limit - sequence.length]

  def cancel(self, owner):
    self._texts = {s: t for s, t in self._texts.items() if s.owner != owner}

  def step(self):
    ended = []
    for sequence, tokens in list(self._texts.items()):
      new, self._texts[sequence] = tokens[:3], tokens[3:]
      none = np.zeros((len(new),), np.float32)
      sequence.append(np.asarray(new), none, none.astype(np.int32))
      if not tokens[3:]:
        is_end = new[-1] == TOKENIZER.eos_id
        reasons = types.FinishReason
        sequence.finish_reason = reasons.EOS if is_end else reasons.LENGTH
        del self._texts[sequence]
        ended.append(sequence)
    return ended


@contextlib.contextmanager
def scripted(script, template=TEMPLATE, **options):
  """A client of a server whose policy writes what the script says."""
  scheduler = Scripted(script)
  with (
    serving_world.Serving(
      scheduler=scheduler,
      tokenizer=TOKENIZER,
      chat_template=template,
      cache_tokens=4000,
      **options,
    ) as serving,
    serving.client() as client,
  ):
    yield client, scheduler, serving


def gather(events):
  """Content, calls and finish reason of a streamed chat."""
  content, calls, reason = "", [], None
  for event in events:
    (choice,) = event.choices
    content += choice.delta.content or ""
    for call in choice.delta.tool_calls or ():
      assert call.index == len(calls)
      calls.append(call)
    reason = choice.finish_reason
  return content, calls, reason


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_policy_calls_comes_apart_from_its_text(stream):
  written = "I look it up. \n" + CALL + "\n" + CALL.replace("Zürich", "Bern")
  with scripted(lambda prompt: written) as (client, scheduler, _):
    done = client.chat.completions.create(
      **WANTED, tool_choice="auto", stream=stream
    )
    if stream:
      content, calls, reason = gather(done)
    else:
      (choice,) = done.choices
      content, reason = choice.message.content, choice.finish_reason
      calls = choice.message.tool_calls
  assert content == "I look it up."
  assert reason == "tool_calls"
  assert [call.function.name for call in calls] == ["weather"] * 2
  arguments = [json.loads(call.function.arguments) for call in calls]
  assert arguments == [ARGUMENTS, {"city": "Bern"}]
  assert all(call.type == "function" for call in calls)
  assert len({call.id for call in calls}) == 2
  (prompt,) = scheduler.prompts
  assert '"name": "weather"' in prompt


@pytest.mark.parametrize(
  "written",
  [
    "It is warm < 21 °C, and <tool",  # which might have become a call
    " Nothing.  ",
    "<tool_call>\nweather of Zürich\n</tool_call>",
    CALL + '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
  ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_text(stream, written):
  with scripted(lambda prompt: written) as (client, _, _):
    done = client.chat.completions.create(**WANTED, stream=stream)
    if stream:
      content, calls, reason = gather(done)
    else:
      message, reason = done.choices[0].message, done.choices[0].finish_reason
      content, calls = message.content, message.tool_calls or []
  assert (content, calls, reason) == (written, [], "stop")


def test_calls_are_text_for_who_wants_none():
  with scripted(lambda prompt: CALL) as (client, scheduler, _):
    for options in (
      {"tools": chat_templates.TOOLS, "tool_choice": "none"},
      {"tools": []},
      {"tools": None},
    ):
      done = client.chat.completions.create(
        model="tiny", messages=USER, **options
      )
      assert done.choices[0].message.content == CALL
      assert done.choices[0].message.tool_calls is None
      assert done.choices[0].finish_reason == "stop"
  assert not any("weather" in prompt for prompt in scheduler.prompts)


def test_a_call_that_is_cut_off_is_text():
  with scripted(lambda prompt: CALL) as (client, _, _):
    done = client.chat.completions.create(**WANTED, max_tokens=30)
  assert done.choices[0].message.content == CALL.encode()[:30].decode()
  assert done.choices[0].finish_reason == "length"


def weather(city):
  return json.dumps({"celsius": {"Zürich": 21}[city]})


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_written_with_the_client_alone_gets_its_answer(stream):
  def script(prompt):
    if "<tool_response>" not in prompt:
      return CALL
    (result,) = prompt.split("<tool_response>\n")[1:]
    return f"It has {json.loads(result.split(chr(10))[0])['celsius']} °C."

  messages: list = list(USER)
  with scripted(script) as (client, scheduler, _):
    for _ in range(3):
      wanted = WANTED | {"messages": messages}
      if stream:
        content, calls, reason = gather(
          client.chat.completions.create(**wanted, stream=True)
        )
        function = [call.model_dump() for call in calls]
        message = {"role": "assistant", "content": content}
        message |= {"tool_calls": function} if function else {}
      else:
        (choice,) = client.chat.completions.create(**wanted).choices
        message, reason = choice.message, choice.finish_reason
        content, calls = message.content, message.tool_calls or []
      messages.append(message)
      if reason == "stop":
        break
      assert reason == "tool_calls"
      for call in calls:
        result = weather(**json.loads(call.function.arguments))
        messages.append(
          {"role": "tool", "tool_call_id": call.id, "content": result}
        )
  assert content == "It has 21 °C."
  assert len(messages) == 4
  first, second = scheduler.prompts
  # What was called is written into the next prompt as the policy wrote it.
  assert second.startswith(first)
  assert CALL in second[len(first) :]


def test_a_mark_that_is_a_special_token_is_seen():
  tokenizer, _ = chat_templates.load(chat_templates.ROLES)
  mark = tokenizer.showing(["<|tool|>"])
  tokens = tokenizer.encode("a<|tool|>b")
  assert tokenizer.decode(tokens) == "ab"
  assert mark.decode(tokens) == "a<|tool|>b"
  assert tokenizer.decode(tokens) == "ab"
  ends = tokenizer.showing([chat_templates.END])
  assert ends.decode(tokenizer.encode("a" + chat_templates.END)) == "a"


def call_text(form, pieces):
  text = tool_calls.CallText(form)
  shown = [text.add(piece) for piece in pieces]
  rest, calls = text.finish("")
  return "".join(shown), rest, [(call.name, call.arguments) for call in calls]


def test_every_format_holds_a_call_back_however_it_is_cut():
  called = [("weather", ARGUMENTS)]
  written = {
    "hermes": ["Look.\n" + CALL],
    "llama": [
      "Look. " + LLAMA,
      "Look.<|python_tag|>" + LLAMA,
    ],
  }
  assert written.keys() == formats.FORMATS.keys()
  for form, texts in written.items():
    for text in texts:
      for size in (1, 2, 5, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert call_text(form, pieces) == ("Look.", "", called)
  # Text before anything that may be a call is not kept.
  shown, rest, _ = call_text("hermes", ["One < two.", " <", "tool"])
  assert (shown, rest) == ("One < two.", " <tool")


NESTED = f'{{"x": {"[" * 900}{"]" * 900}}}'
BAD_TOOLS = [
  ({"tools": [{"type": "code"}]}, "tools.0.type"),
  ({"tools": [{"type": "function", "function": {}}]}, "name: is required"),
  ({"tools": chat_templates.TOOLS * 2}, "two of them have the same name"),
  ({"tools": [], "tool_choice": "required"}, "there are no tools"),
  (
    {"tool_choice": {"type": "function", "function": {"name": "other"}}},
    "'other' is none of tools",
  ),
  (
    {"tool_choice": "required", "min_tokens": 2},
    "tool_choice: not together with min_tokens",
  ),
  *(
    ({"messages": [*USER, message]}, words)
    for message, words in (
      ({"role": "assistant"}, "messages.1.content: is required"),
      ({"role": "tool", "tool_call_id": "a"}, "content: is required"),
      (
        {"role": "user", "content": "a", "tool_calls": [chat_templates.CALL]},
        "messages.1.tool_calls.0.function.arguments",
      ),
      (
        {
          "role": "assistant",
          "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}],
        },
        "arguments: must be an object in JSON",
      ),
      (
        {
          "role": "assistant",
          "tool_calls": [{"function": {"name": "f", "arguments": NESTED}}],
        },
        "nested too deeply",
      ),
      (
        {
          "role": "user",
          "content": "a",
          "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
        },
        "only an assistant calls tools",
      ),
      (
        {"role": "user", "content": "a", "tool_call_id": "b"},
        "only for messages of the role 'tool'",
      ),
    )
  ),
]


def test_bad_tools_are_refused_by_name():
  with scripted(lambda prompt: "") as (_, scheduler, serving):
    for fields, words in BAD_TOOLS:
      answer = serving.post("/v1/chat/completions", json=WANTED | fields)
      serving_world.check_error(answer, 400, words)
  assert not scheduler.prompts


@pytest.mark.parametrize(
  ("template", "words"),
  [
    (chat_templates.ROLES, "writes no known format of calls"),
    (
      chat_templates.ROLES + "{# <tool_call> #}",
      "does not write the name of a tool",
    ),
  ],
)
def test_tools_of_a_template_without_them_are_refused(template, words):
  _, made = chat_templates.load(template)
  with scripted(lambda prompt: "", made) as (client, _, _):
    with pytest.raises(openai.BadRequestError, match=words):
      client.chat.completions.create(**WANTED)


def test_the_format_can_be_named():
  with scripted(lambda prompt: LLAMA, tool_format="llama") as (client, _, _):
    done = client.chat.completions.create(**WANTED)
  (call,) = done.choices[0].message.tool_calls
  assert json.loads(call.function.arguments) == ARGUMENTS
  assert done.choices[0].message.content is None


def test_tools_count_as_tokens_of_the_prompt():
  with scripted(lambda prompt: "") as (client, scheduler, serving):
    body = {k: v for k, v in WANTED.items() if k != "model"}
    answer = serving.post("/tokenize", json=body)
    client.chat.completions.create(**WANTED)
  assert scheduler.prompts == [TOKENIZER.decode_all(answer.json()["tokens"])]


def accepts(guide, text, tokenizer=TOKENIZER):
  """Whether a guide allows all tokens of a text, and to end after it."""
  guide = guide.copy()
  row = np.zeros((-(-tokenizer.vocab_size // 32),), np.int32)
  for token in (*tokenizer.encode(text).tolist(), tokenizer.eos_id):
    guide.allow(row)
    if not row[token // 32] >> (token % 32) & 1:
      return False
    guide.take(np.array([token]))
  return True


OTHER = {"type": "function", "function": {"name": "time"}}
TIME = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
WRONG = CALL.replace('"Zürich"', "3")
NAMED = {"type": "function", "function": {"name": "time"}}
STRICT = [
  {"type": "function", "function": tool["function"] | {"strict": True}}
  for tool in (*chat_templates.TOOLS, OTHER)
]
JSON = {"type": "json_object"}


@pytest.mark.parametrize(
  ("options", "allowed", "forbidden"),
  [
    (
      {"tool_choice": "required"},
      [CALL, TIME, CALL + "\n" + TIME],
      ["It is warm.", "I look. " + CALL, WRONG, "{}"],
    ),
    ({"tool_choice": NAMED}, [TIME], [CALL, "It is warm."]),
    (
      {"tool_choice": "required", "parallel_tool_calls": False},
      [CALL, TIME],
      [CALL + "\n" + TIME],
    ),
    (
      {"tools": STRICT},
      ["It is warm.", "I look. " + CALL, CALL + "\n" + TIME, "<tool"],
      [WRONG, "I look. " + WRONG, CALL + WRONG],
    ),
    (
      {"parallel_tool_calls": False},
      ["It is warm.", "I look. " + CALL],
      [CALL + "\n" + TIME, CALL + " It is warm."],
    ),
    (
      {"response_format": JSON},
      ['{"celsius": 21}', CALL],
      ["It is warm.", "[]", WRONG],
    ),
  ],
)
def test_what_has_to_be_called_is_guided(options, allowed, forbidden):
  wanted = WANTED | {"tools": [*chat_templates.TOOLS, OTHER]} | options
  with scripted(lambda prompt: CALL) as (client, scheduler, _):
    done = client.chat.completions.create(**wanted)
  (guide,) = scheduler.guides
  for text in allowed:
    assert accepts(guide, text), text
  for text in forbidden:
    assert not accepts(guide, text), text
  assert done.choices[0].message.tool_calls[0].function.name == "weather"
  (prompt,) = scheduler.prompts
  assert "strict" not in prompt
  assert ('"weather"' in prompt) == (options.get("tool_choice") != NAMED)


def test_free_text_and_strict_calls_need_a_mark_between_them():
  fields = {"tools": STRICT}
  with scripted(lambda _: "", tool_format="llama") as (_, scheduler, serving):
    answer = serving.post("/v1/chat/completions", json=WANTED | fields)
    serving_world.check_error(answer, 400, "strict: not supported where text")
    fields["tool_choice"] = "required"
    answer = serving.post("/v1/chat/completions", json=WANTED | fields)
    assert answer.status_code == 200
  (guide,) = scheduler.guides
  assert accepts(guide, LLAMA) and not accepts(guide, CALL)


def test_marks_that_are_special_tokens_are_guided_and_read_too(tmp_path):
  marks = formats.FORMATS["hermes"].marks
  chat_templates.save(
    tmp_path, chat_templates.QWEN, additional_special_tokens=list(marks)
  )
  tokenizer = tokenizer_lib.load(tmp_path)
  assert tokenizer.decode(tokenizer.encode(CALL)).startswith("\n{")
  functions = [chat_templates.TOOLS[0]["function"]]
  for may_speak in (False, True):
    grammar = guided.grammar(
      None, functions, "hermes", tokenizer, may_speak=may_speak
    )
    guide = guides_lib.Guides(tokenizer).guide(grammar)
    assert accepts(guide, CALL, tokenizer)
    assert not accepts(guide, WRONG, tokenizer)
    assert accepts(guide, "I look. " + CALL, tokenizer) == may_speak
  shown = tokenizer.showing(marks)
  assert shown.decode(shown.encode(CALL)) == CALL


def test_the_clients_own_helper_gathers_a_stream():
  with scripted(lambda prompt: "I look. " + CALL) as (client, _, _):
    wanted = WANTED | {"tools": STRICT[:1]}
    with client.chat.completions.stream(**wanted) as stream:
      (choice,) = stream.get_final_completion().choices
  assert choice.finish_reason == "tool_calls"
  assert choice.message.content == "I look."
  (call,) = choice.message.tool_calls
  assert call.function.parsed_arguments == ARGUMENTS
