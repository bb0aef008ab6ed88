"""JetStream's own client stubs get what a bare scheduler writes."""

import concurrent.futures
import contextlib
import dataclasses
import queue as queue_lib
import socket

import grpc
import grpc_world
import httpx
import jax
import pytest
import tiny
import waiting

from jaxrl_async import types
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.engine import sampling
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.policies import serve
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.serving import bodies
from jaxrl_async.serving import front as front_lib
from jaxrl_async.serving import generation
from jaxrl_async.serving import jetstream_grpc
from jaxrl_async.text import chat_template as chat_template_lib

API = grpc_world.API
DEADLINE_S = grpc_world.DEADLINE_S
TOKENIZER = grpc_world.TOKENIZER
MANY = grpc_world.MANY
tokens_request = grpc_world.tokens_request
text_request = grpc_world.text_request
decode = grpc_world.decode
received = grpc_world.received
tokens_of = grpc_world.tokens_of
PROMPT = tiny.prompt(5)
LONG_SEED = 8  # the completion of `PROMPT` fills the cache


@pytest.fixture(scope="module")
def shared():
  with grpc_world.serving() as server:
    yield server


def alone(tokens, *, max_tokens=18, seed=0, **settings):
  """Completion and finish reason of a scheduler of its own."""
  scheduler = tiny.scheduler()
  scheduler.adopt(tiny.engine_params(), 0)
  sequence = sequence_lib.Sequence(
    tokens,
    limit=len(tokens) + max_tokens,
    stream=sampling.Stream.SERVE,
    group=seed,
    member=0,
    settings=sampling.SamplingSettings(**settings),
  )
  scheduler.submit(sequence)
  tiny.finish(scheduler)
  written = sequence.trajectory().tokens[len(tokens) :].tolist()
  if sequence.finish_reason is types.FinishReason.EOS:
    written = written[:-1]
  return written, sequence.finish_reason


def status_of(call):
  """How a call ended, after all of its responses."""
  with contextlib.suppress(grpc.RpcError):
    list(call)
  return call.code()


def test_token_ids_are_those_of_a_bare_scheduler(shared):
  prompts = [tiny.prompt(3 + seed, seed=seed) for seed in range(12)]
  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    all_pieces = list(
      pool.map(
        lambda seed: received(
          decode(shared.stub, tokens_request(prompts[seed]), seed=seed)
        ),
        range(12),
      )
    )
  reasons = set()
  for seed, (prompt, pieces) in enumerate(
    zip(prompts, all_pieces, strict=True)
  ):
    expected, reason = alone(prompt, seed=seed)
    assert tokens_of(pieces) == expected
    assert not any(text for text, _ in pieces)
    reasons.add(reason)
  assert reasons == {types.FinishReason.EOS, types.FinishReason.LENGTH}


def test_a_text_request_is_answered_with_text_and_token_ids(shared):
  for seed in range(4):
    prompt = tiny.prompt(4 + seed, seed=seed)
    request = text_request(TOKENIZER.decode(prompt))
    pieces = received(decode(shared.stub, request, seed=seed))
    expected, _ = alone(prompt, seed=seed)
    assert tokens_of(pieces) == expected
    text = "".join(text for text, _ in pieces)
    # What ends a sequence of the tiny engine is a character of this tokenizer.
    assert text[: len(expected)] == TOKENIZER.decode(expected)
    assert len(text) <= len(expected) + 1


def long_call(server, **options):
  return decode(
    server.stub,
    tokens_request(PROMPT, 27),
    seed=LONG_SEED,
    **options,
  )


def test_tokens_arrive_while_others_are_still_to_be_written():
  expected, reason = alone(PROMPT, max_tokens=27, seed=LONG_SEED)
  assert reason is types.FinishReason.LENGTH and len(expected) == 27
  with grpc_world.serving(num_steps=2) as server:
    call = long_call(server)
    first = next(call)
    assert server.queue.depth == 1
    server.permits.release(MANY)
    assert tokens_of(received([first, *call])) == expected


def test_sampling_settings_come_as_metadata(shared):
  for settings in ({"temperature": 0.0}, {"temperature": 0.25, "top_k": 5}):
    expected, _ = alone(PROMPT, seed=3, **settings)
    request = tokens_request(PROMPT)
    call = decode(shared.stub, request, seed=3, **settings)
    assert tokens_of(received(call)) == expected
  received(
    decode(
      shared.stub,
      tokens_request(PROMPT),
      temperature=0.5,
      top_k=3,
      top_p=0.5,
      min_p=0.1,
    )
  )
  assert shared.queue.submitted[-1].settings == sampling.SamplingSettings(
    temperature=0.5, top_k=3, top_p=0.5, min_p=0.1
  )
  received(decode(shared.stub, tokens_request(PROMPT)))
  received(decode(shared.stub, tokens_request(PROMPT)))
  one, other = shared.queue.submitted[-2:]
  assert one.settings == sampling.SamplingSettings()
  assert one.seed != other.seed


