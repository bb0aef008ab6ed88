"""Scorers by the names that a config gives them."""

from collections.abc import Mapping
import importlib
import types

from jaxrl_async.rewards import service as service_lib

# Name -> module:function.
SHIPPED: Mapping[str, str] = {
  "reasoning_gym": "jaxrl_async.rewards.reasoning:score",
  "mathematics": "jaxrl_async.rewards.mathematics:score",
  "code": "jaxrl_async.rewards.code:score",
  "exact": "jaxrl_async.rewards.match:exact",
  "numeric": "jaxrl_async.rewards.match:numeric",
}


def find(name: str) -> service_lib.Scorer:
  """Return the scorer of a name, or that of `module:function`.

  The module is imported here, and in the reward processes by its name. It has
  to be in the directories of `sys.path`.

  Raises:
    ValueError: there is none, with what would be right.
  """
  place = SHIPPED.get(name, name)
  module_name, has_colon, function_name = place.partition(":")
  if not (has_colon and module_name and function_name):
    raise ValueError(
      f"there is no reward {name!r}; use one of {', '.join(SHIPPED)}, or"
      " module:function"
    )
  try:
    module = importlib.import_module(module_name)
  except ImportError as error:
    raise ValueError(f"{name!r} cannot be imported: {error}") from error
  scorer = getattr(module, function_name, None)
  if not isinstance(scorer, types.FunctionType):
    raise ValueError(f"{module_name} has no function {function_name!r}")
  return scorer
