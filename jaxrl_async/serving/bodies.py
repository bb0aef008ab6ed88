"""Bodies of requests: bounded while they arrive, and read off the event loop.

What a body may be is bounded by what the engine could hold at most, before
anything of it is parsed. So no body takes longer than some tenths of a second,
and none of that on the thread that answers everybody.
"""

import asyncio
from collections.abc import Callable
from concurrent import futures
import dataclasses
import functools
import json
from typing import Any, TypeVar

import pydantic_core
from starlette import requests as http_requests

from jaxrl_async.serving import errors

_BESIDES_BYTES = 1 << 16  # what is neither prompt nor message
_MESSAGE_BYTES = 64  # a message around its text, or a token id and its comma
_CHARACTER_BYTES = 12  # \ud83d\ude00
_SHORT_BYTES = 1 << 13
_MOST_LONG = 16  # long bodies that wait to be read

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
  """What one client may ask for.

  Attributes:
    deadline_s: of a request that names none.
    max_deadline_s: the latest that one may name.
    max_body_bytes: larger bodies get a 413, and smaller ones too that hold
      more than the engine could; see `Bounds`.
    body_timeout_s: slower ones a 408.
  """

  deadline_s: float = 120.0
  max_deadline_s: float = 600.0
  max_body_bytes: int = 1 << 20
  body_timeout_s: float = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
  """The most that could fit into the engine's cache.

  Attributes:
    tokens: of a prompt, or of a chat; every message is at least one.
    prompts: of a request.
    characters: of a prompt, where each of its tokens is the longest there is.
    max_body_bytes: of any request.
  """

  tokens: int
  prompts: int
  characters: int
  max_body_bytes: int

  def body_bytes(self, num_prompts: int) -> int:
    """The largest body that so many prompts could need, spelt at length."""
    prompt = self.tokens * _MESSAGE_BYTES + self.characters * _CHARACTER_BYTES
    return min(self.max_body_bytes, _BESIDES_BYTES + num_prompts * prompt)

  def check_characters(self, name: str, num_characters: int) -> None:
    """Refuses a text that cannot fit, however it is cut into tokens.

    Raises:
      ApiError: it names the field.
    """
    if num_characters > self.characters:
      raise self._too_long(name, f"{num_characters} characters")

  def check_tokens(self, name: str, num_tokens: int) -> None:
    """Likewise of token ids."""
    if num_tokens >= self.tokens:
      raise self._too_long(name, f"{num_tokens} tokens")

  def check_messages(self, num_messages: int) -> None:
    """Likewise of a chat's messages."""
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
  """The body of a POST.

  Raises:
    ApiError: it is not JSON by its own account, too large or too slow.
  """
  kind = request.headers.get("content-type", "").partition(";")[0]
  if kind.strip().lower() != "application/json":
    raise errors.ApiError(
      415, "send the body as content-type: application/json"
    )
  too_large = errors.ApiError(413, f"the body has more than {most_bytes} bytes")
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
    raise errors.ApiError(400, "the client went away") from None
  return bytes(body)


def from_json(data: bytes) -> Any:
  """The value of a JSON text.

  Raises:
    ApiError: it is none, or an object has two fields of the same name, of
      which every parser would drop one.
  """
  try:
    value = pydantic_core.from_json(data, allow_inf_nan=False)
    # The strict parser above does not tell of equal names, this one does.
    json.loads(data, object_pairs_hook=_only_different_names)
  except ValueError as error:
    raise errors.ApiError(
      400, f"the body is not JSON: {error}", code="invalid_json"
    ) from None
  return value


def _only_different_names(pairs: list[tuple[str, Any]]) -> None:
  if len({name for name, _ in pairs}) < len(pairs):
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    raise errors.ApiError(
      400,
      f"{twice[:100]}: is there more than once",
      param=twice[:100],
      code="duplicate_field",
    )


class Reader:
  """Two threads in which bodies are parsed and texts made tokens.

  Long ones have a thread of their own, so that short ones do not wait for them,
  and one alone, so that they take no more than a core between them.

  Threads: belongs to the event loop of the server.
  """

  def __init__(self):
    self._short = futures.ThreadPoolExecutor(1, "short bodies")
    self._long = futures.ThreadPoolExecutor(1, "long bodies")
    self._num_long = 0

  async def run(
    self, size: int, function: Callable[..., Result], *arguments: Any
  ) -> Result:
    """Calls a function in one of the threads.

    Args:
      size: bytes or characters that it reads.
      function: raises what the caller is to see.
      *arguments: of the function.

    Raises:
      ApiError: too many long ones wait already.
    """
    call = functools.partial(function, *arguments)
    loop = asyncio.get_running_loop()
    if size <= _SHORT_BYTES:
      return await loop.run_in_executor(self._short, call)
    if self._num_long >= _MOST_LONG:
      raise errors.ApiError(
        429,
        f"too many requests: {self._num_long} long ones are waiting to be read",
        code="queue_full",
        headers={"retry-after": "1"},
      )
    self._num_long += 1
    try:
      return await loop.run_in_executor(self._long, call)
    finally:
      self._num_long -= 1
