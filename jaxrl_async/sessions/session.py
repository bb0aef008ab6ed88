"""The session of one agent: its calls, and the contexts that they continue.

A call arrives as the tokens of its whole prompt. If these begin with the tokens
of the branch that goes on, what the policy wrote included, only the rest is
shown to the policy. Otherwise a new branch begins. In both cases what the
policy wrote in earlier calls stays token for token as it was: the messages of a
chat are compared, and only those that follow are rendered and tokenized.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
import contextlib
import dataclasses
import json
import secrets
from typing import Any

import numpy as np

from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.serving import client_request
from jaxrl_async.serving import generation
from jaxrl_async.serving import requests as requests_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.types import Reward

_MARK = "qzwrittenzq"
_CLOSE_S = 5.0

# Starts the agent; the coroutine returns its reward, or None.
Start = Callable[["Session"], Coroutine[Any, Any, Reward | None]]


class AgentError(RuntimeError):
  """The agent failed, or does not do again what it did before."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
  request: client_request.Request
  on_update: Callable[[client_request.Update], None]

  def refuse(self, error: client_request.RequestError) -> None:
    nothing = np.zeros(0)
    self.on_update(
      client_request.Update(
        choice=0,
        tokens=nothing.astype(np.int32),
        logprobs=nothing.astype(np.float32),
        policy_versions=nothing.astype(np.int32),
        error=error,
      )
    )

  def answer(self, written: episode_lib.Written) -> None:
    self.on_update(
      client_request.Update(
        choice=0,
        tokens=written.tokens,
        logprobs=written.logprobs,
        policy_versions=written.policy_versions,
        num_cached=min(written.num_cached, len(self.request.prompt_of(0))),
        finish_reason=written.finish_reason,
      )
    )


class Queue(requests_lib.RequestQueue):
  """Passes the requests of an agent to its session instead of an engine."""

  def __init__(self, session: "Session", *, vocab_size: int):
    """Accept requests whose prompt and completion fit into a branch."""
    super().__init__(
      session.tokenizer,
      max_waiting=1,
      cache_tokens=session.limit,
      vocab_size=vocab_size,
      max_choices=1,
    )
    self.stats.policy_version = 0
    self._session = session

  def submit(
    self,
    request: client_request.Request,
    on_update: Callable[[client_request.Update], None],
  ) -> requests_lib.Handle:
    """Let the session answer a request, after those before it."""
    call = _Call(request, on_update)
    if self._session.is_over:
      call.refuse(client_request.RequestError.OVER)
    else:
      self._session.calls.put_nowait(call)
    return requests_lib.Handle(0, request, on_update)

  def cancel(self, handle: requests_lib.Handle) -> None:
    """Do nothing: what was begun is written, and learned from."""


