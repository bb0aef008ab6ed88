"""Clients that send too much, too slowly or go away; a full or late server."""

import contextlib
import dataclasses
import json
import socket
import threading
import time

import httpx
import openai
import pytest
import serving_world
import tiny

from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.serving import bodies
from jaxrl_async.serving import generation
from jaxrl_async.serving import protocol
from jaxrl_async.serving import server as server_lib


@pytest.fixture(scope="module")
def serving():
  with serving_world.Serving() as this:
    yield this


@pytest.fixture(scope="module")
def client(serving):
  with serving.client() as this:
    yield this


def test_a_body_too_large_is_a_413_with_and_without_a_length(serving):
  large = json.dumps(serving_world.body(user="x" * 30_000)).encode()
  json_type = {"content-type": "application/json"}
  answer = serving.post(content=large, headers=json_type)
  serving_world.check_error(answer, 413, "more than 20000 bytes")

  def chunks():
    for start in range(0, len(large), 1000):
      yield large[start : start + 1000]

  answer = serving.post(content=chunks(), headers=json_type)
  serving_world.check_error(answer, 413, "more than 20000 bytes")


def test_a_prompt_that_cannot_fit_is_not_cut_into_tokens(serving, monkeypatch):
  def encode(text):
    raise AssertionError(len(text))

  monkeypatch.setattr(serving_world.TOKENIZER, "encode", encode)
  answers = [
    serving.post(json=serving_world.body(prompt=text * 3000))
    for text in ("1", "\u00e9")
  ]
  answers.append(serving.post(json=serving_world.body(prompt=[5] * 5000)))
  messages = [{"role": "user", "content": "a" * 15_000}]
  chat = "/v1/chat/completions"
  answers.append(serving.post(chat, json=serving_world.chat(messages=messages)))
  messages = [{}] * 4000
  answers.append(serving.post(chat, json=serving_world.chat(messages=messages)))
  for answer in answers:
    error = serving_world.check_error(answer, 400, "do not fit into 32")
    assert error["code"] == "context_length_exceeded"


def test_a_body_is_no_larger_than_what_the_engine_could_hold():
  bounds = bodies.Bounds(
    tokens=100, prompts=4, characters=200, max_body_bytes=1 << 20
  )
  one, four = bounds.body_bytes(1), bounds.body_bytes(4)
  assert 200 * len(json.dumps("\U0001f600")[1:-1]) < one < four < 1 << 20
  large = dataclasses.replace(bounds, tokens=1 << 20)
  assert large.body_bytes(1) == 1 << 20


def test_a_body_that_takes_long_to_read_keeps_nobody_waiting(
  serving, monkeypatch
):
  entered, may_go_on = threading.Event(), threading.Event()
  parse = protocol.parse

  def slow_parse(kind, data, bounds):
    if len(data) > 10_000:
      entered.set()
      assert may_go_on.wait(serving_world.DEADLINE_S)
    return parse(kind, data, bounds)

  monkeypatch.setattr(protocol, "parse", slow_parse)
  long = serving_world.body(user="x" * 15_000, seed=1)
  answers = []
  threads = [
    threading.Thread(target=lambda: answers.append(serving.post(json=long)))
    for _ in range(2)
  ]
  try:
    for thread in threads:
      thread.start()
    assert entered.wait(serving_world.DEADLINE_S)
    assert httpx.get(f"{serving.url}/health").status_code == 200
    assert serving.post(json=serving_world.body(seed=1)).status_code == 200
    assert not answers
  finally:
    may_go_on.set()
    for thread in threads:
      thread.join(serving_world.DEADLINE_S)
  assert [answer.status_code for answer in answers] == [200, 200]


def test_small_answers_are_sent_at_once(serving, monkeypatch):
  settings = []
  made = server_lib._Protocol.connection_made

  def connection_made(protocol, transport):
    made(protocol, transport)
    accepted = transport.get_extra_info("socket")
    settings.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

  monkeypatch.setattr(server_lib._Protocol, "connection_made", connection_made)
  assert httpx.get(f"{serving.url}/health").status_code == 200
  assert settings == [1]


def test_a_port_is_taken_as_soon_as_a_server_has_it(serving):
  taken = server_lib.HttpServer(
    serving.app, host="127.0.0.1", port=0, max_connections=1
  )
  with contextlib.closing(taken._socket), pytest.raises(OSError):
    server_lib.HttpServer(
      serving.app, host="127.0.0.1", port=taken.port, max_connections=1
    )


