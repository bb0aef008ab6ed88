"""Clients that send too much, too slowly or go away; a full or late server."""

import contextlib
import json
import socket
import threading
import time

import httpx
import openai
import pytest
import serving_world
import tiny

from jaxrl_async import supervisor
from jaxrl_async.serving import generation
from jaxrl_async.serving import server as server_lib

SEEDS = (1, 4, 5)


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


@contextlib.contextmanager
def connection(serving, content, *, length=None):
  """A raw connection over which a request's beginning was sent."""
  with socket.create_connection(
    ("127.0.0.1", serving.http.port), serving_world.DEADLINE_S
  ) as raw:
    head = (
      "POST /v1/completions HTTP/1.1\r\nhost: here\r\n"
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


def test_a_body_too_slow_is_a_408(serving):
  with connection(serving, b'{"model"', length=100) as raw:
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
  serving_world.check_error(answer, 400, "prompt: 100 prompts; at most 16")


def test_a_deadline_in_the_middle_ends_a_stream_with_an_error(held):
  seed = serving_world.long_seed()
  with held.client() as client:
    held.scheduler.permits.release(1)
    stream = client.completions.create(
      model="tiny",
      prompt=serving_world.PROMPT,
      seed=seed,
      stream=True,
      extra_body={"deadline_s": 2.0},
    )
    with pytest.raises(openai.APIError, match="deadline"):
      for event in stream:
        assert event.choices[0].text
        time.sleep(2.1)
        held.scheduler.permits.release(1000)
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
    with pytest.raises(supervisor.ThreadFailed, match="broken device"):
      broken.supervisor.check()
