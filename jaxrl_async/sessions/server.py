"""The HTTP server of the sessions, on the event loop of the episodes.

    POST /sessions/NAME/v1/chat/completions      and OpenAI's other paths
    POST /sessions/NAME/inference/v1/generate    token ids in, token ids out
    POST /sessions/NAME/reward                   {"reward": 1.0}

What a request says about sampling has no effect, and is told once: the policy
is sampled as the run says. An answer goes as far as the request says, and at
most as far as the room of its branch.
"""

import asyncio
from collections.abc import Callable, Iterator
import contextlib
import functools
import json
import logging
import math
import time
from typing import Any
import weakref

import numpy as np
from starlette import applications
from starlette import requests as http_requests
from starlette import responses
from starlette import routing

from jaxrl_async.engine import sampling
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.serving import answers
from jaxrl_async.serving import app as app_lib
from jaxrl_async.serving import bodies
from jaxrl_async.serving import client_request
from jaxrl_async.serving import errors
from jaxrl_async.serving import generation
from jaxrl_async.serving import prometheus
from jaxrl_async.serving import protocol
from jaxrl_async.serving import server as server_lib
from jaxrl_async.sessions import agents
from jaxrl_async.sessions import session as session_lib
from jaxrl_async.text import guides as guides_lib

# The episode has the deadline.
_LIMITS = bodies.Limits(
  deadline_s=1e6, max_deadline_s=1e6, max_body_bytes=1 << 26
)
_MAX_CONNECTIONS = 1 << 16
# Fields that have no effect, unless they have one of these values anyway.
_SAMPLED = {
  "temperature": (),
  "top_p": (1.0,),
  "top_k": (-1, 0),
  "min_p": (0.0,),
  "seed": (),
}
_UNSAMPLED = ("min_tokens", "ignore_eos")
_BY_ITSELF = "the policy learns what it writes by itself"
_REWARD_BYTES = 1 << 12
_LOOK_S = 0.01


def _is_no_end(record: logging.LogRecord) -> bool:
  """Return whether a record is something else than a call cut by the end."""
  error = record.exc_info[1] if record.exc_info else None
  return not isinstance(error, asyncio.CancelledError)


class _Metrics(prometheus.Metrics):
  """Counts nothing."""

  def __init__(self):
    pass

  def watch(self, queue: Any) -> None:
    pass


class _Generation(generation.Generation):
  """Remembers the answer of a chat in its session."""

  def __init__(
    self,
    on_end: Callable[[generation.Piece], None],
    *arguments: Any,
    **options: Any,
  ):
    super().__init__(*arguments, **options)
    self._on_end = on_end

  async def next(self) -> generation.Piece | None:
    piece = await super().next()
    if piece is not None:
      self._on_end(piece)
    return piece


