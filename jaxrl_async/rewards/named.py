"""Scorers by the names that a config gives them."""

from collections.abc import Mapping
import functools
import inspect
import types
from typing import Any

from jaxrl_async.config import user_code
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

  The module is imported here, and in the reward processes by its name. It has
  to be in the directories of `sys.path`.

  Raises:
    ValueError: there is none, with what would be right.
  """
  place = SHIPPED.get(name, name)
  module_name, has_colon, function_name = place.partition(":")
  if not (has_colon and module_name and function_name):
    raise ValueError(
      f"there is no reward {name!r}; use one of {', '.join(SHIPPED)},"
      " module:function, or http://HOST:PORT/PATH"
    )
  try:
    module = user_code.module(module_name)
  except user_code.UserCodeError as error:
    raise ValueError(f"{name!r} cannot be imported: {error}") from error
  function = getattr(module, function_name, None)
  if not isinstance(function, types.FunctionType):
    raise ValueError(f"{module_name} has no function {function_name!r}")
  return function


def function_of(
  scorer: term_lib.Scorer | server_lib.RewardServer,
) -> tuple[Any, Mapping[str, Any]]:
  """Return the function of a scorer and its parameters."""
  if isinstance(scorer, functools.partial):
    return scorer.func, scorer.keywords
  return scorer, {}
