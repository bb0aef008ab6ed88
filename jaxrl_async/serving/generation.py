"""The completions of one request, passed from the engine to a coroutine."""

import asyncio
import contextlib
import dataclasses
import re
import time

from jaxrl_async import types
from jaxrl_async.serving import client_request
from jaxrl_async.serving import errors
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.serving import tool_calls
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.tools import formats

_GRACE_S = 1.0  # time for the engine's thread to report a passed deadline


@dataclasses.dataclass(kw_only=True, slots=True)
class Piece:
  """Newly written tokens and text of one choice.

  Attributes:
    choice: index among all choices of the answer.
    text: text to show; it may lag behind the tokens.
    calls: calls of tools, in the last piece of the choice.
    tokens, logprobs, policy_versions: one entry per token.
    token_texts, token_bytes, offsets: the text that became certain with each
      token, so that they join to the text of all; the bytes that it stands for;
      and the number of characters before it. A token that is not shown has its
      name. They are empty unless requested.
    num_cached: tokens of its prompt that did not have to be prefilled.
    finish_reason: set in the last piece of the choice.
  """

  choice: int
  text: str = ""
  calls: list[formats.Call] = dataclasses.field(default_factory=list)
  tokens: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  policy_versions: list[int] = dataclasses.field(default_factory=list)
  token_texts: list[str] = dataclasses.field(default_factory=list)
  token_bytes: list[bytes] = dataclasses.field(default_factory=list)
  offsets: list[int] = dataclasses.field(default_factory=list)
  num_cached: int = 0
  finish_reason: types.FinishReason | None = None

  def extend(self, more: "Piece") -> None:
    """Append the next piece of the same choice."""
    self.text += more.text
    self.calls += more.calls
    self.tokens += more.tokens
    self.logprobs += more.logprobs
    self.policy_versions += more.policy_versions
    self.token_texts += more.token_texts
    self.token_bytes += more.token_bytes
    self.offsets += more.offsets
    self.num_cached = more.num_cached
    self.finish_reason = more.finish_reason


class _Choice:
  """Turns the updates of one choice into pieces."""

  def __init__(
    self,
    index: int,
    tokenizer: tokenizer_lib.Tokenizer,
    request: client_request.Request,
    has_token_texts: bool,
    tool_format: str | None,
  ):
    self._index = index
    self._calls = None
    if tool_format is not None:
      marks = formats.FORMATS[tool_format].marks
      tokenizer = tokenizer.showing(marks)
      self._calls = tool_calls.CallText(tool_format)
    self._tokenizer = tokenizer
    self._shown = stop_strings.CompletionText(
      tokenizer,
      request.stop_strings,
      min_tokens=request.settings.min_tokens,
    )
    self._whole = stop_strings.TokenText(tokenizer) if has_token_texts else None
    self._num_characters = 0

  def piece(self, update: client_request.Update) -> Piece:
    """Return the piece that an update adds."""
    tokens = update.tokens.tolist()
    text = self._shown.add(tokens)
    piece = Piece(
      choice=self._index,
      text=text if self._calls is None else self._calls.add(text),
      tokens=tokens,
      logprobs=update.logprobs.tolist(),
      policy_versions=update.policy_versions.tolist(),
      num_cached=update.num_cached,
      finish_reason=update.finish_reason,
    )
    if self._whole is not None:
      for token in tokens:
        self._add_token(self._whole, piece, token)
    if update.finish_reason is not None:
      self.finish(piece)
    return piece

  def finish(self, piece: Piece) -> None:
    """Add the text that was not shown yet; no more tokens will follow."""
    text = self._shown.finish()
    if self._calls is not None:
      text, piece.calls = self._calls.finish(text)
    piece.text += text
    if self._whole is not None and piece.tokens:
      rest = self._whole.finish()
      shown = [i for i, t in enumerate(piece.tokens) if self._is_shown(t)]
      if shown:
        piece.token_texts[shown[-1]] += rest
      else:
        piece.token_texts[0] = rest + piece.token_texts[0]

  def _is_shown(self, token: int) -> bool:
    return self._tokenizer.is_shown(token)

  def _add_token(
    self, whole: stop_strings.TokenText, piece: Piece, token: int
  ) -> None:
    piece.offsets.append(self._num_characters)
    undecided = whole.pending()  # the text of bytes before it
    text = whole.add([token])
    self._num_characters += len(text)
    own = self._tokenizer.bytes_of(token)
    if not self._is_shown(token):
      text = self._tokenizer.name_of(token)
      own = text.encode()
    elif own is None:
      own = text[len(undecided) :].encode()
    piece.token_texts.append(text)
    piece.token_bytes.append(own)