class _Service(app_lib.Service):
  """The paths of one session."""

  def __init__(
    self,
    session: session_lib.Session,
    vocab_size: int,
    tool_format: str,
    check_sampling: Callable[[protocol.Completion | protocol.Chat], None],
  ):
    super().__init__(
      queue=session_lib.Queue(session, vocab_size=vocab_size),
      tokenizer=session.tokenizer,
      chat_template=session.template,
      metrics=_Metrics(),
      model_name=agents.Access.model,
      is_alive=lambda: True,
      api_key=session.key,
      limits=_LIMITS,
      tool_format=tool_format,
    )
    self._session = session
    self._check_sampling = check_sampling

  def _chat_tokens(self, wanted: protocol.Chat) -> np.ndarray:
    self._check_sampling(wanted)
    known = self._session.prompt_of(*self._given(wanted))
    return super()._chat_tokens(wanted) if known is None else known

  def _read_completion(self, body: bytes):
    wanted, prompts, guide = super()._read_completion(body)
    self._check_sampling(wanted)
    return wanted, prompts, guide

  def _guide_of_chat(self, wanted: protocol.Chat) -> guides_lib.Guide | None:
    """Return the guide of a chat whose answer has to have a form.

    Schemas of tools that are meant strictly are shown to the policy as others:
    many frameworks mark all tools so, and what a guide changes is not learned.
    """
    must_call = wanted.tool_choice not in ("none", "auto")
    if not must_call and wanted.response_format.schema_of_answer is None:
      return None
    return super()._guide_of_chat(wanted)

  def _answer(
    self,
    request: http_requests.Request,
    wanted: protocol.Completion | protocol.Chat,
    prompts: list[np.ndarray],
    guide: guides_lib.Guide | None,
    max_tokens: int | None,
    has_logprobs: bool,
  ) -> answers.Answer:
    max_tokens = self._most(max_tokens, prompts[0])
    return super()._answer(
      request, wanted, prompts, guide, max_tokens, has_logprobs
    )

  def _most(self, max_tokens: int | None, prompt: np.ndarray) -> int:
    """Return how many tokens an answer may have, for which so many are asked.

    It goes at most as far as the room of its branch.
    """
    room = max(self.queue.cache_tokens - len(prompt), 1)
    return min(max_tokens or room, room)

  def _generation(
    self,
    asked: client_request.Request,
    wanted: protocol.Completion | protocol.Chat,
    **options: Any,
  ) -> generation.Generation:
    if not isinstance(wanted, protocol.Chat):
      return super()._generation(asked, wanted, **options)
    messages, tools = self._given(wanted)

    def said(piece: generation.Piece) -> None:
      self._session.said(messages, tools, asked.prompt_of(0), piece)

    return _Generation(said, self.queue, self.tokenizer, asked, **options)

  def _given(self, wanted: protocol.Chat) -> tuple[list[Any], list[Any]]:
    messages = [message.for_template() for message in wanted.messages]
    return messages, self._described(wanted.shown_tools)

  async def generate(self, request: http_requests.Request):
    """Continue token ids, and answer with token ids and their logprobs."""
    body = await bodies.receive(request, self.limits, self.bounds.body_bytes(1))
    token_ids, sampled = _token_ids(bodies.from_json(body))
    prompt = self.tokens(token_ids, "token_ids")
    asked = {"model": self.model_name, "prompt": "-", **sampled}
    wanted = protocol.parse(
      protocol.Completion, json.dumps(asked).encode(), self.bounds
    )
    self._check_sampling(wanted)
    writing = generation.Generation(
      self.queue,
      self.tokenizer,
      client_request.Request(
        prompts=(prompt,),
        max_tokens=self._most(wanted.max_tokens, prompt),
        settings=sampling.SamplingSettings(
          end_tokens=tuple(wanted.stop_token_ids)
        ),
        seed=0,
        stop_strings=wanted.stop,
        deadline_s=time.monotonic() + _LIMITS.deadline_s,
      ),
      has_token_texts=False,
    )
    writing.submit()
    piece = await writing.next()
    assert piece is not None and piece.finish_reason is not None
    logprobs = [
      {"token": f"token_id:{token}", "logprob": logprob}
      for token, logprob in zip(piece.tokens, piece.logprobs, strict=True)
    ]
    choice = {
      "index": 0,
      "token_ids": piece.tokens,
      "logprobs": {"content": logprobs},
      "finish_reason": answers.FINISH[piece.finish_reason],
    }
    return responses.JSONResponse({"request_id": "", "choices": [choice]})

  async def reward(self, request: http_requests.Request):
    """Take the reward of the session, which ends it."""
    received = await bodies.receive(request, self.limits, _REWARD_BYTES)
    body = bodies.from_json(received)
    reward: Any = body.get("reward") if isinstance(body, dict) else None
    if type(reward) not in (int, float) or not math.isfinite(reward):
      raise errors.ApiError(400, 'must be {"reward": number}', param="reward")
    self._session.give_reward(float(reward))
    return responses.JSONResponse({"reward": reward})


def _token_ids(body: Any) -> tuple[list[int], dict[str, Any]]:
  """Return the token ids of a body, and how their continuation is sampled."""
  given = body if isinstance(body, dict) else {}
  tokens: Any = given.get("token_ids")
  if (
    not isinstance(tokens, list)
    or not tokens
    or not all(type(token) is int for token in tokens)
  ):
    raise errors.ApiError(
      400, "token_ids: must be a list of token ids", param="token_ids"
    )
  for name in ("features", "content_parts"):
    if given.get(name):
      raise _unsupported(name, "there is only text")
  sampled: Any = given.get("sampling_params") or {}
  if not isinstance(sampled, dict):
    raise errors.ApiError(
      400, "sampling_params: must be an object", param="sampling_params"
    )
  if sampled.get("n", 1) != 1:
    raise _unsupported("sampling_params", "n is 1")
  names = ("max_tokens", "stop", "stop_token_ids", *_SAMPLED, *_UNSAMPLED)
  return tokens, {name: sampled[name] for name in names if name in sampled}


