"""Answers in OpenAI's format, sent as a whole or as a stream of events."""

import asyncio
import contextlib
import dataclasses
import json
import time
from typing import Any
import uuid

from starlette import responses
from starlette import types as asgi

from jaxrl_async import types
from jaxrl_async.serving import bodies
from jaxrl_async.serving import errors
from jaxrl_async.serving import generation
from jaxrl_async.serving import tool_calls

_GRACE_S = 30.0  # added to the deadline, for clients that read slowly
FINISH = {
  types.FinishReason.EOS: "stop",
  types.FinishReason.STOP: "stop",
  types.FinishReason.LENGTH: "length",
}
_MIN_LOGPROB = -9999.0  # OpenAI's smallest value, since JSON has no infinity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """The format of an answer.

  Attributes:
    is_chat: the objects are chat.completion instead of text_completion.
    prompt_tokens: token ids of each prompt.
    num_choices: choices per prompt.
    has_logprobs: include logprobs of the chosen tokens.
    has_token_ids: include token ids, their policy versions and the prompt's
      ids.
    has_id_texts: in logprobs, the text of a token is "token_id:" and its id.
    has_usage: end a streamed answer with token counts.
  """

  model: str
  is_chat: bool
  prompt_tokens: list[list[int]]
  num_choices: int
  has_logprobs: bool
  has_token_ids: bool
  has_id_texts: bool
  has_usage: bool
  created_s: int = dataclasses.field(default_factory=lambda: int(time.time()))
  name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)

  @property
  def count(self) -> int:
    """The number of choices of all prompts."""
    return len(self.prompt_tokens) * self.num_choices

  def whole(self, choices: list[generation.Piece]) -> dict[str, Any]:
    """Return the whole answer.

    A choice without a finish reason was cut off by the deadline.
    """
    num_written = sum(len(c.tokens) for c in choices)
    num_cached = {c.choice: c.num_cached for c in choices}
    records = [self._choice(c, is_first=True, is_whole=True) for c in choices]
    return {
      **self._head("chat.completion", choices),
      **self._prompt_of_chat(),
      "choices": records,
      "usage": self._usage(num_written, num_cached),
    }

  def event(self, piece: generation.Piece, is_first: bool) -> dict[str, Any]:
    """Return the event of one piece.

    Args:
      piece: newly written tokens of a choice.
      is_first: whether it is the first piece of its choice.
    """
    return {
      **self._head("chat.completion.chunk", [piece]),
      **(self._prompt_of_chat() if is_first else {}),
      "choices": [self._choice(piece, is_first=is_first, is_whole=False)],
      **({"usage": None} if self.has_usage else {}),
    }

  def usage_event(
    self, num_written: int, num_cached: dict[int, int]
  ) -> dict[str, Any]:
    """Return the event with the token counts, which comes last.

    Args:
      num_written: tokens of all choices.
      num_cached: of each choice, as in `generation.Piece`.
    """
    return {
      **self._head("chat.completion.chunk", []),
      "choices": [],
      "usage": self._usage(num_written, num_cached),
    }

  def _head(self, kind: str, pieces: list[generation.Piece]) -> dict[str, Any]:
    versions = [v for piece in pieces for v in piece.policy_versions]
    newest = f"policy_version={max(versions)}" if versions else None
    prefix = "chatcmpl" if self.is_chat else "cmpl"
    return {
      "id": f"{prefix}-{self.name}",
      "object": kind if self.is_chat else "text_completion",
      "created": self.created_s,
      "model": self.model,
      "system_fingerprint": newest,
    }

  def _prompt_of_chat(self) -> dict[str, Any]:
    # As with vLLM's server: completions have it in each choice.
    if not (self.is_chat and self.has_token_ids):
      return {}
    return {"prompt_token_ids": self.prompt_tokens[0]}

  def _usage(
    self, num_written: int, num_cached: dict[int, int]
  ) -> dict[str, Any]:
    # A prompt counts once, and so does what was cached of it when its first
    # choice began.
    first = range(0, self.count, self.num_choices)
    num_read = sum(map(len, self.prompt_tokens))
    return {
      "prompt_tokens": num_read,
      "completion_tokens": num_written,
      "total_tokens": num_read + num_written,
      "prompt_tokens_details": {
        "cached_tokens": sum(num_cached.get(choice, 0) for choice in first)
      },
    }

  def _choice(
    self, piece: generation.Piece, *, is_first: bool, is_whole: bool
  ) -> dict[str, Any]:
    record: dict[str, Any] = {"index": piece.choice}
    if not self.is_chat:
      record["text"] = piece.text
    else:
      calls = [tool_calls.record(call) for call in piece.calls]
      said: dict[str, Any] = {"role": "assistant"} if is_first else {}
      said["content"] = piece.text or (None if calls else "")
      if is_whole:
        said["refusal"] = None
      else:
        calls = [{"index": i, **call} for i, call in enumerate(calls)]
      if calls:
        said["tool_calls"] = calls
      record["message" if is_whole else "delta"] = said
    record["logprobs"] = self._logprobs(piece) if self.has_logprobs else None
    reason = piece.finish_reason
    record["finish_reason"] = None if reason is None else FINISH[reason]
    if piece.calls and record["finish_reason"] == "stop":
      record["finish_reason"] = "tool_calls"
    if is_whole and reason is None:
      # OpenAI's interface has no reason for a deadline; this one is the
      # closest.
      record |= {"finish_reason": "length", "stop_reason": "deadline"}
    if self.has_token_ids:
      record["token_ids"] = piece.tokens
      record["policy_versions"] = piece.policy_versions
      if is_first and not self.is_chat:
        prompt = self.prompt_tokens[piece.choice // self.num_choices]
        record["prompt_token_ids"] = prompt
    return record

  def _logprobs(self, piece: generation.Piece) -> dict[str, Any]:
    logprobs = [max(x, _MIN_LOGPROB) for x in piece.logprobs]
    texts = piece.token_texts
    if self.has_id_texts:
      texts = [f"token_id:{token}" for token in piece.tokens]
    if not self.is_chat:
      return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": None,
        "text_offset": piece.offsets,
      }
    content = [
      {
        "token": text,
        "logprob": logprob,
        "bytes": list(own),
        "top_logprobs": [],
      }
      for text, own, logprob in zip(
        texts, piece.token_bytes, logprobs, strict=True
      )
    ]
    return {"content": content, "refusal": None}


class Answer(responses.Response):
  """A response that generates while its client is connected.

  An error before the first token has an HTTP status of its own. A later error
  is the last event of the stream. If the deadline passes during a whole answer,
  the answer holds what was written until then.
  """

  def __init__(
    self,
    writing: generation.Generation,
    shape: Shape,
    *,
    is_stream: bool,
    timeout_s: float,
  ):
    """Prepare an answer; nothing is generated before it is called.

    Args:
      writing: the request.
      shape: the format of the answer.
      is_stream: whether to send events as they come, or the whole at the end.
      timeout_s: time until the request's deadline.
    """
    self._writing = writing
    self._shape = shape
    self._is_stream = is_stream
    self._timeout_s = timeout_s + _GRACE_S
    self.background = None

  async def __call__(
    self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
  ) -> None:
    """Send the answer, and free its slots however that ends."""
    self._writing.submit()
    respond = self._stream if self._is_stream else self._send_whole
    try:
      async with asyncio.timeout(self._timeout_s):
        with contextlib.suppress(bodies.Gone):
          await bodies.while_connected(receive, respond(scope, receive, send))
    finally:
      self._writing.cancel()

  async def _send_whole(
    self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
  ) -> None:
    choices = [generation.Piece(choice=i) for i in range(self._shape.count)]
    try:
      while (piece := await self._writing.next()) is not None:
        choices[piece.choice].extend(piece)
    except generation.Late:
      if not any(choice.tokens for choice in choices):
        raise
      for choice in choices:
        if choice.finish_reason is None:
          self._writing.finish(choice)
    whole = self._shape.whole(choices)
    await responses.Response(_dumps(whole), media_type="application/json")(
      scope, receive, send
    )

  async def _stream(
    self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send
  ) -> None:
    del scope, receive
    # An error here still gets a status of its own.
    piece = await self._writing.next()
    await send(
      {
        "type": "http.response.start",
        "status": 200,
        "headers": [
          (b"content-type", b"text/event-stream; charset=utf-8"),
          (b"cache-control", b"no-cache"),
        ],
      }
    )

    async def send_event(text: str, is_last: bool = False) -> None:
      body = f"data: {text}\n\n".encode()
      await send(
        {
          "type": "http.response.body",
          "body": body,
          "more_body": not is_last,
        }
      )

    num_cached: dict[int, int] = {}  # of the choices that have begun
    num_written = 0
    try:
      while piece is not None:
        num_written += len(piece.tokens)
        is_first = piece.choice not in num_cached
        num_cached[piece.choice] = piece.num_cached
        await send_event(_dumps(self._shape.event(piece, is_first)))
        piece = await self._writing.next()
    except errors.ApiError as error:
      await send_event(_dumps(error.body()), is_last=True)
      return
    if self._shape.has_usage:
      usage = self._shape.usage_event(num_written, num_cached)
      await send_event(_dumps(usage))
    await send_event("[DONE]", is_last=True)


def _dumps(value: Any) -> str:
  return json.dumps(value, allow_nan=False, separators=(",", ":"))
