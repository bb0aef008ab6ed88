"""What the HTTP interface refuses, and with which words."""

import chat_templates
import httpx
import openai
import pytest
import serving_world

from jaxrl_async.text import chat_template as chat_template_lib


@pytest.fixture(scope="module")
def serving():
  with serving_world.Serving() as this:
    yield this


@pytest.fixture(scope="module")
def client(serving):
  with serving.client() as this:
    yield this


def test_the_clients_own_errors_are_raised(serving, client):
  def complete(client=client, **options):
    return client.completions.create(
      **{"model": "tiny", "prompt": serving_world.PROMPT} | options
    )

  with pytest.raises(openai.BadRequestError, match="temperature") as raised:
    complete(temperature=3)
  assert raised.value.param == "temperature"
  assert raised.value.type == "invalid_request_error"
  with pytest.raises(openai.NotFoundError, match="'other' does not exist") as e:
    complete(model="other")
  assert e.value.code == "model_not_found"
  with pytest.raises(openai.BadRequestError, match="do not fit") as raised:
    complete(prompt="1" * 40)
  assert raised.value.code == "context_length_exceeded"
  with pytest.raises(openai.BadRequestError, match="tools: the chat template"):
    client.chat.completions.create(
      model="tiny",
      messages=[{"role": "user", "content": "a"}],
      tools=[{"type": "function", "function": {"name": "f"}}],
    )
  with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="wrong") as other:
    with pytest.raises(openai.AuthenticationError, match="API key"):
      complete(other)


@pytest.mark.parametrize(
  ("template", "role", "content", "words"),
  [
    (chat_templates.ROLES, "developer", "Be brief.", ""),
    (
      chat_templates.QWEN,
      "developer",
      "Be brief.",
      "messages: the chat template does not write the content of message 1,"
      " which is of the role 'developer'",
    ),
    (chat_templates.QWEN, "system", "Be brief.", ""),
    (chat_templates.QWEN, "system", "⟨eos⟩", "the special token '⟨eos⟩'"),
  ],
)
def test_a_message_that_does_not_reach_the_policy_is_refused(
  serving, client, monkeypatch, template, role, content, words
):
  made = chat_template_lib.ChatTemplate(template)
  monkeypatch.setattr(serving.service, "chat_template", made)
  messages = [
    {"role": role, "content": content},
    {"role": "user", "content": "a"},
  ]
  with pytest.raises(openai.BadRequestError) as refused:
    client.chat.completions.create(model="tiny", messages=messages)
  # The tiny cache has no room for what is written.
  assert (words or "tokens and up to") in str(refused.value)
  assert refused.value.param == ("messages" if words else "prompt")


