"""Scorers by the names that a config gives them, and what they need."""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
import types
from typing import Any

from jaxrl_async.config import user_code
from jaxrl_async.rewards import code
from jaxrl_async.rewards import match
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.rewards import term as term_lib

# Name -> module:function.
SHIPPED: Mapping[str, str] = {
  "reasoning_gym": "jaxrl_async.rewards.reasoning:score",
  "mathematics": "jaxrl_async.rewards.mathematics:score",
  "code": "jaxrl_async.rewards.code:score",
  "exact": "jaxrl_async.rewards.match:exact",
  "numeric": "jaxrl_async.rewards.match:numeric",
  "answered": "jaxrl_async.rewards.match:answered",
  "ended": "jaxrl_async.rewards.match:ended",
  "matches": "jaxrl_async.rewards.match:matches",
  "overlong": "jaxrl_async.rewards.match:overlong",
  "episode": "jaxrl_async.rewards.turn_rewards:episode",
}


def scorer(
  name: str, params: Mapping[str, Any]
) -> term_lib.Scorer | server_lib.RewardServer:
  """Return what a name stands for: a function with its parameters, or a server.

  Args:
    name: one of `SHIPPED`, module:function, or the address of a server.
    params: keyword arguments of the function, after the item and the
      completion.

  Raises:
    ValueError: there is none, or it does not take these parameters.
  """
  if server_lib.is_address(name):
    if params:
      raise ValueError(f"{name} is a server, which takes no params")
    return server_lib.at(name)
  function = find(name)
  try:
    inspect.signature(function).bind({}, None, **params)
  except TypeError as error:
    raise ValueError(
      f"{name!r} cannot be called with an item, a completion and the params"
      f" {', '.join(params) or '(none)'}: {error}"
    ) from error
  return functools.partial(function, **params) if params else function


def find(name: str) -> types.FunctionType:
  """Return the function of a name, or that of `module:function`.

  The module is imported here, and in the reward processes by its name.

  Raises:
    ValueError: there is none, with what would be right.
  """
  function = user_code.function(
    SHIPPED.get(name, name),
    f"there is no reward {name!r}; use one of {', '.join(SHIPPED)},"
    " module:function, or http://HOST:PORT/PATH",
  )
  if not isinstance(function, types.FunctionType):
    raise ValueError(f"{name!r} is callable, but no function")
  return function


def function_of(
  scorer: term_lib.Scorer | server_lib.RewardServer,
) -> tuple[Any, Mapping[str, Any]]:
  """Return the function of a scorer and its parameters."""
  if isinstance(scorer, functools.partial):
    return scorer.func, scorer.keywords
  return scorer, {}


# -- before anything is scored -------------------------------------------------

_PROBE_S = 5.0


def _has_answer(item: Mapping[str, Any]) -> None:
  if "answer" not in item:
    raise ValueError("it has no answer; task.fields can name its column")


def _is_a_number(item: Mapping[str, Any]) -> None:
  _has_answer(item)
  match.gold_number(item["answer"])


def _is_of_the_library(item: Mapping[str, Any]) -> None:
  if not {"dataset", "params"} <= item.keys():
    raise ValueError(
      "it is no question of reasoning-gym; use another reward, such as exact,"
      " numeric, mathematics or code"
    )


def _has_mathematics(item: Mapping[str, Any]) -> None:
  _has_answer(item)
  if not mathematics.gold_of(item).strip(" $"):
    raise ValueError(f"its answer {str(item['answer'])!r:.80} is blank")


# For the rewards of this package: raises a ValueError for an item that they
# cannot score.
_CHECKS: Mapping[Any, Callable[[Mapping[str, Any]], None]] = {
  code.score: code.check_item,
  match.exact: _has_answer,
  match.numeric: _is_a_number,
  mathematics.score: _has_mathematics,
  reasoning.score: _is_of_the_library,
}


class TrialError(RuntimeError):
  """A term cannot score on this host; the message says why, in one line."""

  def __init__(self, term: term_lib.Term, message: str):
    super().__init__(message)
    self.term = term


def try_out(terms: Sequence[term_lib.Term]) -> list[str]:
  """Check that servers answer, and that programs can be run safely.

  Returns:
    Lines for the user about what was found.

  Raises:
    TrialError: a server does not answer, or there is no sandbox.
  """
  found = []
  for term in terms:
    if isinstance(term.scorer, server_lib.RewardServer):
      try:
        term.scorer.check(min(term.timeout_s, _PROBE_S))
      except (server_lib.ServerError, ValueError) as error:
        raise TrialError(
          term,
          f"the reward server {term.scorer.url} does not work: {error}; start"
          " it first (docs/how-to/rewards.md)",
        ) from error
      continue
    function, params = function_of(term.scorer)
    if function is code.score:
      is_unsafe = params.get("sandbox") == "unsafe"
      try:
        sandbox = sandbox_lib.find(allow_unsafe=is_unsafe)
      except sandbox_lib.SandboxError as error:
        raise TrialError(term, str(error)) from error
      found.append(f"programs run in a sandbox made by {sandbox.kind}")
      if sandbox.kind is sandbox_lib.Kind.UNSAFE:
        found[-1] = (
          "WARNING: there is no sandbox; programs of the policy run as"
          ' ordinary processes (sandbox="unsafe")'
        )
  return found


def check_item(
  terms: Sequence[term_lib.Term],
  item: dict[str, Any],
  name: str,
  *,
  is_tried: bool = False,
) -> None:
  """Check that completions of an item can be scored.

  Only rewards of this package say what they need.

  Args:
    terms: of the score.
    item: of the prompt.
    name: of the prompt.
    is_tried: tests of programs are run too.

  Raises:
    TrialError: they cannot.
  """
  for term in terms:
    function, params = function_of(term.scorer)
    if check := term.scores(item) and _CHECKS.get(function):
      try:
        check(item)
        if is_tried and function is code.score:
          code.try_item(item, **params)
      except (ValueError, sandbox_lib.SandboxError) as error:
        raise TrialError(
          term, f"the completions of {name} cannot be scored: {error}"
        ) from error
