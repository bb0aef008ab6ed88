"""The process in the sandbox that holds a program which a model wrote.

It is started with this file's text as `python -I -c`, so it imports nothing of
the package. It loads the program, then answers calls: one line of JSON a call
in, one line out. The program shares this process, so nothing that comes out of
it is believed to be more than plain data.
"""

import ast
import json
import os
import sys
import types
from typing import Any

_PLAIN = (bool, float, str, type(None))
_SHORT_BITS = 64


def encode(value: Any) -> Any:
  """Return a value as JSON that keeps its type.

  Raises:
    TypeError: the value, or something in it, is not plain data. Subclasses are
      refused too: they could compare equal to everything.
  """
  kind = type(value)
  if kind in _PLAIN:
    return value
  if kind is int:
    # Reading and writing decimals takes quadratic time.
    is_short = value.bit_length() <= _SHORT_BITS
    return value if is_short else {"int": hex(value)}
  if kind is list:
    return {"list": [encode(x) for x in value]}
  if kind in (tuple, set, frozenset):
    return {kind.__name__: [encode(x) for x in value]}
  if kind is dict:
    return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
  if kind is complex:
    return {"complex": [value.real, value.imag]}
  if kind is bytes:
    return {"bytes": value.hex()}
  raise TypeError(f"a {kind.__name__} cannot leave the sandbox")


def decode(stored: Any) -> Any:
  """Return the value that `encode` was given."""
  if not isinstance(stored, dict):
    return stored
  ((kind, content),) = stored.items()
  if kind == "dict":
    return {decode(k): decode(v) for k, v in content}
  if kind == "complex":
    return complex(*content)
  if kind == "bytes":
    return bytes.fromhex(content)
  if kind == "int":
    return int(content, 16)
  builtin = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
  return builtin[kind](decode(x) for x in content)


def functions_of(program: str) -> list[str]:
  """Return the names of the functions that a program defines at its top."""
  return [
    node.name
    for node in ast.parse(program).body
    if isinstance(node, ast.FunctionDef)
  ]


def _failure(error: BaseException) -> dict[str, Any]:
  names = [kind.__name__ for kind in type(error).__mro__]
  return {"error": names, "message": str(error)[:200]}


def _answer(
  module: types.ModuleType, request: dict[str, Any]
) -> dict[str, Any]:
  try:
    args, kwargs = decode(request["args"])
    function = getattr(module, request["function"])
    return {"value": encode(function(*args, **kwargs))}
  except BaseException as error:  # SystemExit too: the program's own affair
    return _failure(error)


def main(requests_fd: int, answers_fd: int) -> None:
  """Load the program of the first line, then answer the lines after it."""
  requests = os.fdopen(requests_fd, "r", encoding="utf-8")
  answers = os.fdopen(answers_fd, "w", encoding="utf-8")

  def say(answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()

  module = types.ModuleType("solution")
  sys.modules["solution"] = module
  request = json.loads(requests.readline())
  try:
    code = compile(request["program"], "solution.py", "exec")
    exec(code, module.__dict__)
    answer = {"value": None}
  except BaseException as error:
    answer = _failure(error)
  say({"number": request["number"], **answer})
  for line in requests:
    request = json.loads(line)
    say({"number": request["number"], **_answer(module, request)})


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]))
