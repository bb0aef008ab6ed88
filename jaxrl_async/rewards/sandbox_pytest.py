"""What tests in the sandbox define, run as pytest and unittest would.

pytest itself is not in there. Tests that import it get what most of them use:
`raises`, `approx`, `param`, `fail`, `mark.parametrize`, `mark.skip`, and marks
that change nothing. What else they use is missing, an error of their row.
"""

from collections.abc import Callable, Iterator, Sequence
import math
import re
import sys
import types
from typing import Any

_CASES = "jaxrl_cases"  # of a test with parameters


class NoTests(BaseException):
  """Tests do not test the program."""


def steps(names: dict[str, Any], text: str) -> Iterator[Any]:
  """Run the tests that a module defines; yield what each of them returns."""
  called = set(re.findall(r"(?<!def )\b(test\w*)\(", text))
  _hook(names.get("setup_module"), sys.modules["__main__"])
  for name, value in list(names.items()):
    if isinstance(value, type) and value.__module__ == "__main__":
      yield from _of_class(value, called)
    elif name.startswith("test") and isinstance(value, types.FunctionType):
      for case in _cases(value, called):
        _hook(names.get("setup_function"), value)
        yield value(**case)
        _hook(names.get("teardown_function"), value)
  _hook(names.get("teardown_module"), sys.modules["__main__"])


def _of_class(kind: type, called: set[str]) -> Iterator[Any]:
  outer = getattr(kind, _CASES, [{}])
  if hasattr(kind, "assertEqual") and outer:
    _run_suite(kind)
  if not kind.__name__.startswith("Test") or kind.__init__ != object.__init__:
    return
  _hook(getattr(kind, "setup_class", None), kind)
  owned = [name for base in reversed(kind.__mro__) for name in vars(base)]
  for name in dict.fromkeys(owned):
    own = getattr(kind, name, None)
    if isinstance(own, type) and own.__module__ == "__main__":
      yield from _of_class(own, called)
    elif name.startswith("test") and hasattr(own, "__code__"):
      for case in _cases(getattr(kind(), name), called, outer):
        instance = kind()
        test = getattr(instance, name)
        _hook(getattr(instance, "setup_method", None), test)
        yield test(**case)
        _hook(getattr(instance, "teardown_method", None), test)
  _hook(getattr(kind, "teardown_class", None), kind)


def _needed(function: Any) -> tuple[str, ...]:
  """Return the parameters without a default, apart from self."""
  code = function.__code__
  first = hasattr(function, "__self__")
  last = code.co_argcount - len(function.__defaults__ or ())
  return code.co_varnames[first:last]


def _hook(function: Any, about: Any) -> None:
  """Call a set-up with what it is for, if it wants to know."""
  if function is not None:
    function(*[about] * len(_needed(function)))


def _cases(
  function: Any, called: set[str], outer: Sequence[dict[str, Any]] = ({},)
) -> Iterator[dict[str, Any]]:
  """Yield the arguments of each call of a test, with those of its class."""
  cases = getattr(function, _CASES, [{}])
  for case in [case | own for case in outer for own in cases]:
    if missing := set(_needed(function)).difference(case):
      if function.__name__ in called:
        return  # a helper of other tests
      needs = ", ".join(sorted(missing))
      raise NoTests(
        f"{function.__name__} needs {needs}, which nothing gives it"
      )
    yield case


def _run_suite(case: type) -> None:
  """Run a class of unittest; raise the first thing that goes wrong."""
  import unittest  # the tests have imported it

  class Result(unittest.TestResult):
    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
      raised.append(err[1])

    addFailure = addError  # noqa: N815

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
      if err is not None:
        raised.append(err[1])

    def addUnexpectedSuccess(self, test: Any) -> None:  # noqa: N802
      raised.append(AssertionError("it should have failed"))

  raised: list[BaseException] = []
  unittest.defaultTestLoader.loadTestsFromTestCase(case).run(Result())
  if raised:
    raise raised[0]


# -- what is imported as pytest -----------------------------------------------


class _Raises:
  def __init__(self, kinds: Any, match: str | None):
    self._kinds, self._match = kinds, match

  def __enter__(self) -> "_Raises":
    return self

  def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
    assert error is not None, f"did not raise {self._kinds}"
    if not isinstance(error, self._kinds):
      return False
    said = str(error)
    assert not self._match or re.search(self._match, said), f"raised {said!r}"
    self.type, self.value = kind, error
    return True


def _raises(
  kinds: Any, function: Any = None, *args: Any, match: Any = None, **kwargs: Any
) -> _Raises:
  raised = _Raises(kinds, match)
  if function is not None:
    with raised:
      function(*args, **kwargs)
  return raised


class _Approx:
  __hash__ = None  # type: ignore[assignment]

  def __init__(self, expected: Any, rel: Any = None, abs: Any = None):
    self._expected = expected
    self._rel = (1e-6 if abs is None else 0.0) if rel is None else rel
    self._abs = 1e-12 if abs is None else abs

  def __repr__(self) -> str:
    return f"approx({self._expected!r})"

  def __eq__(self, actual: Any) -> bool:
    return self._is_near(actual, self._expected)

  def _is_near(self, actual: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
      if not isinstance(actual, dict) or actual.keys() != expected.keys():
        return False
      return all(self._is_near(actual[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
      if type(actual) is not type(expected) or len(actual) != len(expected):
        return False
      return all(map(self._is_near, actual, expected))
    if actual == expected:
      return True
    try:
      size = float(abs(expected))
      most = max(self._rel * size, self._abs)
      return math.isfinite(size) and float(abs(actual - expected)) <= most
    except TypeError:
      return False


class _Row(tuple):
  """The values of one case, as `pytest.param` gives them."""


class _Mark:
  def __getattr__(self, name: str) -> Callable[..., Any]:
    if name in ("skipif", "xfail", "usefixtures"):
      raise AttributeError(f"pytest.mark.{name} is not in the sandbox")

    def mark(*args: Any, **kwargs: Any) -> Any:
      if args and isinstance(args[0], type | types.FunctionType):
        if name == "skip":
          setattr(args[0], _CASES, [])
        return args[0]
      return lambda what: mark(what)

    return mark

  def parametrize(self, names: Any, values: Any, ids: Any = None) -> Any:
    if isinstance(names, str):
      names = names.replace(",", " ").split()
    rows = [
      dict(
        zip(
          names,
          x if len(names) > 1 or isinstance(x, _Row) else [x],
          strict=True,
        )
      )
      for x in values
    ]

    def mark(test: Any) -> Any:
      cases = getattr(test, _CASES, [{}])
      setattr(test, _CASES, [row | case for row in rows for case in cases])
      return test

    return mark


def _fail(reason: str = "") -> None:
  raise AssertionError(reason)


def module() -> types.ModuleType:
  """Return what tests get that import pytest."""
  found = types.ModuleType("pytest")
  vars(found).update(
    raises=_raises,
    approx=_Approx,
    param=lambda *values, id=None: _Row(values),
    mark=_Mark(),
    fail=_fail,
    main=lambda *_, **__: 0,  # they are run anyway
  )
  return found
