"""The HTTP application: OpenAI's paths, health and metrics.

Everything that a client sends is bounded and checked before it reaches the
engine: its key, the amount and speed of its data, JSON, fields, ranges,
characters and token ids. Checks that take long run in separate threads.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
import hmac
import secrets
import time
from typing import Any

import numpy as np
from starlette import applications
from starlette import requests as http_requests
from starlette import responses
from starlette import routing
from starlette import types as asgi

from jaxrl_async.engine import sampling
from jaxrl_async.serving import answers
from jaxrl_async.serving import bodies
from jaxrl_async.serving import client_request
from jaxrl_async.serving import errors
from jaxrl_async.serving import generation
from jaxrl_async.serving import guided
from jaxrl_async.serving import prometheus
from jaxrl_async.serving import protocol
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import guides as guides_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.tools import formats

_DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions


# Clients in this process, such as agents, may hold all threads of the loop.
_THREADS = futures.ThreadPoolExecutor(thread_name_prefix="bodies")


def _in_thread(
  read: Callable[[bytes], Any], body: bytes
) -> Coroutine[Any, Any, Any]:
  """Return what reads a body in another thread."""

  async def reading() -> Any:
    return await asyncio.get_running_loop().run_in_executor(
      _THREADS, read, body
    )

  return reading()


class Service:
  """The handlers of all paths, and what they share.

  Threads: belongs to the server's event loop; the queue is shared.
  """

  def __init__(
    self,
    *,
    queue: requests_lib.RequestQueue,
    tokenizer: tokenizer_lib.Tokenizer,
    chat_template: chat_template_lib.ChatTemplate,
    metrics: prometheus.Metrics,
    model_name: str,
    is_alive: Callable[[], bool],
    api_key: str | None = None,
    limits: bodies.Limits | None = None,
    adapters: Sequence[str] = (),
    tool_format: str = "",
  ):
    """Keep the parts that the handlers use.

    Args:
      queue: requests for the owner of the scheduler.
      tokenizer: of the policy.
      chat_template: of the same tokenizer.
      metrics: the object that `queue` reports its durations to.
      model_name: the value of `model` for the policy.
      is_alive: returns whether the queue is being served.
      api_key: bearer token that every path except /health requires.
      limits: on the requests of clients.
      adapters: the values of `model` for adapters, from number 1 on.
      tool_format: how the policy writes calls of tools, a name of
        `formats.FORMATS`; "" finds it in the chat template.
    """
    self.queue = queue
    self.tokenizer = tokenizer
    self.chat_template = chat_template
    self.metrics = metrics
    self.model_name = model_name
    self.adapters = {
      name: number for number, name in enumerate((model_name, *adapters))
    }
    self.tool_format = tool_format or formats.in_template(
      chat_template.source or ""
    )
    self.is_alive = is_alive
    self.api_key = api_key
    self.limits = limits or bodies.Limits()
    self.bounds = bodies.Bounds(
      tokens=queue.cache_tokens,
      prompts=queue.max_choices,
      characters=queue.cache_tokens * tokenizer.max_token_characters,
      max_body_bytes=self.limits.max_body_bytes,
    )
    self._guides = guides_lib.of(tokenizer)
    self.created_s = int(time.time())
    metrics.watch(queue)

  @property
  def is_ready(self) -> bool:
    """Whether requests are being completed."""
    return self.is_alive() and self.queue.stats.policy_version >= 0

  def has_key(self, authorization: bytes) -> bool:
    """Return whether a call may be answered, by its header `authorization`."""
    if self.api_key is None:
      return True
    kind, _, token = authorization.partition(b" ")
    # Both comparisons are always made, so that the time taken reveals nothing.
    is_right = hmac.compare_digest(token.strip(), self.api_key.encode())
    return kind.lower() == b"bearer" and is_right

  # -- paths ----------------------------------------------------------------

  async def health(self, request: http_requests.Request):
    """Answer whether requests are accepted."""
    del request
    version = self.queue.stats.policy_version
    status = "ok" if self.is_ready else "not ready"
    if self.queue.is_draining:
      status = "draining"
    return responses.JSONResponse(
      {"status": status, "policy_version": version},
      status_code=200 if status == "ok" else 503,
    )

  async def show_metrics(self, request: http_requests.Request):
    """Answer with Prometheus metrics."""
    del request
    return responses.Response(
      self.metrics.text(), media_type="text/plain; version=0.0.4"
    )

  async def models(self, request: http_requests.Request):
    """Answer with the list of models: the policy, and its adapters."""
    del request
    listed = [self._model(name) for name in self.adapters]
    return responses.JSONResponse({"object": "list", "data": listed})

  async def model(self, request: http_requests.Request):
    """Answer with the model of the requested name."""
    name = request.path_params["name"]
    self._check_model(name)
    return responses.JSONResponse(self._model(name))

  async def completions(self, request: http_requests.Request):
    """Continue texts or lists of token ids."""
    self._check_ready()
    most_bytes = self.bounds.body_bytes(self.bounds.prompts)
    body = await bodies.receive(request, self.limits, most_bytes)
    reading = _in_thread(self._read_completion, body)
    wanted, prompts, guide = await bodies.while_connected(
      request.receive, reading
    )
    has_logprobs = wanted.logprobs is not None
    return self._answer(
      request, wanted, prompts, guide, wanted.max_tokens, has_logprobs
    )

  async def chat(self, request: http_requests.Request):
    """Write the assistant's next message."""
    self._check_ready()
    most_bytes = self.bounds.body_bytes(1)
    body = await bodies.receive(request, self.limits, most_bytes)
    reading = _in_thread(self._read_chat, body)
    wanted, prompt, guide = await bodies.while_connected(
      request.receive, reading
    )
    max_tokens = wanted.max_completion_tokens or wanted.max_tokens
    return self._answer(
      request, wanted, [prompt], guide, max_tokens, wanted.logprobs
    )

  async def tokenize(self, request: http_requests.Request):
    """Answer with the token ids of a text or a chat."""
    return await self._answer_at_once(request, self._tokenized)

  async def detokenize(self, request: http_requests.Request):
    """Answer with the text of token ids."""
    return await self._answer_at_once(request, self._detokenized)

  # -- their parts ----------------------------------------------------------

  async def _answer_at_once(
    self,
    request: http_requests.Request,
    read: Callable[[bytes], dict[str, Any]],
  ) -> responses.Response:
    most_bytes = self.bounds.body_bytes(1)
    body = await bodies.receive(request, self.limits, most_bytes)
    reading = _in_thread(read, body)
    answer = await bodies.while_connected(request.receive, reading)
    return responses.JSONResponse(answer)

  def _model(self, name: str) -> dict[str, Any]:
    parent = {} if name == self.model_name else {"parent": self.model_name}
    return {
      "id": name,
      **parent,
      "object": "model",
      "created": self.created_s,
      "owned_by": "jaxrl_async",
      "max_model_len": self.queue.cache_tokens,
      "policy_version": self.queue.stats.policy_version,
    }

  def _check_model(self, name: str) -> None:
    if name not in self.adapters:
      raise errors.ApiError(
        404,
        f"model {name[:100]!r} does not exist; this server has"
        f" {', '.join(map(repr, self.adapters))}",
        param="model",
        code="model_not_found",
      )

  def _check_ready(self) -> None:
    if not self.is_ready and not self.queue.is_draining:
      raise errors.ApiError(
        503, "the server is not ready yet", headers={"retry-after": "5"}
      )

  # The next methods may take long, so they run in other threads.

  def _read_completion(
    self, body: bytes
  ) -> tuple[protocol.Completion, list[np.ndarray], guides_lib.Guide | None]:
    wanted = protocol.parse(protocol.Completion, body, self.bounds)
    self._check_model(wanted.model)
    num_prompts = len(wanted.prompts)
    self._check_count("prompt", num_prompts, "prompts")
    self._check_count("n", num_prompts * wanted.n, "choices of all prompts")
    prompts = [self.tokens(p, "prompt") for p in wanted.prompts]
    guide = None
    if (schema := wanted.response_format.schema_of_answer) is not None:
      guide = self._guide(wanted, "response_format", guided.grammar(schema))
    return wanted, prompts, guide

  def _read_chat(
    self, body: bytes
  ) -> tuple[protocol.Chat, np.ndarray, guides_lib.Guide | None]:
    wanted = protocol.parse(protocol.Chat, body, self.bounds)
    self._check_model(wanted.model)
    self._check_count("n", wanted.n, "choices of all prompts")
    tools = wanted.shown_tools
    if tools and self.tool_format is None:
      raise errors.ApiError(
        400,
        "tools: the chat template of this policy writes no known format of"
        " calls; the server has to be started with --tool_format",
        param="tools",
        code="unsupported_parameter",
      )
    return wanted, self._chat_tokens(wanted), self._guide_of_chat(wanted)

  def _chat_tokens(self, wanted: protocol.Chat) -> np.ndarray:
    """Return the prompt of a chat."""
    text = self._prompt_text(wanted.messages, wanted.shown_tools)
    return self.tokens(text, "messages")

  def _guide_of_chat(self, wanted: protocol.Chat) -> guides_lib.Guide | None:
    tools, form = wanted.shown_tools, self.tool_format or ""
    schema = wanted.response_format.schema_of_answer
    must_call = wanted.tool_choice not in ("none", "auto")
    is_strict = any(tool.function.strict for tool in tools)
    is_single = bool(tools) and not wanted.parallel_tool_calls
    may_speak = not must_call and schema is None
    if must_call:
      schema, name = None, "tool_choice"
    elif schema is not None:
      name = "response_format"
    elif is_strict or is_single:
      name = "strict" if is_strict else "parallel_tool_calls"
      if not guided.has_beginning(form):
        raise errors.ApiError(
          400,
          f"{name}: not supported where text and calls of the format {form} may"
          " alternate; use tool_choice",
          param=name,
          code="unsupported_parameter",
        )
    else:
      return None
    grammar = guided.grammar(
      schema,
      [tool.function.model_dump() for tool in tools],
      form,
      self.tokenizer,
      may_speak=may_speak,
      is_single=is_single,
    )
    return self._guide(wanted, name, grammar)

  def _guide(
    self,
    wanted: protocol.Completion | protocol.Chat,
    name: str,
    grammar: str,
  ) -> guides_lib.Guide:
    """Return the guide of a grammar, which the field of that name needs."""
    if wanted.min_tokens or wanted.ignore_eos:
      raise errors.ApiError(
        400, f"{name}: not together with min_tokens and ignore_eos", param=name
      )
    try:
      return self._guides.guide(grammar)
    except ImportError as error:
      raise errors.ApiError(
        400,
        f"{name}: this server was installed without the extra `guided`",
        param=name,
        code="unsupported_parameter",
      ) from error
    except ValueError as error:
      raise errors.ApiError(400, f"{name}: {error}", param=name) from error

  def _prompt_text(
    self,
    messages: Sequence[protocol.Message],
    tools: Sequence[protocol.Tool],
    *,
    is_prompt: bool = True,
  ) -> str:
    """Return a chat as the template writes it, all of whose parts are in it."""
    num_characters = sum(len(m.content) for m in messages)
    self.bounds.check_characters("messages", num_characters)
    given = [m.for_template() for m in messages]
    described = self._described(tools)
    try:
      self.chat_template.check(given, described, tokenizer=self.tokenizer)
      return self.chat_template.render(given, described, is_prompt=is_prompt)
    except RecursionError as error:
      raise errors.ApiError(
        400,
        "messages: arguments of a call are nested too deeply",
        param="messages",
      ) from error
    except chat_template_lib.ChatTemplateError as error:
      raise errors.ApiError(
        400, f"messages: {error}", param="messages"
      ) from error

  def _described(self, tools: Sequence[protocol.Tool]) -> list[dict[str, Any]]:
    """Return tools as chat templates take them."""
    return [
      tool.model_dump(exclude_unset=True, exclude={"function": {"strict"}})
      for tool in tools
    ]

  def _tokenized(self, body: bytes) -> dict[str, Any]:
    wanted = protocol.parse(protocol.Tokenize, body, self.bounds)
    self._check_model(wanted.model or self.model_name)
    text, name = wanted.prompt, "prompt"
    if text is None:
      name = "messages"
      text = self._prompt_text(
        wanted.messages,
        wanted.tools,
        is_prompt=wanted.add_generation_prompt,
      )
    tokens = self.tokens(text, name, wanted.add_special_tokens).tolist()
    names = [self.tokenizer.name_of(token) for token in tokens]
    return {
      "count": len(tokens),
      "max_model_len": self.queue.cache_tokens,
      "tokens": tokens,
      "token_strs": names if wanted.return_token_strs else None,
    }

  def _detokenized(self, body: bytes) -> dict[str, Any]:
    wanted = protocol.parse(protocol.Detokenize, body, self.bounds)
    self._check_model(wanted.model or self.model_name)
    self._check_ids(wanted.tokens, "tokens")
    return {"prompt": self.tokenizer.decode_all(wanted.tokens)}

  def tokens(
    self,
    prompt: str | list[int],
    name: str,
    add_special_tokens: bool | None = None,
  ) -> np.ndarray:
    """Return the token ids of a prompt, all of which are in the vocabulary.

    Args:
      prompt: a text, or token ids.
      name: the field that it is from.
      add_special_tokens: whether a text gets the special tokens that begin a
        sequence. None adds them unless the prompt is a rendered chat, which
        already contains its own.

    Raises:
      ApiError: the prompt is too long, or cannot be tokenized.
    """
    if isinstance(prompt, str):
      self.bounds.check_characters(name, len(prompt))
      try:
        if add_special_tokens is None:
          add_special_tokens = name != "messages"
        if add_special_tokens:
          return self.tokenizer.encode_prompt(prompt)
        return self.tokenizer.encode(prompt)
      except ValueError as error:
        raise errors.ApiError(400, f"{name}: {error}", param=name) from error
    self.bounds.check_tokens(name, len(prompt))
    self._check_ids(prompt, name)
    return np.asarray(prompt, np.int32)

  def _check_ids(self, tokens: list[int], name: str) -> None:
    v = self.queue.vocab_size
    if not all(0 <= token < v for token in tokens):
      raise errors.ApiError(
        400, f"{name}: token ids must be in [0, {v})", param=name
      )

  def _check_count(self, name: str, count: int, what: str) -> None:
    most = self.queue.max_choices
    if count > most:
      raise errors.ApiError(
        400, f"{name}: {count} {what}; at most {most}", param=name
      )

  def _answer(
    self,
    request: http_requests.Request,
    wanted: protocol.Completion | protocol.Chat,
    prompts: list[np.ndarray],
    guide: guides_lib.Guide | None,
    max_tokens: int | None,
    has_logprobs: bool,
  ) -> answers.Answer:
    limits = self.limits
    deadline_s = wanted.deadline_s or limits.deadline_s
    if deadline_s > limits.max_deadline_s:
      raise errors.ApiError(
        400,
        f"deadline_s: at most {limits.max_deadline_s:g}",
        param="deadline_s",
      )
    is_chat = isinstance(wanted, protocol.Chat)
    seed = wanted.seed
    if seed is None:
      seed = secrets.randbits(31)
    settings = sampling.SamplingSettings(
      temperature=wanted.temperature,
      top_k=max(wanted.top_k, 0),  # -1 disables it too
      top_p=wanted.top_p,
      min_p=wanted.min_p,
      min_tokens=wanted.min_tokens,
      end_tokens=tuple(wanted.stop_token_ids),
      ignore_eos=wanted.ignore_eos,
    )

    if max_tokens is None:
      max_tokens = max(self.queue.cache_tokens - max(map(len, prompts)), 1)
      if not is_chat:
        max_tokens = min(max_tokens, _DEFAULT_MAX_TOKENS)
    asked = client_request.Request(
      prompts=tuple(prompts),
      max_tokens=max_tokens,
      settings=settings,
      seed=seed % (client_request.MAX_SEED + 1),
      num_choices=wanted.n,
      stop_strings=wanted.stop,
      deadline_s=time.monotonic() + deadline_s,
      client="" if request.client is None else request.client.host,
      adapter=self.adapters[wanted.model],
      guide=guide,
    )
    tool_format = None
    if isinstance(wanted, protocol.Chat) and wanted.shown_tools:
      tool_format = self.tool_format
    options = wanted.stream_options
    shape = answers.Shape(
      model=wanted.model,
      is_chat=is_chat,
      prompt_tokens=[prompt.tolist() for prompt in prompts],
      num_choices=wanted.n,
      has_logprobs=has_logprobs,
      has_token_ids=wanted.return_token_ids,
      has_id_texts=wanted.return_tokens_as_token_ids,
      has_usage=options is not None and options.include_usage,
    )
    writing = self._generation(
      asked, wanted, has_token_texts=has_logprobs, tool_format=tool_format
    )
    return answers.Answer(
      writing, shape, is_stream=wanted.stream, timeout_s=deadline_s
    )

  def _generation(
    self,
    asked: client_request.Request,
    wanted: protocol.Completion | protocol.Chat,
    **options: Any,
  ) -> generation.Generation:
    """Return what writes the answer; `options` are those of a Generation."""
    del wanted  # which the servers of sessions need
    return generation.Generation(self.queue, self.tokenizer, asked, **options)


