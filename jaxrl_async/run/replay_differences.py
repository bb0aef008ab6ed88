"""Where a replayed trajectory differs from the record, in words."""

import pathlib

import numpy as np

from jaxrl_async import types
from jaxrl_async.coordination import run_schedule


def of_trajectory(
  workdir: pathlib.Path,
  step: int,
  index: int,
  found: types.Trajectory,
  recorded: run_schedule.ScheduledTrajectory,
) -> str:
  """Return what is different about a trajectory; "" if nothing is.

  Args:
    workdir: of the run, which may have stored the trajectory.
    step: the train step that trained it.
    index: of its group.
    found: what the replay has generated.
    recorded: what the schedule says.
  """
  if (
    run_schedule.digest(found) == recorded.digest
    and found.finish_reason == recorded.finish_reason
  ):
    return ""
  try:
    groups = run_schedule.read_trajectories(workdir, step)
  except run_schedule.ScheduleError:
    return (
      f"the digest is another one; {recorded.num_tokens} tokens, ended by"
      f" {recorded.finish_reason}, were recorded, and there are"
      f" {len(found.tokens)}, ended by {found.finish_reason}"
      " (run.keep_trajectories=True would show the token)"
    )
  stored = next(
    trajectory
    for group in groups
    for trajectory in group.trajectories
    if group.index == index and trajectory.member == recorded.member
  )
  return _first(stored, found)


def _first(then: types.Trajectory, now: types.Trajectory) -> str:
  """Return where two versions of a trajectory differ first, in words."""
  for position in range(min(len(then.tokens), len(now.tokens))):
    for name in types.TOKEN_ARRAYS:
      before, after = (getattr(t, name)[position] for t in (then, now))
      if not np.array_equal(before, after):
        return f"{name}[{position}] was {before!r} and is {after!r}"
  if len(then.tokens) != len(now.tokens):
    return f"it had {len(then.tokens)} tokens and has {len(now.tokens)}"
  return f"it ended by {then.finish_reason} and ends by {now.finish_reason}"