CANNOT_BE_SERVED = {
  "nothing": (API.messages.DecodeRequest(max_tokens=4), {}, "content"),
  "no tokens": (tokens_request([]), {}, "prompt"),
  "negative token": (tokens_request([7, -1]), {}, "prompt: token ids"),
  "no such token": (tokens_request([7, 97]), {}, "prompt: token ids"),
  "foreign character": (text_request("\u00e9"), {}, "U\\+00E9"),
  "max_tokens missing": (tokens_request([7], 0), {}, "max_tokens: 0"),
  "too long": (tokens_request([7], 32), {}, "do not fit into 32"),
  "too long a prompt": (text_request("a" * 100), {}, "do not fit into 32"),
  "session": (
    API.messages.DecodeRequest(session_cache="mine", max_tokens=4),
    {},
    "session_cache",
  ),
  "no number": (tokens_request([7]), {"temperature": "hot"}, "temperature"),
  "nan": (tokens_request([7]), {"top_p": "nan"}, "top_p"),
  "not whole": (tokens_request([7]), {"seed": "1.5"}, "seed"),
  "out of range": (tokens_request([7]), {"seed": "-1"}, "seed"),
}


@pytest.mark.parametrize("name", CANNOT_BE_SERVED)
def test_what_cannot_be_served_is_refused(shared, name):
  request_, metadata, message = CANNOT_BE_SERVED[name]
  before = len(shared.queue.submitted)
  with pytest.raises(grpc.RpcError, match=message) as caught:
    list(decode(shared.stub, request_, **metadata))
  assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
  assert len(shared.queue.submitted) == before


@pytest.mark.parametrize(
  "message",
  [
    b"\xff" * 40,
    b"\x20\x08\x2a\x03\x0a\x01\xff",  # text that is not UTF-8
    b"\x20\x08\x32\x7f",  # cut off
  ],
  ids=["garbage", "not UTF-8", "cut off"],
)
def test_bytes_that_are_no_request_reach_nobody(shared, message, caplog):
  before = len(shared.queue.submitted)
  call = shared.channel.unary_stream(
    "/jetstream_proto.Orchestrator/Decode",
    request_serializer=lambda _: message,
    response_deserializer=API.messages.DecodeResponse.FromString,
  )
  with pytest.raises(grpc.RpcError) as caught:
    list(call(None, timeout=DEADLINE_S))
  assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
  assert "not a DecodeRequest" in caught.value.details()
  assert not caplog.records  # grpc alone would log a traceback each
  assert len(shared.queue.submitted) == before


def test_a_key_is_asked_for():
  with grpc_world.serving(api_key="s\u00e9same") as server:

    def code(**metadata):
      return status_of(decode(server.stub, tokens_request(PROMPT), **metadata))

    assert code() is grpc.StatusCode.UNAUTHENTICATED
    assert code(authorization="Bearer guess") is (
      grpc.StatusCode.UNAUTHENTICATED
    )
    assert not server.queue.submitted
  with grpc_world.serving(api_key="sesame") as server:
    assert code(authorization="Basic sesame") is grpc.StatusCode.UNAUTHENTICATED
    assert not server.queue.submitted
    assert code(authorization="Bearer sesame") is grpc.StatusCode.OK
    # As with HTTP, anybody may ask how it is.
    health = API.messages.HealthCheckRequest()
    assert server.stub.HealthCheck(health).is_live


def test_a_full_queue_says_when_to_come_again():
  with grpc_world.serving(num_steps=2, max_waiting=1) as server:
    running_call = long_call(server)
    first = next(running_call)
    refused = decode(server.stub, tokens_request(PROMPT))
    assert status_of(refused) is grpc.StatusCode.RESOURCE_EXHAUSTED
    (pushback,) = refused.trailing_metadata()
    assert pushback.key == "grpc-retry-pushback-ms"
    assert int(pushback.value) >= 1000
    server.permits.release(MANY)
    assert len(tokens_of(received([first, *running_call]))) == 27


def test_a_client_that_goes_away_frees_its_slot():
  with grpc_world.serving(num_steps=2) as server:
    call = long_call(server)
    next(call)
    call.cancel()
    assert server.queue.cancelled.wait(DEADLINE_S)
    server.permits.release(MANY)
    # The next one is served after the slot was freed.
    received(decode(server.stub, tokens_request(PROMPT, 1)))
    assert server.queue.stats.cancelled == 1
    waiting.until(lambda: server.scheduler.is_idle, "free slots")
  assert server.queue.is_empty
  assert server.scheduler.stats.generated_tokens < 27