BAD_COMPLETIONS = [
  ({}, "model: is required"),
  ([], "body: "),
  ({"model": "tiny"}, "prompt: is required"),
  (serving_world.body(model=3), "model"),
  (serving_world.body(prompt=None), "prompt: is required"),
  *(
    (serving_world.body(prompt=prompt), words)
    for prompt, words in (
      (7, "prompt: must be"),
      ([], "prompt: must be"),
      ([1, "a"], "prompt: must be"),
      ([True], "prompt: must be"),
      ("", "prompt: has no tokens"),
      ([[1], []], "prompt: has no tokens"),
      ([97], r"token ids must be in \[0, 97\)"),
      ([-1], "token ids"),
      ([[1], [2**70]], "token ids"),
      (["a"] * 17, "prompt: 17 prompts; at most 8"),
      ("\u00e9", "U\\+00E9.* not in the tokenizer's alphabet"),
      ("1" * 40, "do not fit into 32"),
    )
  ),
  *(
    (serving_world.body(**{name: value}), name)
    for name, value in (
      ("max_tokens", 0),
      ("max_tokens", 10**4299),
      ("max_tokens", "9"),
      ("n", 0),
      ("n", 9),
      ("n", True),
      ("n", 2.0),
      ("temperature", -0.1),
      ("temperature", 1e-35),
      ("temperature", "1"),
      ("top_p", 0),
      ("top_p", 1.1),
      ("top_k", -2),
      ("top_k", 2**40),
      ("min_p", 2),
      ("seed", 2**63),
      ("stop", ""),
      ("stop", ["a"] * 17),
      ("stop", ["x" * 257]),
      ("stop", "\ufffd"),
      ("logprobs", True),
      ("stream", "yes"),
      ("deadline_s", 0),
      ("deadline_s", 61),
    )
  ),
  *(
    (serving_world.body(**{name: value}), f"{name}: not supported")
    for name, value in (
      ("logprobs", 1),
      ("echo", True),
      ("suffix", "x"),
      ("best_of", 2),
      ("logit_bias", {"5": 1}),
      ("presence_penalty", False),
      ("repetition_penalty", 1.1),
      ("length_penalty", 0.5),
      ("use_beam_search", True),
      ("skip_special_tokens", False),
      ("add_special_tokens", False),
      ("store", True),
      ("truncate_prompt_tokens", 5),
    )
  ),
  (serving_world.body(max_tokens=30), "do not fit into 32"),
  (serving_world.body(max_tokens=4, min_tokens=5), "min_tokens: 5 is out of"),
  (serving_world.body(prompt=["a"] * 3, n=3), "n: 9 choices"),
  (serving_world.body(stop_token_ids=[97]), "end token"),
  (serving_world.body(stop_token_ids=list(range(9))), "end token"),
  (
    serving_world.body(stream_options={"include_usage": True}),
    "only allowed if stream",
  ),
  (
    serving_world.body(stream=True, stream_options={"more": 1}),
    "stream_options.more",
  ),
  (serving_world.body(bogus=None), "bogus: unknown field"),
]
BAD_TOKENIZE = [
  ({}, "needs either a prompt or messages"),
  (
    {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
    "needs either a prompt or messages",
  ),
  ({"prompt": "1" * 3000}, "prompt: 3000 characters"),
  ({"prompt": "\u00e9"}, "not in the tokenizer's alphabet"),
  ({"prompt": "a", "chat_template": "x"}, "chat_template: not supported"),
  ({"messages": []}, "needs either"),
]
BAD_DETOKENIZE = [
  ({}, "tokens: is required"),
  ({"tokens": [97]}, r"token ids must be in \[0, 97\)"),
  ({"tokens": [-1]}, "token ids"),
  ({"tokens": "a"}, "tokens: "),
]
BAD_CHATS = [
  *(
    (serving_world.chat(messages=messages), words)
    for messages, words in (
      ([], "messages: "),
      ("hello", "messages: "),
      ([{"role": "user"}], "messages.0.content: is required"),
      ([{"role": "robot", "content": "a"}], "messages.0.role"),
      ([{"role": "user", "content": 4}], "messages.0.content"),
      (
        [{"role": "user", "content": [{"type": "image_url"}]}],
        "messages.0.content: parts must be",
      ),
      (
        [{"role": "user", "content": "a", "tool_calls": [{}]}],
        "tool_calls.0.function: is required",
      ),
      (
        [{"role": r, "content": "a"} for r in ("system", "user")],
        "no chat template",
      ),
    )
  ),
  *(
    (serving_world.chat(**{name: value}), f"{name}: not supported")
    for name, value in (
      ("functions", [{"name": "f"}]),
      ("top_logprobs", 2),
      ("reasoning_effort", "high"),
    )
  ),
  (
    serving_world.chat(max_tokens=3, max_completion_tokens=4),
    "max_completion_tokens",
  ),
  (serving_world.chat(prompt="a"), "prompt: unknown field"),
]


def test_bad_bodies_are_refused_and_none_reaches_the_engine(serving):
  assert serving_world.wait_until(serving.is_idle)
  before = serving.queue.stats.requests
  cases = [("/v1/completions", *case) for case in BAD_COMPLETIONS]
  cases += [("/v1/chat/completions", *case) for case in BAD_CHATS]
  cases += [("/tokenize", *case) for case in BAD_TOKENIZE]
  cases += [("/detokenize", *case) for case in BAD_DETOKENIZE]
  for path, content, words in cases:
    error = serving_world.check_error(
      serving.post(path, json=content), 400, words
    )
    assert error["type"] == "invalid_request_error"
  assert serving.queue.stats.requests == before


def test_fields_that_change_nothing_are_taken(serving):
  neutral = serving_world.body(
    presence_penalty=0,
    frequency_penalty=0.0,
    logit_bias={},
    echo=False,
    suffix=None,
    user="me",
    logprobs=None,
    stop=None,
    stream_options=None,
    seed=1,
    n=None,
    repetition_penalty=1.0,
    length_penalty=1.0,
    use_beam_search=False,
    skip_special_tokens=True,
    spaces_between_special_tokens=True,
    add_special_tokens=True,
    include_stop_str_in_output=False,
    truncate_prompt_tokens=None,
    top_k=-1,
    min_p=0.0,
    best_of=None,
    metadata={"run": "4"},
    store=False,
    service_tier="auto",
  )
  answer = serving.post(json=neutral)
  assert answer.status_code == 200, answer.text
  text = answer.json()["choices"][0]["text"]
  assert text == serving_world.TOKENIZER.decode(serving_world.alone(seed=1)[0])
  answer = serving.post(
    "/v1/chat/completions",
    json=serving_world.chat(
      tools=[],
      tool_choice="none",
      response_format={"type": "text"},
      modalities=["text"],
      parallel_tool_calls=True,
      add_generation_prompt=True,
      continue_final_message=False,
      add_special_tokens=False,
      chat_template_kwargs={},
      reasoning_effort=None,
      session_id="me",
      messages=[
        {
          "role": "user",
          "content": [{"type": "text", "text": "a"}],
          "refusal": None,
        }
      ],
    ),
  )
  assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"{",
    b'{"model": "tiny", "prompt": "\xff"}',
    b'{"model": "tiny", "prompt": "a", "prompt": "b"} trailing',
    b'{"model": "tiny", "prompt": "\\ud800"}',
    b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "a", "top_p": Infinity}',
    b"[" * 10_000,
    b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 6000 + b"}",
    b"\x00" * 50,
    "{}".encode("utf-16"),
  ],
)
def test_what_is_no_json_is_a_400(serving, content):
  answer = serving.post(
    content=content, headers={"content-type": "application/json"}
  )
  serving_world.check_error(answer, 400, "JSON|seed")


