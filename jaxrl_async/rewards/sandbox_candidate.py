"""The process in the sandbox that holds a program which a model wrote.

It is started with the text of this file and of `sandbox_wire`, because it sees
nothing of the package. It loads the program, then does what the tests ask. The
program shares this process, so the tests believe nothing that comes out of it
but plain data.
"""

import __future__

import builtins
from collections.abc import Sequence
import io
import json
import os
import sys
import types
from typing import Any, BinaryIO

from jaxrl_async.rewards import sandbox_wire

_MAX_WRITTEN = 1 << 16  # bytes that tests see of what is printed in a call


class _Written(io.RawIOBase):
  """Keeps the beginning of what is written."""

  def __init__(self):
    super().__init__()
    self.kept = bytearray()

  def writable(self) -> bool:
    return True

  def write(self, data: Any) -> int:
    self.kept += memoryview(data)[: _MAX_WRITTEN - len(self.kept)]
    return len(data)


class _Asked:
  """A function or an object of the tests, as the program sees it."""

  def __init__(self, program: "_Program", number: int):
    vars(self).update(_program=program, _number=number)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return self._program.ask("call", self._number, args, kwargs)

  def __getattr__(self, name: str) -> Any:
    return self._program.ask("get", self._number, name)

  def __setattr__(self, name: str, value: Any) -> None:
    self._program.ask("set", self._number, name, value)


class _Stdin(io.TextIOWrapper):
  """What the tests have as their stdin."""

  def __init__(self, program: "_Program"):
    super().__init__(sys.stdin.buffer, "utf-8")
    self.ask = program.ask

  def read(self, size: int | None = -1) -> str:
    return self.ask("read", "read", -1 if size is None else size)

  def readline(self, size: int = -1) -> str:  # type: ignore[override]
    return self.ask("read", "readline", size)


class _Program(sandbox_wire.Wire):
  """The program's end of the pipes. Number 0 is its module."""

  def __init__(self, reading: BinaryIO, writing: BinaryIO):
    super().__init__(reading, writing, sys.maxsize // 2)
    self._module = types.ModuleType("solution")
    sys.modules["solution"] = self._module
    self.give(self._module)
    self._written = _Written()
    self._stdout = io.TextIOWrapper(
      io.BufferedWriter(self._written), "utf-8", "backslashreplace"
    )
    sys.stdout, sys.stdin = self._stdout, _Stdin(self)
    builtins.input = lambda prompt="": self.ask("read", "input", prompt)
    self._asked: dict[int, Any] = {}

  def written(self) -> str:
    self._stdout.flush()
    text = self._written.kept.decode("utf-8", "replace")
    self._written.kept.clear()
    return text

  def encode(self, value: Any, held: sandbox_wire.Held) -> Any:
    if type(value) is types.CoroutineType:
      import asyncio  # takes long

      return ["awaitable", self.encode(asyncio.run(value), held)]
    return super().encode(value, held)

  def leave(self, value: Any, held: sandbox_wire.Held) -> list[Any]:
    if isinstance(value, _Asked):
      return ["yours", value._number]
    kind = type(value)
    if kind.__name__ in self._shared:
      return held.add(value, sandbox_wire.RECORD)
    about = {
      "name": kind.__name__,
      "methods": [
        name
        for name in sandbox_wire.FORWARDED
        + sandbox_wire.COMPARISONS
        + sandbox_wire.ARITHMETIC
        if getattr(kind, name, None) is not getattr(object, name, None)
      ],
    }
    if isinstance(value, type) and issubclass(value, BaseException):
      about["error"] = [base.__name__ for base in value.__mro__]
    return self.give(value, **about)

  def take(self, number: int, about: dict[str, Any]) -> Any:
    if number not in self._asked:
      asked = _Asked(self, number)
      is_iterator = about["is_iterator"]
      self._asked[number] = _iterated(asked) if is_iterator else asked
    return self._asked[number]

  def find(self, module: str, name: str) -> Any:
    return sandbox_wire.named(f"{module}.{name}")

  def shared(self, name: str) -> type:
    own = getattr(self._module, name, None)
    if not isinstance(own, type):
      own = type(name, (), {})
      setattr(self._module, name, own)
    return own

  def error(self, names: list[str], message: str, state: Any) -> BaseException:
    known = [getattr(builtins, name, None) for name in names]
    return next((kind for kind in known if kind), RuntimeError)(message)

  def do(self, what: str, args: Sequence[Any]) -> Any:
    if what == "load":
      program, self._shared = args
      # Unlike others, this program may annotate with what it does not import.
      flags = __future__.annotations.compiler_flag
      code = compile(program, "solution.py", "exec", flags)
      return exec(code, self._module.__dict__)
    if what in _BUILTIN:
      return _BUILTIN[what](*args)
    thing, positional, named = args
    return getattr(type(thing), what)(thing, *positional, **named)


def _parameters(function: Any) -> list[Any]:
  import inspect  # takes long

  return [
    [x.name, int(x.kind), [x.default] * (x.default is not x.empty)]
    for x in inspect.signature(function).parameters.values()
  ]


_BUILTIN = {
  "get": getattr,
  "set": setattr,
  "isinstance": isinstance,
  "parameters": _parameters,
}


def _iterated(ask: _Asked) -> Any:
  while True:
    try:
      value = ask()
    except StopIteration:
      return
    yield value


def main(requests_fd: int, answers_fd: int) -> None:
  """Do what each line asks."""
  for name in ("exit", "quit"):  # which `site` defines
    setattr(builtins, name, sys.exit)
  requests = os.fdopen(requests_fd, "rb")
  program = _Program(requests, os.fdopen(answers_fd, "wb"))
  for line in requests:
    program.answer(json.loads(line))


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]))
