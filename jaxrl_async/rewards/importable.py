"""Rewards of a script or a notebook, as functions that other processes can use.

The processes that score import a function by the name of its module. The main
script has no such name in them, so it is imported once more under its own. A
notebook has no file. Its functions are sent as code.
"""

from collections.abc import Callable
import functools
import importlib
import pathlib
import pickle
import sys
import types
from typing import Any

import cloudpickle

from jaxrl_async.config import user_code

_importing: set[str] = set()  # main scripts that are being imported as modules


class OfNotebook:
  """A function that no file has, which other processes get as code.

  It is taken as it is when this is made, together with the variables of the
  notebook that it reads. Whoever unpickles it gets the function itself.
  """

  def __init__(self, wrapped: types.FunctionType):
    """Take the function.

    Raises:
      ValueError: it reads a variable that cannot be sent.
    """
    try:
      self._code = cloudpickle.dumps(wrapped)
    except (TypeError, pickle.PicklingError) as error:
      raise ValueError(
        f"{wrapped.__name__} reads a variable that cannot be sent to the"
        f" processes that score: {error}"
      ) from error
    self._wrapped = wrapped
    functools.update_wrapper(self, wrapped)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Call the function."""
    return self._wrapped(*args, **kwargs)

  def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    """Unpickle as the function."""
    return cloudpickle.loads, (self._code,)


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
  """Return a reward that other processes can unpickle.

  They import it by the name of its module. A function of a notebook, or of
  another program without a file, is sent as code.

  Raises:
    ValueError: no process but this one can have the function. The message says
      what to do.
  """
  name = getattr(reward, "__qualname__", "")
  if not isinstance(reward, types.FunctionType) or not name.isidentifier():
    raise ValueError(
      f"{name or reward!r:.60} is no function of a module, which the processes"
      " that score could import; define it with def, at the top of a file or a"
      " cell"
    )
  if reward.__module__ != "__main__":
    return reward
  script = getattr(sys.modules["__main__"], "__file__", None)
  if script is None:
    return OfNotebook(reward)
  if not pathlib.Path(script).stem.isidentifier():
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
