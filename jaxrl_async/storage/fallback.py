"""The newest checkpoint that is whole, where newer ones are damaged.

A disk may lose what it has confirmed, or return other bits. A damaged
checkpoint is never read. The writer that continues from an earlier one says
so, and sets the damaged ones aside, so that they take no place of a whole one.
"""

from collections.abc import Callable, Sequence
import pathlib
import shutil
from typing import Any, NamedTuple

from jaxrl_async.storage import checkpoint

_DAMAGED = ".damaged"


class Whole(NamedTuple):
  """A checkpoint whose files are those that were written.

  Attributes:
    step: of the checkpoint.
    host_state: what it holds.
    damaged: the newer steps that were passed over.
  """

  step: int
  host_state: dict[str, Any]
  damaged: tuple[int, ...]


def newest_whole(
  directory: pathlib.Path, note: Callable[[str], None]
) -> Whole | None:
  """Find the newest checkpoint that is whole; nothing is changed.

  Args:
    directory: directory of the run's checkpoints.
    note: is called with a message about each damaged checkpoint.

  Returns:
    The checkpoint, or None if there is none at all.

  Raises:
    DamagedError: all of them are damaged. The error is about the newest.
    CheckpointError: the newest one that is whole is of a newer version.
  """
  damaged: dict[int, checkpoint.DamagedError] = {}
  for step in reversed(checkpoint.steps(directory)):
    try:
      host_state = checkpoint.host_state(directory, step)
    except checkpoint.DamagedError as error:
      damaged[step] = error
      continue
    for error in damaged.values():
      note(f"WARNING: {error}; going back to the checkpoint of step {step}")
    return Whole(step, host_state, tuple(damaged))
  for error in damaged.values():
    raise error
  return None


def set_aside(directory: pathlib.Path, steps: Sequence[int]) -> None:
  """Rename damaged checkpoints, so that nobody takes them for whole ones."""
  for step in steps:
    target = directory / f"{step}{_DAMAGED}"
    shutil.rmtree(target, ignore_errors=True)
    (directory / str(step)).rename(target)
