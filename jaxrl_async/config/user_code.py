"""Modules of the user, which a config names and which may do anything."""

from collections.abc import Iterator
import contextlib
import importlib
import sys
import threading
import types

_SLOW_S = 5.0


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


def module(name: str) -> types.ModuleType:
  """Import a module.

  Raises:
    ImportError: it raised an error, or ended the process, when it was imported.
      The message is one line, with the place.
  """
  try:
    with announced(f"the module {name}"):
      return importlib.import_module(name)
  except (Exception, SystemExit) as error:
    raise ImportError(_reason(name, error)) from error


def _reason(name: str, error: BaseException) -> str:
  """Describe an error that importing a module has raised, in one line."""
  message, place = str(error).partition("\n")[0], ""
  where = error.__traceback__
  while where is not None:
    frame = where.tb_frame
    if frame.f_globals.get("__name__") == name:
      place = f"{frame.f_code.co_filename}, line {where.tb_lineno}: "
    where = where.tb_next
  if isinstance(error, SyntaxError):
    message, place = error.msg, f"{error.filename}, line {error.lineno}: "
  if isinstance(error, ImportError):
    return place + message
  return f"{place}{type(error).__name__}: {message}"