def _unsupported(name: str, why: str) -> errors.ApiError:
  return errors.ApiError(
    400,
    f"{name}: not supported while the policy is in training; {why}",
    param=name,
    code="unsupported_parameter",
  )


_PATHS = {
  "/v1/models": ("GET", "models"),
  "/v1/models/{name:path}": ("GET", "model"),
  "/v1/completions": ("POST", "completions"),
  "/v1/chat/completions": ("POST", "chat"),
  "/tokenize": ("POST", "tokenize"),
  "/detokenize": ("POST", "detokenize"),
  "/inference/v1/generate": ("POST", "generate"),
  "/reward": ("POST", "reward"),
}


class SessionServer:
  """The sessions that are open, and the server in front of them.

  Threads: the event loop of the episodes.
  """

  def __init__(self, host: str):
    """Bind a free port, and serve until the loop ends."""
    routes = [
      routing.Route(f"/sessions/{{session}}{path}", self._of(name), methods=[m])
      for path, (m, name) in _PATHS.items()
    ]
    app = applications.Starlette(
      routes=routes, exception_handlers=errors.HANDLERS
    )
    self._services: dict[str, tuple[_Service, session_lib.Session]] = {}
    self._told: set[str] = set()  # fields that had no effect
    self._http = server_lib.HttpServer(
      app, host=host, port=0, max_connections=_MAX_CONNECTIONS
    )
    logging.getLogger("uvicorn.error").addFilter(_is_no_end)
    self._address = f"http://{host}:{self._http.port}"
    self.serving = asyncio.create_task(self._http.serve())

  @contextlib.contextmanager
  def open(
    self,
    session: session_lib.Session,
    context: episode_lib.Context,
    tool_format: str,
  ) -> Iterator[agents.Access]:
    """Serve a session in the block."""
    check = functools.partial(self._check_sampling, context.temperature)
    service = _Service(session, context.vocab_size, tool_format, check)
    self._services[session.name] = service, session
    try:
      yield agents.Access(
        base_url=f"{self._address}/sessions/{session.name}/v1",
        api_key=session.key,
      )
    finally:
      del self._services[session.name]

  @property
  def has_started(self) -> bool:
    """Whether connections are accepted."""
    return self._http.has_started

  def _check_sampling(
    self, temperature: float, wanted: protocol.Completion | protocol.Chat
  ) -> None:
    """Tell once of each field that has no effect, and refuse some.

    Many frameworks send a temperature that their user cannot change.
    """
    for name in _UNSAMPLED:
      if getattr(wanted, name):
        raise _unsupported(name, _BY_ITSELF)
    for name, neutral in _SAMPLED.items():
      asked = getattr(wanted, name)
      own = (temperature,) if name == "temperature" else neutral
      is_asked = name in wanted.model_fields_set and asked not in own
      if is_asked and name not in self._told:
        self._told.add(name)
        logging.warning(
          "calls of agents ask for %s=%s, which has no effect: the policy is"
          " sampled with rollout.temperature=%s",
          name,
          asked,
          temperature,
        )

  def _of(self, name: str) -> Any:
    async def answer(request: http_requests.Request) -> responses.Response:
      service, session = self._services.get(
        request.path_params["session"], (None, None)
      )
      key = request.headers.get("authorization", "").encode()
      # Nobody finds out which sessions there are.
      if service is None or session is None or not service.has_key(key):
        raise errors.ApiError(
          401, "there is no such session with this key", code="invalid_api_key"
        )
      if session.is_over:
        raise generation.over()
      return await getattr(service, name)(request)

    return answer


# By loop and host. Only the loop's thread touches its servers.
_SERVERS: weakref.WeakKeyDictionary[
  asyncio.AbstractEventLoop, dict[str, SessionServer]
] = weakref.WeakKeyDictionary()


async def of_loop(host: str) -> SessionServer:
  """Return the server of the running loop, after it has started."""
  servers = _SERVERS.setdefault(asyncio.get_running_loop(), {})
  if host not in servers:
    servers[host] = SessionServer(host)
  server = servers[host]
  while not server.has_started and not server.serving.done():
    await asyncio.sleep(_LOOK_S)
  return server