class Session:
  """The calls of one agent.

  Threads: all methods belong to the event loop of the episodes, except
  `prompt_of` and `said`, which only one call at a time may use.

  Attributes:
    name: part of the address of the session.
    key: that its calls have to carry.
    calls: those that were not looked at yet.
    is_over: whether no further call is answered.
  """

  def __init__(
    self,
    start: Start,
    *,
    tokenizer: tokenizer_lib.Tokenizer,
    template: chat_template_lib.ChatTemplate,
    limit: int,
    max_turns: int = 0,
  ):
    """Create a session whose agent starts with the first call of `next_call`.

    Args:
      start: starts the agent.
      tokenizer: of the policy.
      template: of the policy.
      limit: most tokens of a branch.
      max_turns: further calls are refused; 0 is any number.
    """
    self.name = secrets.token_hex(8)
    self.key = secrets.token_urlsafe(24)
    self.tokenizer = tokenizer
    self.template = template
    self.limit = limit
    self.calls: asyncio.Queue[_Call] = asyncio.Queue()
    self.is_over = False
    self._start = start
    self._max_turns = max_turns
    self._agent: asyncio.Task[Reward | None] | None = None
    # Steps that the record has and the agent has not gone through yet.
    self._ahead: list[tuple[dict[str, Any], episode_lib.Written]] = []
    self._pending: _Call | None = None
    self._tokens = np.zeros(0, np.int32)  # of the branch that goes on
    self._num_turns = 0
    self._num_branches = 1
    self._contexts: list[tuple[str, list[str], np.ndarray]] = []
    self._texts: dict[str, str] = {}  # of messages: chats repeat them
    self._reward: Reward | None = None

  # -- the episode ----------------------------------------------------------

  async def next_call(self) -> dict[str, Any]:
    """Wait for the next call of the agent, or for its end.

    Returns:
      The `tokens` to show, whether they begin a new branch (`is_anew`), and
      what the call says of its answer (`ends`), as arguments of
      `episode.Until`. At the end only the `reward`, or None if the agent gave
      none, and its `parts`.

    Raises:
      AgentError: the agent failed, or an agent that was started again asked
        something else than is recorded.
    """
    if self._agent is None:
      self._agent = asyncio.create_task(self._run())
    while True:
      call = await self._next_or_end(self._agent)
      if call is None:
        if self._ahead:
          raise AgentError("the agent, started again, ended earlier")
        self.is_over = True
        given = self._agent.result() or self._reward
        if given is None:
          return {"reward": None, "parts": {}}
        return {"reward": given.score, "parts": dict(given.parts)}
      step = self._step(call)
      if step is None:
        continue
      if not self._ahead:
        self._pending = call
        return step
      recorded, written = self._ahead.pop(0)
      if recorded != step:
        raise AgentError("the agent, started again, asked something else")
      self._follow(step, written)
      call.answer(written)

  def wrote(self, step: dict[str, Any], written: episode_lib.Written) -> None:
    """Answer the call of a step with what the policy has written."""
    if self._pending is None:  # the step is from the record
      self._ahead.append((step, written))
      return
    self._follow(step, written)
    self._pending.answer(written)
    self._pending = None

  async def close(self) -> None:
    """End the agent, and refuse what it still asks."""
    self.is_over = True
    calls = [] if self._pending is None else [self._pending]
    while not self.calls.empty():
      calls.append(self.calls.get_nowait())
    for call in calls:
      call.refuse(client_request.RequestError.OVER)
    if self._agent is not None:
      self._agent.cancel()
      await asyncio.wait([self._agent], timeout=_CLOSE_S)
      if self._agent.done() and not self._agent.cancelled():
        self._agent.exception()  # nobody waits for it any more

  async def _run(self) -> Reward | None:
    try:
      return await self._start(self)
    except (SystemExit, KeyboardInterrupt) as error:
      # These would end the event loop, with all other episodes.
      raise AgentError(f"the agent raised {error!r:.200}") from error

  async def _next_or_end(self, agent: asyncio.Task) -> _Call | None:
    getting = asyncio.create_task(self.calls.get())
    try:
      await asyncio.wait([getting, agent], return_when="FIRST_COMPLETED")
      if getting.done():
        return getting.result()
    finally:
      getting.cancel()
    if not agent.cancelled() and (error := agent.exception()) is not None:
      raise AgentError(_line(error)) from error
    return None

  def _step(self, call: _Call) -> dict[str, Any] | None:
    """Return what a call shows the policy; None if it was refused."""
    prompt = call.request.prompt_of(0)
    num_known = len(self._tokens)
    is_anew = num_known > 0 and not (
      len(prompt) > num_known
      and np.array_equal(prompt[:num_known], self._tokens)
    )
    if self.is_over or (self._max_turns and self._num_turns >= self._max_turns):
      call.refuse(client_request.RequestError.OVER)
    elif is_anew and self._num_branches >= episode_lib.MAX_BRANCHES:
      call.refuse(client_request.RequestError.OVER)
    else:
      shown = prompt if is_anew else prompt[num_known:]
      return {
        "tokens": shown.tolist(),
        "is_anew": is_anew,
        "ends": self._ends(call.request),
      }
    return None

  def _ends(self, request: client_request.Request) -> dict[str, Any]:
    """Return what a request says of its answer, besides what holds for each."""
    room = self.limit - len(request.prompt_of(0))
    ends = {
      "max_tokens": request.max_tokens if request.max_tokens < room else 0,
      "stop": list(request.stop_strings),
      "stop_token_ids": list(request.settings.end_tokens),
      "guide": "" if request.guide is None else request.guide.grammar,
    }
    return {name: value for name, value in ends.items() if value}

  def _follow(self, step: dict[str, Any], written: episode_lib.Written) -> None:
    before = self._tokens[:0] if step["is_anew"] else self._tokens
    shown = np.array(step["tokens"], np.int32)
    self._tokens = np.concatenate([before, shown, written.tokens])
    self._num_branches += step["is_anew"]
    self._num_turns += 1

  # -- the server -----------------------------------------------------------

  def give_reward(self, reward: float) -> None:
    """Take the reward that a call brings, which ends the session."""
    self._reward = Reward(score=reward)
    self.is_over = True

  def prompt_of(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]
  ) -> np.ndarray | None:
    """Return the prompt of a chat that continues an earlier call.

    Args:
      messages: of the chat, as templates take them.
      tools: that the policy may call.

    Returns:
      None if it continues none, so that it has to be rendered whole.
    """
    described = json.dumps(tools, sort_keys=True)
    found, context = 0, np.zeros(0, np.int32)
    compared = [_compared(message) for message in messages]
    for of, known, tokens in self._contexts:
      count = len(known)
      if of == described and found < count < len(compared):
        if compared[:count] == known:
          found, context = count, tokens
    if not found:
      return None
    # What the policy wrote may be any text, and is not rendered again.
    written = {"role": "assistant", "content": _MARK}
    marked = [
      written
      if number < found and message.get("role") == "assistant"
      else message
      for number, message in enumerate(messages)
    ]
    try:
      self.template.check(marked, tools, tokenizer=self.tokenizer)
      text = self.template.render(marked, tools)
    except chat_template_lib.ChatTemplateError:
      return None
    _, mark, after = text.rpartition(_MARK)
    if not mark:
      return None
    more = self.tokenizer.encode(after)
    ends = self.tokenizer.end_tokens
    last = int(context[-1])
    is_ended = last in ends and len(more) > 0 and int(more[0]) in ends
    if is_ended or (len(more) and last == int(more[0])):
      more = more[1:]  # the policy has written the end of its turn itself
    return np.concatenate([context, more])

  def said(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    prompt: np.ndarray,
    piece: generation.Piece,
  ) -> None:
    """Keep a chat with its answer, which later calls may continue.

    Args:
      messages: of the chat.
      tools: that the policy could call.
      prompt: of the call.
      piece: the answer.
    """
    answer: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.calls:
      answer["tool_calls"] = [
        {"function": {"name": call.name, "arguments": call.arguments}}
        for call in piece.calls
      ]
    known = [
      self._texts.setdefault(text, text)
      for text in map(_compared, [*messages, answer])
    ]
    tokens = np.concatenate([prompt, np.array(piece.tokens, np.int32)])
    self._contexts.append((json.dumps(tools, sort_keys=True), known, tokens))


def _compared(message: Mapping[str, Any]) -> str:
  """Return a text that is equal for messages that mean the same."""
  meant = dict(message)
  if message.get("role") == "assistant":
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    meant = {
      "role": "assistant",
      "content": (message.get("content") or "").strip(),
      "calls": [(c["name"], _arguments(c["arguments"])) for c in calls],
    }
  return json.dumps(meant, sort_keys=True)


def _arguments(value: Any) -> Any:
  if isinstance(value, str):
    with contextlib.suppress(ValueError):
      return json.loads(value)
  return value


def _line(error: BaseException) -> str:
  message = str(error).strip().partition("\n")[0]
  if isinstance(error, AgentError):
    return message
  return f"the agent raised {type(error).__name__}: {message}".rstrip(": ")
