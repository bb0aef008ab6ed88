"""What can be found out about rewards before anything is scored."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_async.rewards import code
from jaxrl_async.rewards import match
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import named
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.rewards import term as term_lib

_PROBE_S = 5.0


def _has_answer(item: Mapping[str, Any]) -> None:
  if "answer" not in item:
    raise ValueError("it has no answer; task.fields can name its column")


def _is_of_the_library(item: Mapping[str, Any]) -> None:
  if not {"dataset", "params"} <= item.keys():
    raise ValueError(
      "it is no question of reasoning-gym; use another reward, such as exact,"
      " numeric, mathematics or code"
    )


# For the rewards of this package: raises a ValueError for an item that they
# cannot score.
_CHECKS: Mapping[Any, Callable[[Mapping[str, Any]], None]] = {
  code.score: code.check_item,
  match.exact: _has_answer,
  match.numeric: _has_answer,
  mathematics.score: _has_answer,
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
          " it first (docs/rewards.md)",
        ) from error
      continue
    function, params = named.function_of(term.scorer)
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
  terms: Sequence[term_lib.Term], item: dict[str, Any], name: str
) -> None:
  """Check that completions of an item can be scored.

  Only rewards of this package say what they need.

  Raises:
    TrialError: they cannot.
  """
  for term in terms:
    function, _ = named.function_of(term.scorer)
    if check := term.scores(item) and _CHECKS.get(function):
      try:
        check(item)
      except ValueError as error:
        raise TrialError(
          term, f"the completions of {name} cannot be scored: {error}"
        ) from error
