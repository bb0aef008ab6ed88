"""What came of a call that an episode made, and the process that makes it.

Processes of the pool import this module, so that it must not import jax.
"""

from collections.abc import Callable
import functools
import json
import pickle
from typing import Any

from jaxrl_async import types
from jaxrl_async.rewards import scoring
from jaxrl_async.storage import item_json

MAX_BYTES = 16 * 2**20  # of a result, as JSON

# Its kind, and the text of its event.
Outcome = tuple[types.EventKind, str]


def failed(reason: str) -> Outcome:
  """Return the outcome of a call that failed for a reason."""
  return types.EventKind.ERROR, reason


def raised(error: BaseException) -> Outcome:
  """Return the outcome of a call that raised an error."""
  return failed(f"error: {scoring.one_line(error)}")


def of_value(value: Any) -> Outcome:
  """Return the outcome of a call that returned a value."""
  try:
    text = json.dumps(item_json.encode(value))
  except (item_json.UnstorableError, ValueError, RecursionError) as error:
    return failed(f"unstorable: the call returned {scoring.one_line(error)}")
  if len(text) > MAX_BYTES:  # it is ASCII
    return failed(
      f"unstorable: the call returned {len(text)} bytes, and the most is"
      f" {MAX_BYTES}"
    )
  return types.EventKind.RESULT, text


def make(pickled: bytes) -> Outcome:
  """Make a call in this process, which is one of the pool."""
  try:
    function, arguments = pickle.loads(pickled)
    return of_value(function(*arguments))
  except BaseException as error:  # user code may also raise SystemExit
    return raised(error)


def name_of(function: Callable[..., Any]) -> str:
  """Return the name of a function for people."""
  while isinstance(function, functools.partial):
    function = function.func
  return getattr(function, "__qualname__", type(function).__name__)