@contextlib.contextmanager
def connection(serving, content, *, length=None, path="completions"):
  """A raw connection over which a request's beginning was sent."""
  with socket.create_connection(
    ("127.0.0.1", serving.http.port), serving_world.DEADLINE_S
  ) as raw:
    head = (
      f"POST /v1/{path} HTTP/1.1\r\nhost: here\r\n"
      f"authorization: Bearer {serving_world.KEY}\r\n"
      "content-type: application/json\r\n"
      f"content-length: {length or len(content)}\r\n\r\n"
    )
    raw.sendall(head.encode() + content)
    yield raw


def read_all(raw):
  received = b""
  while chunk := raw.recv(65536):
    received += chunk
  return received


def test_a_body_too_slow_is_a_408():
  limits = dataclasses.replace(serving_world.LIMITS, body_timeout_s=0.5)
  with (
    serving_world.Serving(limits=limits) as serving,
    connection(serving, b'{"model"', length=100) as raw,
  ):
    received = read_all(raw)
  assert received.startswith(b"HTTP/1.1 408 ")
  assert b'"timeout_error"' in received


def test_headers_that_never_end_lose_their_connection(monkeypatch):
  monkeypatch.setattr(server_lib, "_HEADER_TIMEOUT_S", 0.2)
  with (
    serving_world.Serving() as slow,
    socket.create_connection(
      ("127.0.0.1", slow.http.port), serving_world.DEADLINE_S
    ) as raw,
  ):
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: he")
    assert read_all(raw) == b""


