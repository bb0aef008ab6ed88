"""Runs tests of a program beside it, in the first process of a sandbox.

The program is in another process (`sandbox_candidate`). So it cannot forge a
verdict, change the tests, or return an object that claims to be equal to
everything: only plain data comes back. Of anything else the tests have a
`Proxy`, whose methods are called over there.

A test that raises may be wrong itself. The calls of the program are counted
here, so that tests which test nothing are noticed, and what the program raised
is marked.
"""

import __future__

import builtins
from collections.abc import Callable, Iterator, Sequence
import re
import sys
import types
from typing import Any, BinaryIO

from jaxrl_async.rewards import sandbox_pytest
from jaxrl_async.rewards import sandbox_wire

_MAX_MESSAGE = 300
_MARK = "jaxrl_of_program"  # of what the program raised


# None of these is an Exception, so that tests do not take it for one of those
# that they wait for.
class Failed(BaseException):
  """A program did not do what it should; the message says what happened."""


class NotPlain(BaseException):
  """Tests compare an object of the program, which only it could do."""


class _Foreign(BaseException):
  """Tests pass something that cannot be sent to the program."""


class Proxy:
  """Something that has stayed with the program.

  Its class has those special methods that the class over there has.
  """

  __slots__ = ("_jaxrl_number", "_jaxrl_program")

  def __init__(self, program: "Program", number: int):
    object.__setattr__(self, "_jaxrl_program", program)
    object.__setattr__(self, "_jaxrl_number", number)

  def __getattr__(self, name: str) -> Any:
    return self._jaxrl_program.read(self, name)

  def __setattr__(self, name: str, value: Any) -> None:
    self._jaxrl_program.ask("set", self, name, value)

  def __instancecheck__(self, value: Any) -> bool:
    if not isinstance(value, Proxy):
      return False
    return bool(self._jaxrl_program.ask("isinstance", value, self))


def _forwarded(name: str) -> Callable[..., Any]:
  def method(self: Proxy, *args: Any, **kwargs: Any) -> Any:
    program = self._jaxrl_program
    program.num_calls += name == "__call__"
    return program.ask(name, self, args, kwargs)

  return method


def _among_themselves(name: str) -> Callable[[Proxy, Any], Any]:
  def method(self: Proxy, other: Any) -> Any:
    if not isinstance(other, Proxy):
      raise self._jaxrl_program.not_plain(self)
    return self._jaxrl_program.ask(name, self, (other,), {})

  return method


def _refused(name: str) -> Callable[[Proxy, Any], Any]:
  def method(self: Proxy, other: Any) -> Any:
    if self is other and name in ("__eq__", "__ne__"):
      return name == "__eq__"
    raise self._jaxrl_program.not_plain(self)

  return method


_DOC = property(lambda self: self._jaxrl_program.read(self, "__doc__"))
_METHODS = {
  **{name: _refused(name) for name in sandbox_wire.COMPARISONS},
  **{name: _among_themselves(name) for name in sandbox_wire.ARITHMETIC},
  **{name: _forwarded(name) for name in sandbox_wire.FORWARDED},
}


