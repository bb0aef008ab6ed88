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
from jaxrl_async.storage import checkpoint_places as places

_DAMAGED = ".damaged"


class Whole(NamedTuple):
  """A checkpoint whose files are those that were written.

  Attributes:
    step: of the checkpoint.
    host_state: what it holds.
    damaged: the newer steps that were passed over.
    verified: for `checkpoint.restore`, so that nothing is verified twice.
  """

  step: int
  host_state: dict[str, Any]
  damaged: tuple[int, ...]
  verified: checkpoint.Verified


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
      verified = checkpoint.verify(directory, step)
      host_state = checkpoint.host_state(directory, step, verified)
    except checkpoint.DamagedError as error:
      damaged[step] = error
      continue
    for error in damaged.values():
      note(f"WARNING: {error}; going back to the checkpoint of step {step}")
    return Whole(step, host_state, tuple(damaged), verified)
  for error in damaged.values():
    raise error
  return None


def set_aside(directory: pathlib.Path, steps: Sequence[int]) -> None:
  """Rename damaged checkpoints, so that nobody takes them for whole ones.

  What a crash has left of such a step under its old name goes with it: the run
  goes on from an earlier step and comes to this one anew. What was set aside
  before is removed, because it would fill the disk.
  """
  if not steps:
    return
  before = [*directory.glob(f"*{_DAMAGED}")]
  for step in steps:
    for name in (f"{step}", f"{step}{places.OLD}"):
      target = directory / f"{name}{_DAMAGED}"
      shutil.rmtree(target, ignore_errors=True)
      if (directory / name).exists():
        (directory / name).rename(target)
  for path in before:
    if int(path.name.partition(".")[0]) not in steps:
      shutil.rmtree(path, ignore_errors=True)
