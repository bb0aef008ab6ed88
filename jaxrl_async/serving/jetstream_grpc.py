"""JetStream's gRPC service, `jetstream_proto.Orchestrator`.

It serves clients that were written for JetStream, with JetStream's proto and
generated stubs. JetStream's servicer is the base class, from which reading the
content of a request and answering health checks are inherited. `Decode` is not
inherited, because JetStream's implementation has no deadlines and no errors of
single requests, continues requests that their client abandoned, decodes text
that looks like "<0x41>" as a byte, and logs through the root logger, which
installs a handler there. A health check needs no key, as over HTTP.

As in JetStream, a request with text is answered with text and token ids, and a
request with token ids is answered with token ids alone. The token that ended a
completion is left out. The proto has no sampling settings. They are read from
the metadata of the call, under the names of OpenAI's interface (`temperature`,
`top_p`, `seed`, ...). `priority` is accepted and has no effect, as in
JetStream.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
import contextlib
import http
import secrets
import time
from typing import Any

from google.protobuf import message as protobuf_message
import grpc

from jaxrl_async import types
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import sampling
from jaxrl_async.serving import app as app_lib
from jaxrl_async.serving import client_request
from jaxrl_async.serving import errors
from jaxrl_async.serving import generation

_api = jetstream_api.grpc_api()

_SHUTDOWN_S = 5
# A class of grpc's C extension, which is not a `grpc.aio.ServicerContext`.
_Context = Any
_SETTINGS = {"temperature": float, "top_k": int, "top_p": float, "min_p": float}
_STATUS = {
  400: grpc.StatusCode.INVALID_ARGUMENT,
  401: grpc.StatusCode.UNAUTHENTICATED,
  429: grpc.StatusCode.RESOURCE_EXHAUSTED,
  500: grpc.StatusCode.INTERNAL,
  503: grpc.StatusCode.UNAVAILABLE,
  504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


class _Driver:
  """The part of JetStream's driver that its health check reads."""

  def __init__(self, service: app_lib.Service):
    self._service = service

  @property
  def live(self) -> bool:
    queue = self._service.queue
    is_ready = self._service.is_alive() and queue.stats.policy_version >= 0
    return is_ready and not queue.is_draining


class Orchestrator(_api.LLMOrchestrator):
  """Answers JetStream's clients from the queue that also serves HTTP.

  Threads: one event loop; tokens come from the scheduler's thread.
  """

  def __init__(self, service: app_lib.Service):
    super().__init__(driver=_Driver(service))
    self.service = service

  async def Decode(self, request: Any, context: _Context) -> AsyncIterator[Any]:
    """Stream a completion as it is written."""
    service = self.service
    try:
      given = _metadata(context).get("authorization", "")
      if not service.has_key(given.encode()):
        raise errors.ApiError(
          401,
          "the API key is missing or wrong; send it as authorization: Bearer"
          " ...",
        )
      if request is None:
        raise ValueError("the message is not a DecodeRequest")
      if not service.is_ready and not service.queue.is_draining:
        raise errors.ApiError(503, "not ready yet")
      wanted, is_text = await self._read(request, context)
      writing = generation.Generation(
        service.queue, service.tokenizer, wanted, has_token_texts=False
      )
      writing.submit()
      # Called at the end of the call, also if the client disconnects or the
      # deadline passes.
      context.add_done_callback(lambda _: writing.cancel())
      while (piece := await writing.next()) is not None:
        tokens = piece.tokens
        if piece.finish_reason is types.FinishReason.EOS:
          tokens = tokens[:-1]
        text = piece.text if is_text else ""
        if text or tokens:
          yield _response(text, tokens)
    except ValueError as error:
      await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
    except errors.ApiError as error:
      if error.status == http.HTTPStatus.TOO_MANY_REQUESTS:
        pushback_ms = 1000 * int(error.headers["retry-after"])
        context.set_trailing_metadata(
          (("grpc-retry-pushback-ms", str(pushback_ms)),)
        )
      await context.abort(_STATUS[error.status], str(error.message))

  async def _read(
    self, request: Any, context: _Context
  ) -> tuple[client_request.Request, bool]:
    """Return the request of the client, and whether it asks for text.

    Raises:
      ValueError, ApiError: the request is invalid or not supported.
    """
    if request.session_cache:
      raise ValueError("session_cache: sessions are not supported")
    if request.WhichOneof("content") is None:
      raise ValueError(
        "content: one of text_content and token_content is required"
      )
    content, is_tokens = self._get_prefill_content(request)
    prompt = await asyncio.to_thread(self.service.tokens, content, "prompt")
    metadata = _metadata(context)
    given = {
      name: _number(kind, name, metadata[name])
      for name, kind in _SETTINGS.items()
      if name in metadata
    }
    seed = secrets.randbits(31)
    if "seed" in metadata:
      seed = _number(int, "seed", metadata["seed"])
    deadline_s = context.time_remaining()
    if deadline_s is None:
      deadline_s = self.service.limits.deadline_s
    deadline_s = min(deadline_s, self.service.limits.max_deadline_s)
    wanted = client_request.Request(
      prompts=(prompt,),
      max_tokens=request.max_tokens,
      settings=sampling.SamplingSettings(**given),
      seed=seed,
      deadline_s=time.monotonic() + deadline_s,
      client=_address(context.peer()),
    )
    return wanted, not is_tokens