class _Door:
  """Middleware that checks the API key and counts responses."""

  def __init__(
    self, app: asgi.ASGIApp, service: Service, paths: frozenset[str]
  ):
    self._app = app
    self._service = service
    self._paths = paths

  async def __call__(
    self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
  ) -> None:
    if scope["type"] != "http":
      await self._app(scope, receive, send)
      return
    path = scope["path"] if scope["path"] in self._paths else "other"

    async def counted(message: asgi.Message) -> None:
      if message["type"] == "http.response.start":
        self._service.metrics.add_answer(path, message["status"])
      await send(message)

    given = dict(scope["headers"]).get(b"authorization", b"")
    if path != "/health" and not self._service.has_key(given):
      refusal = errors.ApiError(
        401,
        "the API key is missing or wrong; send it as authorization: Bearer …",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
      )
      await refusal.response()(scope, receive, counted)
      return
    await self._app(scope, receive, counted)


def make_app(service: Service) -> asgi.ASGIApp:
  """Return the ASGI application."""
  routes = [
    routing.Route("/health", service.health, methods=["GET"]),
    routing.Route("/metrics", service.show_metrics, methods=["GET"]),
    routing.Route("/tokenize", service.tokenize, methods=["POST"]),
    routing.Route("/detokenize", service.detokenize, methods=["POST"]),
    routing.Route("/v1/models", service.models, methods=["GET"]),
    routing.Route("/v1/models/{name:path}", service.model, methods=["GET"]),
    routing.Route("/v1/completions", service.completions, methods=["POST"]),
    routing.Route("/v1/chat/completions", service.chat, methods=["POST"]),
  ]
  app = applications.Starlette(
    routes=routes,
    exception_handlers=errors.HANDLERS,
  )
  app.router.redirect_slashes = False
  return _Door(app, service, frozenset(route.path for route in routes))
