"""What the HTTP interface refuses, and with which words."""

import asyncio
import collections
import json
import random

import httpx
import openai
import pytest
import serving_world

SEEDS = (1, 4, 5)


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
  with pytest.raises(openai.BadRequestError, match="tools: not supported"):
    client.chat.completions.create(
      model="tiny",
      messages=[{"role": "user", "content": "a"}],
      tools=[{"type": "function", "function": {"name": "f"}}],
    )
  with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="wrong") as other:
    with pytest.raises(openai.AuthenticationError, match="API key"):
      complete(other)


BAD_COMPLETIONS = [
  ({}, "model: is required"),
  ([], "body: "),
  ({"model": "tiny"}, "prompt: is required"),
  (serving_world.body(prompt=None), "prompt: is required"),
  (serving_world.body(prompt=7), "prompt: must be"),
  (serving_world.body(prompt=[]), "prompt: must be"),
  (serving_world.body(prompt=[[]]), "prompt: has no tokens"),
  (serving_world.body(prompt=[[1], []]), "prompt: has no tokens"),
  (serving_world.body(prompt=""), "prompt: has no tokens"),
  (serving_world.body(prompt=[1, "a"]), "prompt: must be"),
  (serving_world.body(prompt=[True]), "prompt: must be"),
  (serving_world.body(prompt=[1.5]), "prompt: must be"),
  (serving_world.body(prompt=[97]), r"token ids must be in \[0, 97\)"),
  (serving_world.body(prompt=[-1]), "token ids"),
  (serving_world.body(prompt=[2**70]), "token ids"),
  (serving_world.body(prompt=[[1], [99]]), "token ids"),
  (serving_world.body(prompt=["a"] * 17), "prompt: 17 prompts; at most 8"),
  (serving_world.body(prompt=["a"] * 3, n=3), "n: 9 choices"),
  (
    serving_world.body(prompt="\u00e9"),
    "U\\+00E9.* not in the tokenizer's alphabet",
  ),
  (serving_world.body(prompt="1" * 40), "do not fit into 32"),
  (serving_world.body(max_tokens=30), "do not fit into 32"),
  (serving_world.body(max_tokens=0), "max_tokens"),
  (serving_world.body(max_tokens=2**80), "max_tokens"),
  (serving_world.body(max_tokens="9"), "max_tokens"),
  (
    serving_world.body(max_tokens=4, min_tokens=5),
    "min_tokens: 5 is out of range",
  ),
  (serving_world.body(model=3), "model"),
  (serving_world.body(n=0), "n: "),
  (serving_world.body(n=9), "n: 9"),
  (serving_world.body(n=10**4299, prompt=["a"] * 16), "n: "),
  (serving_world.body(max_tokens=10**4299), "max_tokens: "),
  (serving_world.body(min_tokens=10**4299), "min_tokens: "),
  (serving_world.body(n=True), "n: "),
  (serving_world.body(n=2.0), "n: "),
  (serving_world.body(temperature=-0.1), "temperature"),
  (serving_world.body(temperature=1e-35), "temperature is 1e-35"),
  (serving_world.body(temperature="1"), "temperature"),
  (serving_world.body(top_p=0), "top_p"),
  (serving_world.body(top_p=1.1), "top_p"),
  (serving_world.body(top_k=-2), "top_k"),
  (serving_world.body(top_k=2**40), "top_k"),
  (serving_world.body(min_p=2), "min_p"),
  (serving_world.body(seed=2**63), "seed"),
  (serving_world.body(seed="x"), "seed"),
  (serving_world.body(stop=""), "stop"),
  (serving_world.body(stop=["a"] * 17), "stop: at most 16"),
  (serving_world.body(stop=["a", 1]), "stop"),
  (serving_world.body(stop=["x" * 257]), "stop"),
  (serving_world.body(stop="\ufffd"), "stop"),
  (serving_world.body(stop_token_ids=[97]), "end token"),
  (serving_world.body(stop_token_ids=list(range(9))), "end token"),
  (serving_world.body(logprobs=1), "logprobs: not supported"),
  (serving_world.body(logprobs=True), "logprobs"),
  (serving_world.body(echo=True), "echo: not supported"),
  (serving_world.body(suffix="x"), "suffix: not supported"),
  (serving_world.body(best_of=2), "best_of: not supported"),
  (serving_world.body(logit_bias={"5": 1}), "logit_bias: not supported"),
  (serving_world.body(presence_penalty=0.5), "presence_penalty: not supported"),
  (
    serving_world.body(presence_penalty=False),
    "presence_penalty: not supported",
  ),
  (serving_world.body(stream="yes"), "stream"),
  (
    serving_world.body(stream_options={"include_usage": True}),
    "only allowed if stream",
  ),
  (
    serving_world.body(stream=True, stream_options={"more": 1}),
    "stream_options.more",
  ),
  (serving_world.body(deadline_s=61), "deadline_s: at most 60"),
  (serving_world.body(deadline_s=0), "deadline_s"),
  (serving_world.body(bogus=None), "bogus: unknown field"),
  (
    serving_world.body(messages=[]),
    "messages: unknown field",
  ),
]
BAD_CHATS = [
  (serving_world.chat(messages=[]), "messages: "),
  (serving_world.chat(messages="hello"), "messages: "),
  (
    serving_world.chat(messages=[{"role": "user"}]),
    "messages.0.content: is required",
  ),
  (
    serving_world.chat(messages=[{"role": "robot", "content": "a"}]),
    "messages.0.role",
  ),
  (
    serving_world.chat(messages=[{"role": "user", "content": 4}]),
    "messages.0.content",
  ),
  (
    serving_world.chat(
      messages=[{"role": "user", "content": [{"type": "image_url"}]}]
    ),
    "messages.0.content: parts must be",
  ),
  (
    serving_world.chat(
      messages=[{"role": "user", "content": "a", "tool_calls": [{}]}]
    ),
    "tool_calls: not supported",
  ),
  (
    serving_world.chat(
      messages=[{"role": r, "content": "a"} for r in ("system", "user")]
    ),
    "no chat template",
  ),
  (
    serving_world.chat(response_format={"type": "json_object"}),
    "response_format",
  ),
  (serving_world.chat(tool_choice="required"), "tool_choice: not supported"),
  (
    serving_world.chat(top_logprobs=2, logprobs=True),
    "top_logprobs: not supported",
  ),
  (serving_world.chat(logprobs=0), "logprobs"),
  (
    serving_world.chat(reasoning_effort="high"),
    "reasoning_effort: not supported",
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
    best_of=1,
    echo=False,
    suffix=None,
    user="me",
    logprobs=None,
    stop=None,
    stream_options=None,
    seed=1,
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


def bad_request(rng):
  """A request that cannot be right: method, path, headers and content."""
  good = json.dumps(serving_world.body(seed=1)).encode()
  headers = {
    "authorization": f"Bearer {serving_world.KEY}",
    "content-type": "application/json",
  }
  path = rng.choice(["/v1/completions", "/v1/chat/completions"])
  kind = rng.randrange(6)
  if kind == 0:  # cut
    return "POST", path, headers, good[: rng.randrange(len(good))]
  if kind == 1:  # noise
    return "POST", path, headers, rng.randbytes(rng.randrange(1, 300))
  if kind == 2:  # known to be bad
    cases = BAD_CHATS if "chat" in path else BAD_COMPLETIONS
    return "POST", path, headers, json.dumps(rng.choice(cases)[0]).encode()
  if kind == 3:  # any type anywhere
    values = [None, [], {}, -1, 2**99, 1e308, "\u0000", [[["a"]]], {"a": []}]
    names = ["prompt", "model", "n", "stop", "seed", "stream", "max_tokens"]
    wrong = serving_world.body(surplus=1) | {
      rng.choice(names): rng.choice(values)
    }
    return "POST", path, headers, json.dumps(wrong).encode()
  if kind == 4:
    headers["authorization"] = rng.choice(["", "Bearer", "\x7f", "Bearer é"])
    return "POST", path, headers, good
  method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
  return method, path + rng.choice(["", "/", "x"]), headers, good


def test_after_a_thousand_bad_requests_a_good_one_is_answered(serving):
  rng = random.Random(0)
  assert serving_world.wait_until(serving.is_idle)
  before = serving.queue.stats.requests

  async def ask_all():
    transport = httpx.ASGITransport(serving.app)
    async with httpx.AsyncClient(
      transport=transport, base_url="http://here"
    ) as client:
      statuses = collections.Counter()
      for _ in range(1000):
        method, path, headers, content = bad_request(rng)
        headers = {k: v.encode() for k, v in headers.items()}
        answer = await client.request(
          method, path, headers=headers, content=content
        )
        assert answer.json()["error"]["message"]
        statuses[answer.status_code] += 1
      return statuses

  statuses = asyncio.run(ask_all())
  assert statuses.keys() == {400, 401, 404, 405}
  assert serving.queue.stats.requests == before
  answer = serving.post(json=serving_world.body(seed=1))
  text = answer.json()["choices"][0]["text"]
  assert text == serving_world.TOKENIZER.decode(serving_world.alone(seed=1)[0])
