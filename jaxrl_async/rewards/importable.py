"""Rewards of a script, as functions that other processes can import.

The processes that score import a function by the name of its module. The main
script has no such name in them, so it is imported once more under its own.
"""

from collections.abc import Callable
import importlib
import pathlib
import sys
import types
from typing import Any

from jaxrl_async.config import user_code

_importing: set[str] = set()  # main scripts that are being imported as modules


def check_main_script() -> None:
  """Check that this is not called by a script that is only being imported.

  Raises:
    ValueError: the script does its work when it is imported, as every process
      that scores would.
  """
  if _importing:
    raise ValueError(
      "its script trains when it is imported; put the call of train under"
      ' if __name__ == "__main__":'
    )


def function(reward: Callable[..., Any]) -> Callable[..., Any]:
  """Return a reward that other processes can import by its module's name.

  Raises:
    ValueError: no process but this one has the function. The message says what
      to do.
  """
  name = getattr(reward, "__qualname__", "")
  if not isinstance(reward, types.FunctionType) or not name.isidentifier():
    raise ValueError(
      f"{name or reward!r:.60} is no function of a module, which the processes"
      " that score could import; define it with def, at the top of a file"
    )
  if reward.__module__ != "__main__":
    return reward
  script = getattr(sys.modules["__main__"], "__file__", None)
  if script is None or not pathlib.Path(script).stem.isidentifier():
    raise ValueError(
      f"{name} is defined where the processes that score cannot import it; put"
      " it into a file whose name is that of a module, such as my_reward.py,"
      " and import it from there"
    )
  return getattr(_imported(pathlib.Path(script)), name)


def _imported(script: pathlib.Path) -> types.ModuleType:
  """Import the main script as a module."""
  directory = str(script.absolute().parent)
  if directory not in sys.path:
    sys.path.insert(0, directory)
  _importing.add(script.stem)
  try:
    with user_code.announced(f"{script} as a module"):
      module = importlib.import_module(script.stem)
  except SystemExit as error:
    raise ValueError(
      f"{script} ends the process when it is imported as a module; put what it"
      ' does under if __name__ == "__main__":'
    ) from error
  finally:
    _importing.discard(script.stem)
  found = getattr(module, "__file__", None)
  if found is None or not script.samefile(found):
    raise ValueError(
      f"the name of {script} is that of another module, {found}; rename the"
      " script"
    )
  return module