class Program(sandbox_wire.Wire):
  """The tests' end of the pipes.

  Attributes:
    num_calls: how often tests have called the program.
    num_read: how often they have read a name or an attribute of it.
    is_plain: nothing was compared that only the program could compare.
    unknown: names that tests have looked for in it in vain.
  """

  def __init__(self, reading: BinaryIO, writing: BinaryIO, most: int):
    """Take the pipes; see `Wire`."""
    super().__init__(reading, writing, most)
    self.num_calls = self.num_read = 0
    self.is_plain = True
    self.unknown: set[str] = set()
    self._module = Proxy(self, 0)
    self._taken: dict[int, Any] = {0: self._module}
    self._names: dict[str, Any] = {}
    self._in_setup: dict[str, type] = {}
    self._classes: dict[tuple[str, ...], type] = {}
    self._errors: dict[str, type] = {}
    self._numbers_of_errors: dict[type, int] = {}

  def load(self, text: str, names: dict[str, Any]) -> None:
    """Let the program run up to its end.

    Args:
      text: of the program.
      names: of the tests, with the classes that the program has too. Objects of
        those are data.
    """
    self._names = names
    self._in_setup = {
      name: value
      for name, value in names.items()
      if isinstance(value, type) and value.__module__ == "__main__"
    }
    self._shared = list(self._in_setup)
    self.ask("load", text, self._shared)

  def defined(self, name: str) -> Any:
    """Return what the program calls so.

    Raises:
      AttributeError: there is none.
    """
    if name.startswith("__"):
      raise AttributeError(name)
    try:
      return self.read(self._module, name)
    except AttributeError:
      self.unknown.add(name)
      raise

  def read(self, thing: Proxy, name: str) -> Any:
    """Return an attribute."""
    self.num_read += 1
    if name != "__signature__":
      return self.ask("get", thing, name)
    import inspect  # which asks for it

    return inspect.Signature(
      [
        inspect.Parameter(
          name, kind, default=default[0] if default else inspect.Parameter.empty
        )
        for name, kind, default in self.ask("parameters", thing)
      ]
    )

  def not_plain(self, thing: Proxy) -> NotPlain:
    """Return that an object cannot be compared here."""
    self.is_plain = False
    return NotPlain(f"a {type(thing).__name__} cannot leave the program")

  def ask(self, what: str, *args: Any) -> Any:
    """Ask the program; see `Wire`.

    Raises:
      Failed: it has not answered as it should.
      Exception: what the program raised, which is marked as its own.
    """
    try:
      return super().ask(what, *args)
    except _Foreign:
      raise
    except (StopIteration, StopAsyncIteration) as error:
      if what == "__next__" and isinstance(error, StopIteration):
        raise
      # It would end a loop over calls as if all had returned.
      raise Failed(f"{type(error).__name__}: {error}") from None
    except BaseException as error:
      if is_of_program(error):
        raise
      raise Failed(_about(error)) from error

  def error(self, names: list[str], message: str, state: Any) -> BaseException:
    for i in range(len(names)):
      kind = self._error_class(names[i:])
      if kind is None:
        break
      args, attributes = state or ((message,), {})
      try:
        error = kind(*args)
        if str(error)[: len(message)] != message:
          error = kind(message)  # it says it in its own way
      except TypeError:  # UnicodeDecodeError, say, wants more
        continue
      error.__dict__.update({str(k): v for k, v in attributes.items()})
      setattr(error, _MARK, True)
      return error
    return Failed(f"{', '.join(names[:1])}: {message}")

  def _error_class(self, names: list[str]) -> type[BaseException] | None:
    """Return a class that is derived as that of the program is."""
    for i, name in enumerate(names):
      known = self._names if name in self._shared else vars(builtins)
      kind = self._errors.get(name) or known.get(name)
      if not isinstance(kind, type):
        continue
      if not issubclass(kind, Exception | SystemExit):
        break
      for own in reversed(names[:i]):
        kind = self._errors[own] = type(own, (kind,), {})
      return kind
    return None

  def take(self, number: int, about: dict[str, Any]) -> Any:
    if number not in self._taken:
      if "error" in about:
        kind = self._error_class([str(name) for name in about["error"]])
        if kind is not None:
          self._numbers_of_errors[kind] = number
          return kind
      key = (str(about["name"]), *map(str, about["methods"]))
      if key not in self._classes:
        methods = {name: _METHODS[name] for name in key[1:]}
        if "__iter__" in methods:
          methods.pop("__contains__", None)  # so that tests compare
        methods["__hash__"] = object.__hash__
        of_kind: dict[str, Any] = {"__slots__": (), "__doc__": _DOC, **methods}
        if key[0] == "generator":  # for isinstance
          of_kind["__class__"] = property(lambda self: types.GeneratorType)
        self._classes[key] = type(key[0], (Proxy,), of_kind)
      self._taken[number] = self._classes[key](self, number)
    return self._taken[number]

  def decode(self, stored: Any, held: sandbox_wire.Held) -> Any:
    if isinstance(stored, list) and stored[:1] == ["awaitable"]:
      return _returns(super().decode(stored[1], held))
    return super().decode(stored, held)

  def shared(self, name: str) -> type:
    if name not in self._shared:
      raise ValueError(f"{name:.80} is no class of both")
    return self._names[name]

  def leave(self, value: Any, held: sandbox_wire.Held) -> list[Any]:
    if isinstance(value, Proxy):
      return ["yours", value._jaxrl_number]
    if isinstance(value, type) and value in self._numbers_of_errors:
      return ["yours", self._numbers_of_errors[value]]
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if module in sys.stdlib_module_names and isinstance(name, str):
      if getattr(sys.modules.get(module), name, None) is value:
        return ["named in Python", module, name]
    if isinstance(value, types.CoroutineType):
      raise Failed("a coroutine of the program was not awaited")
    is_iterator = hasattr(type(value), "__next__")
    is_own = type(value).__module__ == "__main__"
    if is_own and self._in_setup.get(type(value).__name__) is not type(value):
      is_called = callable(value) or _has_methods(type(value))
    else:
      is_called = callable(value) and not hasattr(value, "mock_calls")
    if is_iterator or is_called:
      return self.give(value, is_iterator=is_iterator)
    if is_own:
      return held.add(value, sandbox_wire.RECORD)
    raise _Foreign(f"a {type(value).__name__} cannot be sent to the program")

  def do(self, what: str, args: Sequence[Any]) -> Any:
    if what == "read":  # tests may have replaced what they read from
      name, given = args
      reads = sys.stdin.read, sys.stdin.readline, builtins.input
      return dict(zip(("read", "readline", "input"), reads, strict=True))[name](
        given
      )
    asked = self._given[args[0]]
    if what == "call":
      if hasattr(type(asked), "__next__"):
        return next(asked)
      return asked(*args[1], **args[2])
    # The names of the tests could be found in what is private.
    if type(asked).__module__ != "__main__" or args[1][:1] == "_":
      raise AttributeError(args[1])
    if what == "get":
      return getattr(asked, args[1])
    if what != "set" or callable(getattr(type(asked), args[1], None)):
      raise ValueError(f"the tests do not {what!r:.80}")
    return setattr(asked, *args[1:])


