"""The groups that a run has stored, in place of those that are generated.

A replay takes its groups from here or from `regeneration`. Both have the same
methods. `open` is called for each train step before the first version that
wrote a part of it, `write` for each version, while the trainer has its weights,
and `close` for each train step after that of its own version.
"""

from collections.abc import Iterator
import pathlib

from jaxrl_async import types
from jaxrl_async.coordination import recorded_schedule
from jaxrl_async.coordination import run_schedule


class StoredGroups:
  """Reads the trajectories of a train step when it is trained.

  Attributes:
    num_restored: their tokens. None is generated or checked.
  """

  num_generated = num_checked = 0

  def __init__(self, workdir: pathlib.Path):
    """Prepare to read the trajectories of a run."""
    self.num_restored = 0
    self._workdir = workdir

  def open(self, step: recorded_schedule.ScheduledStep) -> None:
    """Do nothing."""

  def write(self, version: int) -> Iterator[int]:
    """Generate nothing."""
    del version
    return iter(())

  def close(
    self, step: recorded_schedule.ScheduledStep
  ) -> list[types.RolloutGroup]:
    """Return the groups of a train step.

    Raises:
      ScheduleError: they were not stored.
    """
    groups = run_schedule.read_trajectories(self._workdir, step.step)
    self.num_restored += sum(g.num_completion_tokens for g in groups)
    return groups
