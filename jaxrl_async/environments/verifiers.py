"""Environments of the package verifiers (extra `verifiers`): their tasks.

The package runs in a process of its own, `verifiers_worker`, unchanged.
"""

from collections.abc import Mapping
import importlib.util
from typing import Any

from jaxrl_async.environments import worker

WORKER = "jaxrl_async.environments.verifiers_worker"
# The column of a row that says which task it is.
COLUMN = "verifiers"


class UnusableError(ValueError):
  """An environment cannot be used; the message is one line."""


def rows(
  taskset: str, options: Mapping[str, Any], params: Mapping[str, Any]
) -> list[dict[str, Any]]:
  """Return the tasks of an environment as rows of a dataset.

  Args:
    taskset: name of a module or of an installed package.
    options: settings of its config.
    params: the other settings, as in a file of the package, and `select` and
      `sampling`.

  Raises:
    UnusableError: the package is missing, or the environment is.
  """
  if importlib.util.find_spec("verifiers") is None:
    raise UnusableError(
      "verifiers: needs the package verifiers; pip install"
      " jaxrl_async[verifiers]"
    )
  try:
    answer = worker.ask_once(
      WORKER,
      {
        "what": "rows",
        "taskset": taskset,
        "options": dict(options),
        "params": dict(params),
      },
    )
  except worker.WorkerError as error:
    raise UnusableError(f"verifiers:{taskset}: {error}") from error
  if "refused" in answer:
    raise UnusableError(f"verifiers:{taskset}: {answer['refused']}")
  return answer["rows"]