class Generation:
  """One request as a stream of pieces.

  Threads: everything belongs to the server's event loop, except `_receive`,
  which the engine's thread calls.
  """

  def __init__(
    self,
    queue: requests_lib.RequestQueue,
    tokenizer: tokenizer_lib.Tokenizer,
    request: client_request.Request,
    *,
    has_token_texts: bool,
    tool_format: str | None = None,
  ):
    """Prepare a request; `submit` queues it.

    Args:
      queue: of the owner of the scheduler.
      tokenizer: of the policy.
      request: what the client asks for.
      has_token_texts: whether pieces hold the text of each token by itself.
      tool_format: how the policy writes calls of tools, if it may call any.
    """
    self._queue = queue
    self._request = request
    self._handle: requests_lib.Handle | None = None
    self._updates: asyncio.Queue[client_request.Update] = asyncio.Queue()
    self._loop = asyncio.get_running_loop()
    self._tokenizer = tokenizer
    self._has_token_texts = has_token_texts
    self._tool_format = tool_format
    self._choices: list[_Choice] = []
    self._num_unfinished = request.all_choices

  def submit(self) -> None:
    """Queue the request.

    Raises:
      ApiError: there is no room for it, the server is shutting down, or the
        request can never be served.
    """
    try:
      self._queue.check(self._request)
      self._choices = [
        _Choice(
          index,
          self._tokenizer,
          self._request,
          self._has_token_texts,
          self._tool_format,
        )
        for index in range(self._request.all_choices)
      ]
      self._handle = self._queue.submit(self._request, self._receive)
    except ValueError as error:
      raise _bad_request(error) from error
    except client_request.QueueFull as error:
      raise errors.ApiError(
        429,
        f"too many requests: {error}",
        code="queue_full",
        headers={"retry-after": "1"},
      ) from error
    except client_request.Draining as error:
      raise _shutting_down() from error

  def cancel(self) -> None:
    """Cancel the choices that still run; do nothing if all have ended."""
    if self._handle is not None:
      self._queue.cancel(self._handle)

  async def next(self) -> Piece | None:
    """Return the next piece, or None after the last piece of all choices.

    Raises:
      ApiError: the server cannot continue.
    """
    if not self._num_unfinished:
      return None
    # The engine's thread ends requests at their deadline, unless it is paused.
    left_s = self._request.deadline_s - time.monotonic()
    try:
      # `asyncio.wait_for` is not used: it may lose a cancellation on Python
      # 3.11.
      async with asyncio.timeout(left_s + _GRACE_S):
        update = await self._updates.get()
    except TimeoutError:
      raise Late() from None
    if update.error == client_request.RequestError.DEADLINE:
      raise Late()
    if update.error == client_request.RequestError.SHUT_DOWN:
      raise _shutting_down()
    if update.error == client_request.RequestError.OVER:
      raise over()
    if update.error is not None:
      raise errors.ApiError(500, update.error)
    piece = self._choices[update.choice].piece(update)
    self._num_unfinished -= piece.finish_reason is not None
    return piece

  def finish(self, piece: Piece) -> None:
    """Add to a choice the text that was not shown yet.

    Call this only when no more tokens of the choice will follow.
    """
    self._choices[piece.choice].finish(piece)

  def _receive(self, update: client_request.Update) -> None:
    with contextlib.suppress(RuntimeError):  # the server's loop has ended
      self._loop.call_soon_threadsafe(self._updates.put_nowait, update)


class Late(errors.ApiError):
  """The deadline passed before the request was finished."""

  def __init__(self):
    super().__init__(
      504,
      "the request's deadline passed before it was finished (deadline_s)",
      code="deadline_exceeded",
      # The official client would otherwise repeat a request that took too long.
      headers={"x-should-retry": "false"},
    )


def _shutting_down() -> errors.ApiError:
  return errors.ApiError(
    503, "the server is shutting down", headers={"retry-after": "10"}
  )


def over() -> errors.ApiError:
  """Return the refusal of a call to a session that answers none any more."""
  return errors.ApiError(
    403, client_request.RequestError.OVER, code="session_over"
  )


def _bad_request(error: ValueError) -> errors.ApiError:
  """Return the response to an error of the form "<field>: <why>".

  "<field> is <value>; <why>" is understood as well.
  """
  text = str(error)
  named = re.match(r"(\w+)(:| is )", text)
  if "end token" in text:
    param = "stop_token_ids"
  else:
    param = named[1] if named else None
  is_long = isinstance(error, client_request.TooLong)
  return errors.ApiError(
    400,
    text,
    param=param,
    code="context_length_exceeded" if is_long else None,
  )