class GrpcServer:
  """A gRPC server that runs until it is stopped.

  Threads: `run` belongs to a thread of its own; any thread may call the other
  methods.

  Attributes:
    port: the port that it listens on.
    has_started: whether calls are accepted.
  """

  def __init__(
    self, servicer: Orchestrator, *, host: str, port: int, max_calls: int
  ):
    """Bind the address, so that a port in use is an error here.

    Args:
      servicer: answers the calls.
      host: name or address.
      port: 0 takes a free one, see the attribute.
      max_calls: further calls get RESOURCE_EXHAUSTED.

    Raises:
      RuntimeError: the address cannot be bound.
    """
    self.has_started = False
    self._stopping = asyncio.Event()
    self._loop = asyncio.new_event_loop()

    async def bind():
      server = grpc.aio.server(
        options=[
          # Otherwise two servers could share a port and divide its clients.
          ("grpc.so_reuseport", 0),
          (
            "grpc.max_receive_message_length",
            servicer.service.bounds.body_bytes(1),
          ),
        ],
        maximum_concurrent_rpcs=max_calls,
      )
      server.add_generic_rpc_handlers((_handlers(servicer),))
      name = f"[{host}]" if ":" in host else host
      return server, server.add_insecure_port(f"{name}:{port}")

    try:
      self._server, self.port = self._loop.run_until_complete(bind())
    except RuntimeError:
      self._loop.close()
      raise

  def run(self) -> None:
    """Serve until `stop` is called."""

    async def serve():
      await self._server.start()
      self.has_started = True
      await self._stopping.wait()
      await self._server.stop(_SHUTDOWN_S)

    try:
      self._loop.run_until_complete(serve())
    finally:
      self._loop.close()

  def stop(self) -> None:
    """Accept no new calls; those in progress have a few seconds left."""
    with contextlib.suppress(RuntimeError):  # the loop has ended
      self._loop.call_soon_threadsafe(self._stopping.set)


def _handlers(servicer: Orchestrator) -> grpc.GenericRpcHandler:
  """Return handlers of JetStream's two methods.

  They differ from JetStream's own registration in one point. There, a message
  that cannot be parsed raises an exception whose traceback grpc logs. Here, it
  is passed on as None.
  """

  def reader(message: Any) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
      try:
        return message.FromString(data)
      except protobuf_message.DecodeError:
        return None

    return read

  messages = _api.messages
  return grpc.method_handlers_generic_handler(
    "jetstream_proto.Orchestrator",
    {
      "Decode": grpc.unary_stream_rpc_method_handler(
        servicer.Decode,
        request_deserializer=reader(messages.DecodeRequest),
        response_serializer=messages.DecodeResponse.SerializeToString,
      ),
      "HealthCheck": grpc.unary_unary_rpc_method_handler(
        servicer.HealthCheck,
        request_deserializer=reader(messages.HealthCheckRequest),
        response_serializer=messages.HealthCheckResponse.SerializeToString,
      ),
    },
  )


def _address(peer: str) -> str:
  """Return the client's address without its port: "ipv4:127.0.0.1"."""
  return peer.rpartition(":")[0]


def _metadata(context: _Context) -> dict[str, Any]:
  return {str(key): value for key, value in context.invocation_metadata() or ()}


def _number(kind: type, name: str, text: str) -> Any:
  try:
    return kind(text)
  except ValueError:
    raise ValueError(
      f"{name}: {text!r} is not of type {kind.__name__}"
    ) from None


def _response(text: str, tokens: list[int]) -> Any:
  """Return newly written tokens in JetStream's format."""
  content = _api.messages.DecodeResponse.StreamContent
  sample = content.Sample(text=text, token_ids=tokens)
  return _api.messages.DecodeResponse(stream_content=content(samples=[sample]))
