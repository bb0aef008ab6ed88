"""Episodes by the names that a config gives them."""

from collections.abc import Mapping
import functools
import inspect
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib

# Name -> module:function.
SHIPPED: Mapping[str, str] = {
  "agent": "jaxrl_async.sessions.episode:run_agent",
  "budgets": "jaxrl_async.rollout.forced_answers:answer_after_cuts",
  "openenv": "jaxrl_async.tools.openenv_episode:play",
  "tools": "jaxrl_async.tools.episode:use_tools",
}


def find(name: str, params: Mapping[str, Any]) -> episode_lib.Episode:
  """Return the episode of a name, with its parameters.

  Args:
    name: one of `SHIPPED`, or module:function. "" is an episode of a single
      turn.
    params: keyword arguments, after the prompt and the context.

  Raises:
    ValueError: there is none, or it does not take these parameters. The message
      is one line.
  """
  if not name:
    if params:
      raise ValueError("an episode of a single turn takes no params")
    return episode_lib.single_turn
  shown = sections.shown(name)
  function = user_code.function(
    SHIPPED.get(name, name),
    f"there is no episode {shown}; use one of {', '.join(SHIPPED)}, or"
    " module:function",
  )
  check(function, params, shown)
  episode: Any = functools.partial(function, **params) if params else function
  return episode


def check(function: Any, params: Mapping[str, Any], shown: str) -> None:
  """Check that a function makes a generator of a prompt, and of a context.

  Args:
    function: what a config names.
    params: its keyword arguments.
    shown: its name, for the message.

  Raises:
    ValueError: it does not.
  """
  if inspect.iscoroutinefunction(function):
    raise ValueError(f"{shown} never yields, so that it is no generator")
  bound = functools.partial(function, **params)
  arguments = (None, None) if environment_lib.wants_context(bound) else (None,)
  try:
    inspect.signature(function).bind(*arguments, **params)
  except TypeError as error:
    raise ValueError(
      f"{shown} cannot be called with a prompt, a context if it wants one, and"
      f" the params {', '.join(params) or '(none)'}: {error}"
    ) from error