def _has_methods(kind: type) -> bool:
  """Return whether a class has more than data and special methods."""
  return any(
    hasattr(value, "__get__")
    and name[:2] != "__"
    and not isinstance(value, types.MemberDescriptorType)  # of __slots__
    for base in kind.__mro__[:-1]
    for name, value in vars(base).items()
  )


def _about(error: BaseException) -> str:
  """Return what is wrong with an answer that cannot be read."""
  if isinstance(error, BrokenPipeError | EOFError):
    return "the program ended"
  if isinstance(error, RecursionError):
    return "the program's answer is nested too deeply"
  if isinstance(error, sandbox_wire.TooLong):
    return str(error)
  return "the program's answer cannot be read"


def is_of_program(error: BaseException) -> bool:
  """Return whether the program raised this, or is at fault for it."""
  return isinstance(error, Failed) or getattr(error, _MARK, False)


async def _returns(value: Any) -> Any:
  return value


class _Builtins(dict):
  """The names that tests do not define: of Python, then of the program."""

  def __init__(self, program: Program, wanted: list[str] | None):
    # `site` defines exit and quit, and is left out.
    super().__init__({**vars(builtins), "exit": sys.exit, "quit": sys.exit})
    self._program, self._wanted = program, wanted

  def __missing__(self, name: str) -> Any:
    if self._wanted is not None and name not in self._wanted:
      raise KeyError(name)
    try:
      return self._program.defined(name)
    except AttributeError:
      raise KeyError(name) from None


def _steps(names: dict[str, Any], job: dict[str, Any]) -> Iterator[Any]:
  """Run what tests have defined, as HumanEval, pytest and unittest would."""
  check = names.get("check")
  if job["entry_point"] and isinstance(check, types.FunctionType):
    yield check(eval(job["entry_point"], names))
  yield from sandbox_pytest.steps(names, job["tests"])


