"""Request bodies: bounded while they arrive, and parsed off the event loop.

The size of a body is bounded by what the engine could hold, before any of it is
parsed. Parsing takes time in proportion to the size, and none of it on the
thread that serves all clients. What a client has sent is dropped when the
client goes away.
"""

import asyncio
from collections.abc import Coroutine
import dataclasses
import json
from typing import Any, TypeVar

import pydantic_core
from starlette import requests as http_requests
from starlette import types as asgi

from jaxrl_async.serving import errors

_BESIDES_BYTES = 1 << 16  # for everything but prompts and messages
# The JSON around a message's text, or a token id and its comma.
_MESSAGE_BYTES = 64
_CHARACTER_BYTES = 12  # \ud83d\ude00

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
  """Limits on the requests of one client.

  Attributes:
    deadline_s: deadline of requests that set none.
    max_deadline_s: longest deadline that a request may set.
    max_body_bytes: larger bodies get a 413. So do smaller bodies that hold more
      than the engine could, see `Bounds`.
    body_timeout_s: bodies that take longer to arrive get a 408.
  """

  deadline_s: float = 120.0
  max_deadline_s: float = 600.0
  max_body_bytes: int = 1 << 20
  body_timeout_s: float = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
  """Bounds on what could fit into the engine's cache.

  Attributes:
    tokens: tokens of a prompt or of a chat, where every message has at least
      one.
    prompts: prompts of a request.
    characters: characters of a prompt in which every token is the longest of
      the vocabulary.
    max_body_bytes: bytes of any request.
  """

  tokens: int
  prompts: int
  characters: int
  max_body_bytes: int

  def body_bytes(self, num_prompts: int) -> int:
    """Return the largest body that this many prompts could need.

    All characters are assumed to be escaped.
    """
    prompt = self.tokens * _MESSAGE_BYTES + self.characters * _CHARACTER_BYTES
    return min(self.max_body_bytes, _BESIDES_BYTES + num_prompts * prompt)

  def check_characters(self, name: str, num_characters: int) -> None:
    """Refuse a text that cannot fit, however it is tokenized.

    Raises:
      ApiError: the text is too long; the message names the field.
    """
    if num_characters > self.characters:
      raise self._too_long(name, f"{num_characters} characters")

  def check_tokens(self, name: str, num_tokens: int) -> None:
    """Refuse a list of token ids that cannot fit.

    Raises:
      ApiError: the list is too long; the message names the field.
    """
    if num_tokens >= self.tokens:
      raise self._too_long(name, f"{num_tokens} tokens")

  def check_messages(self, num_messages: int) -> None:
    """Refuse a chat with more messages than could fit.

    Raises:
      ApiError: there are too many messages.
    """
    if num_messages >= self.tokens:
      raise self._too_long("messages", f"{num_messages} messages")

  def _too_long(self, name: str, amount: str) -> errors.ApiError:
    return errors.ApiError(
      400,
      f"{name}: {amount} and a completion do not fit into {self.tokens} tokens",
      param=name,
      code="context_length_exceeded",
    )


async def receive(
  request: http_requests.Request, limits: Limits, most_bytes: int
) -> bytes:
  """Receive the body of a POST.

  Args:
    request: its headers have been read.
    limits: for the time until the body has arrived.
    most_bytes: largest allowed body.

  Raises:
    ApiError: the content type is not JSON, or the body is too large or too
      slow.
  """
  kind = request.headers.get("content-type", "").partition(";")[0]
  if kind.strip().lower() != "application/json":
    raise errors.ApiError(
      415, "send the body as content-type: application/json"
    )
  too_large = errors.ApiError(
    413,
    f"the body has more than {most_bytes} bytes",
    code="context_length_exceeded",
  )
  length = request.headers.get("content-length", "0")
  if not length.isdecimal() or int(length[:20]) > most_bytes:
    raise too_large
  body = bytearray()
  try:
    async with asyncio.timeout(limits.body_timeout_s):
      async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
          raise too_large
  except TimeoutError:
    raise errors.ApiError(
      408,
      f"the body did not arrive within {limits.body_timeout_s:g} s",
      headers={"connection": "close"},
    ) from None
  except http_requests.ClientDisconnect:
    raise Gone() from None
  return bytes(body)


class Gone(errors.ApiError):
  """The client has disconnected, so nobody will read this."""

  def __init__(self):
    super().__init__(400, "the client disconnected")


async def while_connected(
  receive: asgi.Receive, work: Coroutine[Any, Any, Result]
) -> Result:
  """Run `work` to its end, or until the client disconnects.

  Args:
    receive: of a request whose body has been received.
    work: is cancelled when the client disconnects.

  Raises:
    Gone: the client has disconnected.
  """

  async def disconnected():
    while (await receive())["type"] != "http.disconnect":
      pass

  working = asyncio.ensure_future(work)
  watching = asyncio.ensure_future(disconnected())
  try:
    await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
      raise Gone()
    return working.result()
  finally:
    working.cancel()
    watching.cancel()
    await asyncio.wait({working, watching})


def from_json(data: bytes) -> Any:
  """Parse a JSON text.

  Raises:
    ApiError: it is not JSON, or an object has two fields of the same name, of
      which every parser would drop one.
  """
  try:
    value = pydantic_core.from_json(data, allow_inf_nan=False)
    # The strict parser above does not report repeated names, but this one does.
    json.loads(data, object_pairs_hook=_only_different_names)
  except ValueError as error:
    raise errors.ApiError(
      400, f"the body is not JSON: {error}", code="invalid_json"
    ) from None
  return value


def _only_different_names(pairs: list[tuple[str, Any]]) -> None:
  seen = set()
  for name, _ in pairs:
    if name in seen:
      raise errors.ApiError(
        400,
        f"{name[:100]}: appears more than once",
        param=name[:100],
        code="duplicate_field",
      )
    seen.add(name)
