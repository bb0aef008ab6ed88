"""Code of the user, which a config names and which may do anything."""

from collections.abc import Callable, Iterator
import contextlib
import importlib
import sys
import threading
import traceback
import types
from typing import Any

from jaxrl_async.config import sections

_SLOW_S = 5.0
_NOT_OF_THE_USER = {"jaxrl_async", "importlib", "runpy"}


class UserCodeError(ValueError):
  """Code of the user raised an error, or ended the process.

  The message is one line, with the place in that code if it is known.
  """


@contextlib.contextmanager
def announced(what: str, after_s: float = _SLOW_S) -> Iterator[None]:
  """Say on stderr what is being imported in the block, if that takes long."""
  line = f"still importing {what} after {after_s:g} s"
  timer = threading.Timer(
    after_s, lambda: print(line, file=sys.stderr, flush=True)
  )
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


@contextlib.contextmanager
def told() -> Iterator[None]:
  """Turn whatever code of the user does in the block into a UserCodeError.

  A ConfigError stays what it is: it says what is wrong, in one line.
  """
  try:
    yield
  except sections.ConfigError:
    raise
  except (Exception, SystemExit) as error:
    raise UserCodeError(place(error) + reason(error)) from error


def module(name: str) -> types.ModuleType:
  """Import a module.

  Raises:
    UserCodeError: it cannot be imported.
  """
  with told(), announced(f"the module {name}"):
    return importlib.import_module(name)


def function(name: str, unknown: str) -> Callable[..., Any]:
  """Import the function of a name of the form module:function.

  Args:
    name: as the config gives it. The module has to be in the directories of
      `sys.path`.
    unknown: the message if the name has another form.

  Raises:
    UserCodeError: there is no such function.
  """
  module_name, _, function_name = name.partition(":")
  if not (module_name and function_name):
    raise UserCodeError(unknown)
  try:
    found = getattr(module(module_name), function_name, None)
  except UserCodeError as error:
    raise UserCodeError(
      f"{sections.shown(name)} cannot be imported: {error}"
    ) from error
  if not callable(found):
    raise UserCodeError(
      f"{module_name} has no function {sections.shown(function_name)}"
    )
  return found


def place(error: BaseException, *module_names: str) -> str:
  """Return the file and line in code of the user that raised, or "".

  It ends with a colon. For a SyntaxError it is the place of that, wherever it
  is.

  Args:
    error: what was raised.
    module_names: modules of the user. By default it is the first one that is
      none of this package and does not import others.
  """
  if isinstance(error, SyntaxError):
    return f"{error.filename}, line {error.lineno}: "
  found = ""
  for frame, line in traceback.walk_tb(error.__traceback__):
    name = str(frame.f_globals.get("__name__"))
    if not module_names and name.partition(".")[0] not in _NOT_OF_THE_USER:
      module_names = (name,)
    if name in module_names:
      found = f"{frame.f_code.co_filename}, line {line}: "
  return found


def reason(error: BaseException) -> str:
  """Return type and message of an error in one line."""
  message = error.msg if isinstance(error, SyntaxError) else str(error)
  return f"{type(error).__name__}: {message}".partition("\n")[0]