def _compiled(job: dict[str, Any], name: str) -> types.CodeType:
  # Unlike others, they may annotate with what they do not import.
  flags = __future__.annotations.compiler_flag
  return compile(job[name], f"{name}.py", "exec", flags)


def _run(program: Program, job: dict[str, Any]) -> None:
  module, solution = types.ModuleType("__main__"), types.ModuleType("solution")
  names = vars(module)
  names["__builtins__"] = _Builtins(program, job["wanted"])
  vars(solution)["__getattr__"] = program.defined
  sys.modules |= {"__main__": module, "solution": solution}
  sys.modules["pytest"] = sandbox_pytest.module()
  sys.argv = ["tests.py"]
  names["__file__"] = "tests.py"
  if "unittest" in job["tests"]:
    import unittest

    setattr(unittest, "main", lambda *_, **__: None)  # noqa: B010, run anyway
  exec(_compiled(job, "setup"), names)
  program.load(job["program"], names)
  entry_point = job["entry_point"]
  if root := "".join(re.findall(r"^\w+", entry_point)):
    try:
      named = program.defined(root)
    except AttributeError:
      raise Failed(f"the program has no {root}") from None
    program.num_read = 0  # nothing was of the tests
    if hasattr(builtins, root):
      names[root] = named
  try:
    exec(_compiled(job, "tests"), names)
  except SystemExit as error:
    if is_of_program(error):
      raise
    if error.code:
      raise AssertionError(f"exit code {error.code}") from None
  for returned in _steps(names, job):
    if hasattr(returned, "__await__"):
      import asyncio

      returned = asyncio.run(returned)
    if returned is not None:
      raise sandbox_pytest.NoTests(
        "a test returns something, and has to assert it"
      )
  if not program.num_calls:
    raise sandbox_pytest.NoTests("they do not call the program")


def _is_of_tests(error: BaseException, program: Program, text: str) -> bool:
  """Return whether an error says that tests are wrong, whatever they test."""
  if isinstance(error, NotPlain) or is_of_program(error):
    return False
  if isinstance(error, _Foreign | sandbox_pytest.NoTests):
    return True
  if type(error) is NameError:
    # They may evaluate what the program has returned.
    is_theirs = (
      re.search(rf"\b{re.escape(error.name or '')}\b", text) is not None
    )
    return is_theirs and error.name not in program.unknown
  if isinstance(error, ImportError):
    return error.name != "solution"
  return not program.num_calls + program.num_read


def _message(error: BaseException) -> str:
  try:
    text = str(error)
  except BaseException:  # it may have an object of the program
    text = ""
  if isinstance(error, _Foreign | sandbox_pytest.NoTests):
    return text[:_MAX_MESSAGE]
  if isinstance(error, AssertionError):
    return f"assertion failed {text}".strip()[:_MAX_MESSAGE]
  return f"{type(error).__name__}: {text}"[:_MAX_MESSAGE]


def judge(job: dict[str, Any], start: Callable[[], Program]) -> dict[str, Any]:
  """Run tests of a program.

  Args:
    job: the program and its tests.
    start: starts the process that holds the program.

  Returns:
    What failed, or nothing; whether that is the fault of the tests, and
    whether an object of the program could not be compared.
  """
  try:
    for name in "setup", "tests":
      _compiled(job, name)
    if job["entry_point"]:
      compile(job["entry_point"], "entry_point", "eval")
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    return {"failure": _message(error), "is_of_tests": True, "is_plain": True}
  failure, is_of_tests, program = "", False, None
  try:
    program = start()
    _run(program, job)
  except BaseException as error:
    failure = _message(error)
    if program is not None:
      is_of_tests = _is_of_tests(error, program, job["setup"] + job["tests"])
  return {
    "failure": failure,
    "is_of_tests": is_of_tests,
    "is_plain": program is None or program.is_plain,
  }
