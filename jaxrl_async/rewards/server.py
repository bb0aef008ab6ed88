"""A reward server: a program of the user's own that scores over HTTP.

A group is one POST request. Its body and the answer are JSON:

    {"item": {...},                     the item that the prompt was made of
     "completions": [
       {"text": "...", "answer": "18" or null,
        "turns": [{"prompt": "...", "completion": "...", "num_tokens": 5,
                   "reward": 0.0}],
        "tokens": [11, 12, 13, 14, 15], "finish_reason": "eos"}, ...]}

    [{"score": 1.0, "parts": {"right": 1.0}, "token_scores": {"4": 0.5},
      "answer": "18"}, ...]             one for each completion, in their order

Only `score` is required, and a plain number stands for an object with nothing
else. The fields mean what they mean in `types.Completion` and `types.Reward`.
A score that is no finite number is a failure of its completion. Anything else,
another status than 200 included, is a failure of the group.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import http.client
import json
from typing import Any
from urllib import parse

from jaxrl_async.rewards import returned as returned_lib
from jaxrl_async.types import Completion, Reward

SCHEMES = ("http", "https")
_MAX_ANSWER_BYTES = 64 * 2**20
_SHOWN = 200  # characters of an answer that an error shows


class ServerError(RuntimeError):
  """The server did not answer with scores; one line that says what it did."""


@dataclasses.dataclass(frozen=True)
class RewardServer:
  """The address of a reward server; reward processes send it their groups."""

  url: str

  def score(
    self,
    item: Mapping[str, Any],
    completions: Sequence[Completion],
    *,
    timeout_s: float | None = None,
  ) -> list[Reward | returned_lib.NoRewardError]:
    """Return the rewards of a group, in the order of its completions.

    An entry that is no reward, such as NaN, is the error that says why.

    Args:
      item: of the prompt. What JSON does not know is sent as its text.
      completions: with their answers.
      timeout_s: for each operation of the connection. None waits forever: a
        reward process has a timer of its own.

    Raises:
      ServerError: the answer is not a list of scores.
      OSError, HTTPException: there was no answer.
    """
    body = {"item": dict(item), "completions": [*map(_shown, completions)]}
    answer = self._post(json.dumps(body, default=str), timeout_s)
    try:
      scores = json.loads(answer)
    except ValueError as error:
      raise ServerError(f"it answered {_cut(answer)}, no JSON") from error
    if not isinstance(scores, list) or len(scores) != len(completions):
      raise ServerError(
        f"it answered {_cut(answer)}, no list of {len(completions)} scores"
      )
    return [
      _reward(_read(value), len(completion.tokens))
      for value, completion in zip(scores, completions, strict=True)
    ]

  def check(self, timeout_s: float) -> None:
    """Ask the server to score no completions, which it answers with [].

    Raises:
      ServerError: it cannot be reached, or answers something else.
    """
    try:
      self.score({}, [], timeout_s=timeout_s)
    except (OSError, http.client.HTTPException) as error:
      raise ServerError(
        f"it cannot be reached ({str(error) or type(error).__name__})"
      ) from error

  def _post(self, body: str, timeout_s: float | None) -> bytes:
    parts = parse.urlsplit(self.url)
    is_secure = parts.scheme == "https"
    kind = (
      http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    )
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
      path = parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
      headers = {"Content-Type": "application/json"}
      connection.request("POST", path, body.encode(), headers)
      response = connection.getresponse()
      answer = response.read(_MAX_ANSWER_BYTES + 1)
    finally:
      connection.close()
    if response.status != http.client.OK:
      raise ServerError(f"it answered {response.status}: {_cut(answer)}")
    if len(answer) > _MAX_ANSWER_BYTES:
      raise ServerError(f"it answered more than {_MAX_ANSWER_BYTES} bytes")
    return answer


def is_address(name: str) -> bool:
  """Return whether a reward's name is meant as the address of a server."""
  return name.partition("://")[0] in SCHEMES


def at(url: str) -> RewardServer:
  """Return the server of an address; nothing is sent to it.

  Raises:
    ValueError: the address is not one, with what would be right.
  """
  try:
    parts = parse.urlsplit(url)
    is_right = bool(parts.hostname) and parts.port != 0 and url.isascii()
  except ValueError:  # the port
    is_right, parts = False, parse.urlsplit("")
  if not is_right or not url.isprintable() or " " in url:
    raise ValueError(
      f"{url!r:.80} is not the address of a server; use http://HOST:PORT/PATH"
    )
  if parts.username is not None:
    raise ValueError("a user name in the address is not sent; leave it out")
  return RewardServer(url)


def _shown(completion: Completion) -> dict[str, Any]:
  return {
    "text": completion.text,
    "answer": completion.answer,
    "turns": [dataclasses.asdict(turn) for turn in completion.turns],
    "tokens": completion.tokens.tolist(),
    "finish_reason": completion.finish_reason,
  }


def _read(value: Any) -> Any:
  """Return an entry of the answer as a scorer would have returned it."""
  if not isinstance(value, dict):
    return value
  known = {field.name for field in dataclasses.fields(Reward)}
  unknown = sorted(value.keys() - known)
  if unknown or "score" not in value:
    raise ServerError(
      f"it answered an object with {unknown[0]!r:.80}"
      if unknown
      else "it answered an object without a score"
    )
  scores = value.get("token_scores")
  if isinstance(scores, dict):  # JSON has no other keys than strings
    try:
      value = {**value, "token_scores": {int(k): x for k, x in scores.items()}}
    except ValueError as error:
      raise ServerError(
        f"it answered token_scores of which one is at no position: {error}"
      ) from error
  return Reward(**value)


def _reward(value: Any, num_tokens: int) -> Reward | returned_lib.NoRewardError:
  try:
    return returned_lib.as_reward(value, num_tokens)
  except returned_lib.NoRewardError as error:
    return error


def _cut(answer: bytes) -> str:
  text = " ".join(answer[: 4 * _SHOWN].decode("utf-8", "replace").split())
  return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