class Held(tiny.SteppedScheduler):
  """Steps only when told to."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.permits = threading.Semaphore(0)

  def step(self):
    self.permits.acquire(timeout=serving_world.DEADLINE_S)
    return super().step()


@pytest.fixture
def held():
  """A server whose engine is held between steps."""
  with serving_world.Serving(max_waiting=3, cls=Held) as this:
    yield this
    this.scheduler.permits.release(1000)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slots(held, stream):
  wanted = serving_world.body(
    seed=serving_world.long_seed(), n=2, stream=stream, max_tokens=16
  )
  with connection(held, json.dumps(wanted).encode()) as raw:
    assert serving_world.wait_until(lambda: held.scheduler.num_free == 2)
    if stream:
      held.scheduler.permits.release(2)
      assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")
  queue = held.queue  # the engine is held: it comes no further meanwhile
  assert serving_world.wait_until(
    lambda: queue._cancelled or queue.stats.cancelled
  )
  held.scheduler.permits.release(1000)
  assert serving_world.wait_until(held.is_idle)
  assert held.queue.stats.cancelled == 1
  assert held.queue.stats.finished == 0


def test_a_full_queue_is_a_429_that_says_when_to_come_again(held):
  waiting = [
    json.dumps(serving_world.body(seed=seed)).encode() for seed in range(3)
  ]
  with contextlib.ExitStack() as stack:
    for content in waiting:
      stack.enter_context(connection(held, content))
    assert serving_world.wait_until(lambda: held.queue.depth == 3)
    answer = held.post(json=serving_world.body())
    error = serving_world.check_error(answer, 429, "too many requests")
    assert error["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1
    with held.client() as client, pytest.raises(openai.RateLimitError):
      client.completions.create(model="tiny", prompt=["a", "b"])
    assert held.queue.depth == 3
    held.scheduler.permits.release(1000)
    assert serving_world.wait_until(held.is_idle)
  with held.client() as client:
    client.completions.create(model="tiny", prompt="a")


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_a_504(held, stream):
  first = json.dumps(serving_world.body(seed=8, max_tokens=16)).encode()

  def release_when_late():
    assert serving_world.wait_until(lambda: held.queue.depth == 2)
    time.sleep(0.4)
    held.scheduler.permits.release(1000)

  # The first request is in the engine, and the engine in its step, before the
  # second one comes; the step ends after the second one's deadline.
  with connection(held, first):
    assert serving_world.wait_until(lambda: held.scheduler.num_free == 3)
    timer = threading.Thread(target=release_when_late)
    timer.start()
    answer = held.post(json=serving_world.body(deadline_s=0.2, stream=stream))
    timer.join()
  serving_world.check_error(answer, 504, "deadline")
  assert answer.headers["x-should-retry"] == "false"


def test_a_whole_answer_has_what_was_written_by_its_deadline(held):
  seed = serving_world.long_seed()
  expected, _, _ = serving_world.alone(seed=seed)
  answers = []
  wanted = serving_world.body(
    seed=seed, n=3, max_tokens=16, deadline_s=60.0, return_token_ids=True
  )
  thread = threading.Thread(
    target=lambda: answers.append(held.post(json=wanted))
  )
  thread.start()
  held.scheduler.permits.release(2)
  assert serving_world.wait_until(lambda: held.queue.stats.completion_tokens)
  (handle,) = held.queue._handles
  handle.request = dataclasses.replace(handle.request, deadline_s=0.0)
  held.scheduler.permits.release(1000)
  thread.join(serving_world.DEADLINE_S)
  (answer,) = answers
  assert answer.status_code == 200, answer.text
  first = answer.json()["choices"][0]
  assert first["finish_reason"] == "length"
  assert first["stop_reason"] == "deadline"
  assert 0 < len(first["token_ids"]) < len(expected)
  assert first["token_ids"] == expected[: len(first["token_ids"])]
  assert first["text"] == serving_world.TOKENIZER.decode(first["token_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_while_the_engine_rests_is_a_504(held, stream, monkeypatch):
  monkeypatch.setattr(generation, "_GRACE_S", 0.1)
  with connection(held, json.dumps(serving_world.body(seed=8)).encode()):
    assert serving_world.wait_until(lambda: held.scheduler.num_free == 3)
    # Now the engine is in a step that does not end.
    answer = held.post(json=serving_world.body(deadline_s=0.2, stream=stream))
  serving_world.check_error(answer, 504, "deadline")


def test_too_many_prompts_are_refused_before_any_is_read(serving, monkeypatch):
  def encode(text):
    raise AssertionError(text)

  monkeypatch.setattr(serving_world.TOKENIZER, "encode", encode)
  answer = serving.post(json=serving_world.body(prompt=["a"] * 100))
  serving_world.check_error(answer, 400, "prompt: 100 prompts; at most 8")


@pytest.mark.slow
def test_a_deadline_in_the_middle_ends_a_stream_with_an_error(held):
  seed = serving_world.long_seed()
  with held.client() as client:
    held.scheduler.permits.release(1)
    stream = client.completions.create(
      model="tiny",
      prompt=serving_world.PROMPT,
      seed=seed,
      stream=True,
      extra_body={"deadline_s": 60.0},
    )
    assert next(stream).choices[0].text
    (handle,) = held.queue._handles
    handle.request = dataclasses.replace(handle.request, deadline_s=0.0)
    held.scheduler.permits.release(1000)
    # Tokens of steps before the deadline's may still come.
    with pytest.raises(openai.APIError, match="deadline"):
      for event in stream:
        assert event.choices[0].text
  assert serving_world.wait_until(held.is_idle)
  assert held.queue.stats.expired == 1


def test_a_draining_server_finishes_what_it_has_and_takes_nothing(held):
  answers = []
  thread = threading.Thread(
    target=lambda: answers.append(held.post(json=serving_world.body(seed=1)))
  )
  thread.start()
  assert serving_world.wait_until(lambda: held.queue.depth == 1)
  held.queue.drain()
  serving_world.check_error(
    held.post(json=serving_world.body()), 503, "shutting down"
  )
  with held.client() as client, pytest.raises(openai.InternalServerError):
    client.completions.create(model="tiny", prompt="a")
  health = httpx.get(f"{held.url}/health")
  assert (health.status_code, health.json()["status"]) == (503, "draining")
  held.scheduler.permits.release(1000)
  thread.join(serving_world.DEADLINE_S)
  assert answers[0].status_code == 200
  assert held.queue.is_empty


def test_a_failing_engine_fails_its_requests_and_health():
  def fail(num_steps):
    raise ArithmeticError("broken device")

  with serving_world.Serving() as broken:
    broken.scheduler.after_step = fail
    serving_world.check_error(
      broken.post(json=serving_world.body()), 500, "engine failed"
    )
    assert serving_world.wait_until(lambda: not broken.loop.is_running)
    assert httpx.get(f"{broken.url}/health").status_code == 503
    serving_world.check_error(
      broken.post(json=serving_world.body()), 503, "shutting down"
    )
    # The thread reports its failure after it has told the clients.
    assert serving_world.wait_until(lambda: broken.supervisor._failure)
    with pytest.raises(supervisor_lib.ThreadFailed, match="broken device"):
      broken.supervisor.check()
