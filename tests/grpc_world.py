"""A server of JetStream's service over the tiny engine, and its client."""

import contextlib
import dataclasses
import threading

import grpc
import numpy as np
import tiny

from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.serving import app as app_lib
from jaxrl_async.serving import jetstream_grpc
from jaxrl_async.serving import prometheus
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

API = jetstream_api.grpc_api()
DEADLINE_S = 60.0
TOKENIZER = tokenizer_lib.character_level()
MANY = 10_000  # more steps than any test takes
PROMPT = tiny.prompt(5)
LONG_SEED = 8  # the completion of `PROMPT` fills the cache


class Queue(requests_lib.RequestQueue):
  """Remembers what it was asked for; tells when something was cancelled."""

  def __init__(self, **options):
    super().__init__(TOKENIZER, **options)
    self.submitted = []
    self.cancelled = threading.Event()

  def submit(self, request, on_update):
    handle = super().submit(request, on_update)
    self.submitted.append(request)
    return handle

  def cancel(self, handle):
    super().cancel(handle)
    self.cancelled.set()


@dataclasses.dataclass(kw_only=True)
class Serving:
  """A running server, and what its client needs.

  The scheduler stands still when it has used up its permits, one a step.
  """

  stub: object
  channel: grpc.Channel
  port: int
  queue: Queue
  scheduler: scheduler_lib.Scheduler
  permits: threading.Semaphore


@contextlib.contextmanager
def running(target, stop):
  """Runs a thread until the block ends."""
  thread = threading.Thread(target=target)
  thread.start()
  try:
    yield
  finally:
    stop()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def make_service(queue, serve_loop=None, **options):
  return app_lib.Service(
    queue=queue,
    tokenizer=TOKENIZER,
    chat_template=chat_template_lib.ChatTemplate(None),
    metrics=prometheus.Metrics(),
    model_name="tiny",
    is_alive=lambda: serve_loop is not None and serve_loop.is_running,
    **options,
  )


@contextlib.contextmanager
def serving(*, num_steps=MANY, max_waiting=8, **options):
  """Serves the tiny model over a socket until the block ends."""
  scheduler = tiny.scheduler(cls=tiny.SteppedScheduler)
  scheduler.adopt(tiny.engine_params(), 0)
  permits = threading.Semaphore(num_steps)

  def after_step(_):
    assert permits.acquire(timeout=DEADLINE_S)

  scheduler.after_step = after_step
  queue = Queue(
    max_waiting=max_waiting,
    cache_tokens=tiny.SIZES.cache_tokens,
    vocab_size=tiny.MODEL.vocab_size,
  )
  serve_loop = requests_lib.ServeLoop(queue, scheduler)
  server = jetstream_grpc.GrpcServer(
    jetstream_grpc.Orchestrator(make_service(queue, serve_loop, **options)),
    host="localhost",
    port=0,
    max_calls=16,
  )
  with contextlib.ExitStack() as stack:
    stack.enter_context(running(serve_loop.run, serve_loop.stop))
    stack.enter_context(running(server.run, server.stop))
    stack.callback(lambda: permits.release(MANY))
    channel = stack.enter_context(
      grpc.insecure_channel(f"localhost:{server.port}")
    )
    stub = API.services.OrchestratorStub(channel)
    yield Serving(
      stub=stub,
      channel=channel,
      port=server.port,
      queue=queue,
      scheduler=scheduler,
      permits=permits,
    )


def tokens_request(tokens, max_tokens=18):
  return API.messages.DecodeRequest(
    token_content=API.messages.DecodeRequest.TokenContent(
      token_ids=np.asarray(tokens).tolist()
    ),
    max_tokens=max_tokens,
  )


def text_request(text, max_tokens=18):
  return API.messages.DecodeRequest(
    text_content=API.messages.DecodeRequest.TextContent(text=text),
    max_tokens=max_tokens,
  )


def decode(stub, request, **settings):
  """Starts a call; settings travel as metadata."""
  metadata = [(name, str(value)) for name, value in settings.items()]
  return stub.Decode(request, metadata=metadata, timeout=DEADLINE_S)


def received(call):
  """What each response brought: text and token ids."""
  pieces = []
  for response in call:
    (sample,) = response.stream_content.samples
    pieces.append((sample.text, list(sample.token_ids)))
  return pieces


def tokens_of(pieces):
  return sum((tokens for _, tokens in pieces), [])
