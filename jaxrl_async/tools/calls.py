"""Makes the calls of tools: functions of the user, and programs of the policy.

The processes of a pool import this module, so that it must not import JAX.
"""

from collections.abc import Callable
import json
from typing import Any

from jaxrl_async.config import user_code
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.tools import schema

# Stands for the end of a result that is too long.
NOTE = "\n[the rest of the result is not shown]"
_SHARE_OF_TIME = 0.9  # of a call, that its program gets


def find(place: str) -> Callable[..., Any]:
  """Return the function of "module:function".

  Raises:
    ValueError: there is none.
  """
  return user_code.function(place, f"{place!r} is not module:function")


def shortened(text: str, max_characters: int) -> str:
  """Return a text, or its beginning with a note if it is longer."""
  if len(text) <= max_characters:
    return text
  return text[:max_characters] + NOTE


def text_of(result: Any) -> str:
  """Return what a tool returned as the model reads it: a text, or JSON."""
  if isinstance(result, str):
    return result
  return json.dumps(result, ensure_ascii=False, default=str)


def call(
  place: str, arguments: dict[str, Any], max_characters: int, timeout_s: float
) -> str:
  """Call a function with the arguments of a policy's call."""
  del timeout_s  # whoever makes the call keeps it
  function = find(place)
  result = function(**schema.as_hinted(function, arguments))
  return shortened(text_of(result), max_characters)


async def call_async(
  place: str, arguments: dict[str, Any], max_characters: int, timeout_s: float
) -> str:
  """Await a coroutine function, as `call` calls another one."""
  del timeout_s
  function = find(place)
  result = await function(**schema.as_hinted(function, arguments))
  return shortened(text_of(result), max_characters)


# Runs a program as an interactive session would: the value of a last expression
# is printed, and so is an error. What is printed beyond the limit is lost.
_SESSION = """
import ast, sys, traceback
class _Output:
  def __init__(self):
    self.left = LIMIT + 1
  def write(self, text):
    text = str(text)
    shown = text[: self.left]
    self.left -= len(shown)
    sys.__stdout__.write(shown)
    return len(text)
  def flush(self):
    sys.__stdout__.flush()
sys.stdout = sys.stderr = _Output()
try:
  tree = ast.parse(CODE, "program.py")
  last = None
  if tree.body and isinstance(tree.body[-1], ast.Expr):
    last = ast.Expression(tree.body.pop().value)
  scope = {"__name__": "__main__"}
  exec(compile(tree, "program.py", "exec"), scope)
  if last is not None:
    value = eval(compile(last, "program.py", "eval"), scope)
    if value is not None:
      print(repr(value))
except SystemExit:
  pass
except BaseException as error:
  print("".join(traceback.format_exception_only(error)).strip())
sys.__stdout__.flush()
"""


def run_python(
  allow_unsafe: bool,
  arguments: dict[str, Any],
  max_characters: int,
  timeout_s: float,
) -> str:
  """Run a program of the policy in a sandbox, and return what it printed."""
  box = sandbox_lib.find(allow_unsafe=allow_unsafe)
  given = f"CODE = {arguments['code']!r}\nLIMIT = {max_characters}\n"
  written, failure = box.run_program(
    given + _SESSION,
    limits=sandbox_lib.Limits(wall_s=timeout_s, cpu_s=timeout_s),
    total_s=_SHARE_OF_TIME * timeout_s,
  )
  written = shortened(written, max_characters)
  return written + (f"Error: {failure}" if failure else "")


def python(code: str) -> str:
  """Run a Python program and return what it prints.

  It has the standard library, no network, and no files of earlier programs.

  Args:
    code: the program; the value of a last expression is printed too
  """
  raise NotImplementedError(code)  # it is described here, and run above