def test_the_servers_own_deadline_holds_for_calls_without_one(monkeypatch):
  # The engine's thread ends the request, however late that runs.
  monkeypatch.setattr(generation, "_GRACE_S", DEADLINE_S)
  with grpc_world.serving(limits=bodies.Limits(deadline_s=0.0)) as server:
    call = server.stub.Decode(tokens_request(PROMPT))
    assert status_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "request's deadline" in call.details()
    assert server.queue.stats.expired == 1


def test_a_server_without_an_engine_is_not_live(shared):
  orchestrator = jetstream_grpc.Orchestrator(
    grpc_world.make_service(shared.queue)
  )
  server = jetstream_grpc.GrpcServer(
    orchestrator, host="localhost", port=0, max_calls=1
  )
  with (
    grpc_world.running(server.run, server.stop),
    grpc.insecure_channel(f"localhost:{server.port}") as channel,
  ):
    stub = API.services.OrchestratorStub(channel)
    health = API.messages.HealthCheckRequest()
    assert not stub.HealthCheck(health, timeout=DEADLINE_S).is_live


def test_a_draining_server_finishes_what_it_has():
  health = API.messages.HealthCheckRequest()
  with grpc_world.serving(num_steps=2) as server:
    call = long_call(server)
    first = next(call)
    assert server.stub.HealthCheck(health).is_live
    server.queue.drain()
    assert not server.stub.HealthCheck(health).is_live
    refused = decode(server.stub, tokens_request(PROMPT))
    assert status_of(refused) is grpc.StatusCode.UNAVAILABLE
    server.permits.release(MANY)
    assert len(tokens_of(received([first, *call]))) == 27


@pytest.mark.parametrize(
  "has_failed, code",
  [
    (False, grpc.StatusCode.UNAVAILABLE),
    (True, grpc.StatusCode.INTERNAL),
  ],
)
def test_what_the_server_cannot_finish_ends_with_a_status(has_failed, code):
  with grpc_world.serving(num_steps=2) as server:
    call = long_call(server)
    next(call)
    server.queue.close(has_failed=has_failed)
    assert status_of(call) is code


def test_a_port_in_use_is_refused(shared):
  with pytest.raises(RuntimeError, match="bind"):
    jetstream_grpc.GrpcServer(
      jetstream_grpc.Orchestrator(grpc_world.make_service(shared.queue)),
      host="localhost",
      port=shared.port,
      max_calls=1,
    )


@pytest.mark.slow
@pytest.mark.nightly
def test_http_and_grpc_are_served_by_one_engine():
  config = sections.Config()
  config.rollout = sections.RolloutSection(
    **{
      field.name: getattr(tiny.SIZES, field.name)
      for field in dataclasses.fields(sections.RolloutSection)
      if hasattr(tiny.SIZES, field.name)
    }
  )
  with socket.create_server(("127.0.0.1", 0)) as free:
    grpc_port = free.getsockname()[1]
  stop = supervisor_lib.StopRequest()
  addresses: queue_lib.SimpleQueue[str] = queue_lib.SimpleQueue()

  setup = setup_lib.resolve(config, jax.devices(), tokenizer=TOKENIZER)

  def run():
    serve.serve(
      serve.Policy(
        setup=dataclasses.replace(setup, model=tiny.MODEL),
        params=tiny.params(),
        version=0,
        chat_template=chat_template_lib.ChatTemplate(None),
      ),
      front_lib.ServeSettings(port=0, grpc_port=grpc_port),
      stop=stop,
      on_ready=addresses.put,
    )

  body = {"model": "policy", "prompt": PROMPT.tolist(), "temperature": 0}
  body |= {"max_tokens": 18, "return_token_ids": True}
  with (
    grpc_world.running(run, stop.set),
    grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
  ):
    address = addresses.get(timeout=DEADLINE_S)
    stub = API.services.OrchestratorStub(channel)
    call = decode(stub, tokens_request(PROMPT), temperature=0)
    from_grpc = tokens_of(received(call))
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    choice = answer.raise_for_status().json()["choices"][0]
    is_length = choice["finish_reason"] == "length"
    assert from_grpc and from_grpc == (
      choice["token_ids"] if is_length else choice["token_ids"][:-1]
    )
    page = httpx.get(f"{address}/metrics").text
    assert 'jaxrl_tokens_total{direction="in"} 10.0' in page
    assert "jetstream" not in page
