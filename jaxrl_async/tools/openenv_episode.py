"""The episode `openenv`: an environment of OpenEnv, behind its server.

Each trajectory has a session of its own, which is a WebSocket of the package's
client. The package cannot be installed beside `mcp` 2, so it has no extra; see
docs/how-to/environments.md.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
import contextlib
import json
from typing import Any

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.tools import calls
from jaxrl_async.tools import replies
from jaxrl_async.types import Prompt

try:
  from openenv.core import generic_client  # pyright: ignore[reportMissingImports]
except ImportError as error:
  raise sections.ConfigError(
    f"the package openenv cannot be imported ({error});"
    " docs/how-to/environments.md"
    " says how to install it"
  ) from error

_MAX_MIB = 16.0  # of an answer; no result of a call may be larger
_INVALID = "(code: VALIDATION_ERROR)"
_CLOSE_S = 4.0  # less than an episode has for its end

# What is shown, the reward or None, and whether the episode is over.
Answer = list[Any]


class OpenEnvError(RuntimeError):
  """A server has answered what cannot be used."""


async def play(
  prompt: Prompt,
  context: Any,
  *,
  url: str,
  action: str = "",
  observation: str = "",
  reset: Mapping[str, str] | None = None,
  first: str = "{observation}\n",
  then: str = "\n{observation}\n",
  max_observation_tokens: int = 512,
  timeout_s: float = 60.0,
) -> AsyncGenerator[np.ndarray, np.ndarray]:
  """Show observations after the prompt, and take completions as actions.

  The reward of a step is that of the turn, and a reward of reset that of the
  first turn. The trajectory ends when the environment is done, or if an
  observation does not fit into its budget.

  Args:
    prompt: what is shown before the first observation.
    context: a `rollout.episode.Context`.
    url: of the server.
    action: the field of the action that is the completion, stripped; without
      it a completion is the whole action, a JSON object.
    observation: the field of the observation that is shown; without it the
      whole observation is shown as JSON.
    reset: arguments of reset: their names, and the entries of the item that
      they are.
    first: how the first observation is shown, for `str.format`.
    then: how the others are shown. Both may have special tokens, those of
      observations are taken out.
    max_observation_tokens: of one observation; what is longer is cut.
    timeout_s: of each answer.
  """
  tokenizer = context.tokenizer
  safe = replies.Replies(tokenizer, None).safe

  def shown(form: str, answer: Answer) -> np.ndarray:
    text = safe(answer[0], max_observation_tokens)
    return tokenizer.encode(form.format(observation=text))

  session = Session(
    url,
    observation,
    max_characters=max_observation_tokens * tokenizer.max_token_characters,
    timeout_s=timeout_s,
  )
  try:
    arguments = {name: _entry(prompt, of) for name, of in (reset or {}).items()}
    answer = await session.asked(context, ["reset", arguments])
    if answer[2]:
      raise OpenEnvError("the environment is done after its reset")
    at_reset = answer[1]
    tokens = np.concatenate([prompt.tokens, shown(first, answer)])
    while len(tokens) < context.room:
      written = yield tokens.astype(np.int32)
      if at_reset is not None:
        context.reward(at_reset)
        at_reset = None
      text = tokenizer.decode(written).strip()
      fields = {action: text} if action else _fields(text)
      if isinstance(fields, str):
        answer = [fields, None, False]
      else:
        answer = await session.asked(context, ["step", fields])
      if answer[1] is not None:
        context.reward(answer[1])
      if answer[2]:
        return
      tokens = shown(then, answer)
  finally:
    await session.close()


class Session:
  """A session of a server, which begins with the first request to it.

  The requests before that were recorded: the run goes on from a checkpoint. The
  session is then new, and they are repeated in it.
  """

  def __init__(
    self, url: str, field: str, *, max_characters: int, timeout_s: float
  ):
    """Connect to nothing yet.

    Args:
      url: of the server.
      field: of the observation that is shown; "" is all of them, as JSON.
      max_characters: of what is shown, after which it is cut.
      timeout_s: of an answer.
    """
    self._url, self._timeout_s = url, timeout_s
    self._field, self._max_characters = field, max_characters
    self._client: Any = None
    self._past: list[tuple[list[Any], Answer]] = []

  async def asked(self, context: Any, request: list[Any]) -> Answer:
    """Return the answer to a request, the recorded one if there is one.

    Raises:
      CallError: there is none.
    """
    num_answers = 1 if self._client is not None else 1 + len(self._past)
    answer = await context.call(
      self.answer, request, timeout_s=num_answers * self._timeout_s
    )
    self._past.append((request, answer))
    return answer

  async def answer(self, request: list[Any]) -> Answer:
    """Send a request.

    Raises:
      OpenEnvError: the answer cannot be used, or the session is another one.
    """
    if self._client is None:
      self._client = generic_client.GenericEnvClient(
        base_url=self._url,
        connect_timeout_s=self._timeout_s,
        # The call has a deadline.
        message_timeout_s=2 * self._timeout_s,
        max_message_size_mb=_MAX_MIB,
      )
      await self._client.connect()
      for past, answer in self._past:
        if await self._sent(past) != answer:
          raise OpenEnvError(
            "the environment does not answer as it was recorded, so that the"
            " run cannot go on with it"
          )
    return await self._sent(request)

  async def close(self) -> None:
    """End the session. What the server does then changes nothing any more."""
    if self._client is not None:
      with contextlib.suppress(Exception):  # the client raises many kinds
        async with asyncio.timeout(_CLOSE_S):
          await self._client.close()

  async def _sent(self, request: list[Any]) -> Answer:
    kind, fields = request
    connection = self._client._ws
    try:
      if kind == "reset":
        result = await self._client.reset(**fields)
      else:
        result = await self._client.step(fields)
    except RuntimeError as error:
      if kind == "step" and _INVALID in str(error):
        return ["Error: this is no valid action", None, False]
      raise
    # The client connects again by itself, to an environment without a past.
    if self._client._ws is not connection:
      raise OpenEnvError("the connection to the session was lost")
    _check(result.observation, result.reward, result.done)
    value = result.observation
    if self._field:
      if self._field not in value:
        raise OpenEnvError(f"the observation has no {self._field!r}")
      value = value[self._field]
    text = calls.shortened(calls.text_of(value), self._max_characters)
    return [text, result.reward, result.done]


def _check(observation: Any, reward: Any, is_done: Any) -> None:
  """Check the types of an answer.

  Raises:
    OpenEnvError: they are others.
  """
  if not isinstance(observation, dict):
    raise OpenEnvError(f"the observation is {sections.shown(observation)}")
  if reward is not None and type(reward) not in (int, float):
    raise OpenEnvError(f"the reward is {sections.shown(reward)}")
  if not isinstance(is_done, bool):
    raise OpenEnvError(f"done is {sections.shown(is_done)}")


def _fields(text: str) -> dict[str, Any] | str:
  """Return the action that a completion is, or what is wrong with it."""
  try:
    fields = json.loads(text)
  except (ValueError, RecursionError) as error:
    return f"Error: the action is no JSON: {error}"
  if not isinstance(fields, dict):
    return "Error: the action is no JSON object"
  return fields


def _entry(prompt: Prompt, name: str) -> Any:
  """Return an entry of the item that a prompt was made of."""
  metadata = prompt.item.get("metadata", {})
  if name not in metadata and name not in prompt.item:
    raise OpenEnvError(f"task.episode_params.reset: no item has {name!r}")
  return metadata[name] if name in metadata else prompt.item[name]