@pytest.mark.parametrize(
  ("content", "name"),
  [
    (b'{"model": "tiny", "prompt": "a", "prompt": "a"}', "prompt"),
    (b'{"model": "tiny", "prompt": "a", "\\u006e": 2, "n": 1}', "n"),
    (
      b'{"model": "tiny", "prompt": "a", "stream": true, "stream_options":'
      b' {"include_usage": false, "include_usage": true}}',
      "include_usage",
    ),
  ],
)
def test_a_field_that_is_there_twice_is_refused(serving, content, name):
  json_type = {"content-type": "application/json"}
  error = serving_world.check_error(
    serving.post(content=content, headers=json_type), 400, "more than once"
  )
  assert error["param"] == name


def test_paths_methods_and_types(serving):
  json_type = {"content-type": "application/json; charset=utf-8"}
  serving_world.check_error(
    serving.post("/v1/nothing", json={}), 404, "/v1/nothing"
  )
  auth = {"authorization": f"Bearer {serving_world.KEY}"}
  answer = httpx.get(f"{serving.url}/v1/completions", headers=auth)
  serving_world.check_error(answer, 405, "does not support GET")
  assert "POST" in answer.headers["allow"]
  serving_world.check_error(
    serving.post(content=b"{}"), 415, "application/json"
  )
  serving_world.check_error(
    serving.post(data={"prompt": "a"}), 415, "application/json"
  )
  serving_world.check_error(
    serving.post(content=b"{}", headers=json_type), 400, "model"
  )


@pytest.mark.parametrize(
  "header",
  [
    "",
    "Bearer",
    "Bearer wrong",
    f"Basic {serving_world.KEY}",
    serving_world.KEY,
    f"Bearer {serving_world.KEY}x",
  ],
)
@pytest.mark.parametrize(
  ("method", "path"),
  [
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
  ],
)
def test_everything_but_health_wants_the_key(serving, method, path, header):
  answer = httpx.request(
    method, serving.url + path, headers={"authorization": header}
  )
  serving_world.check_error(answer, 401, "API key")
  assert answer.headers["www-authenticate"] == "Bearer"


def test_health_models_and_metrics(serving, client):
  answer = httpx.get(f"{serving.url}/health")
  assert answer.status_code == 200
  assert answer.json() == {"status": "ok", "policy_version": 0}
  assert [model.id for model in client.models.list()] == ["tiny"]
  assert client.models.retrieve("tiny").owned_by == "jaxrl_async"
  with pytest.raises(openai.NotFoundError):
    client.models.retrieve("other/model")
  client.completions.create(model="tiny", prompt=serving_world.PROMPT, seed=1)
  auth = {"authorization": f"Bearer {serving_world.KEY}"}
  page = httpx.get(f"{serving.url}/metrics", headers=auth)
  assert page.headers["content-type"].startswith("text/plain")
  values = dict(
    line.rsplit(" ", 1)
    for line in page.text.splitlines()
    if not line.startswith("#")
  )
  stats = serving.queue.stats
  assert int(float(values['jaxrl_tokens_total{direction="out"}'])) == (
    stats.completion_tokens
  )
  assert float(values['jaxrl_requests_total{end="finished"}']) >= 1
  assert float(values["jaxrl_first_token_seconds_count"]) >= 1
  assert float(values["jaxrl_policy_version"]) == 0
  assert float(values["jaxrl_slots"]) == 4
  ok = 'jaxrl_http_requests_total{code="200",path="/v1/completions"}'
  assert float(values[ok]) >= 1
