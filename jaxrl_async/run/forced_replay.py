"""Checks stored trajectories against the weights, without generating them.

This needs neither the same engine nor the same bits as the run. Each token is
given its context ("teacher forcing"), and must be the one that its random
number draws from the weights which the record names for it.
"""

from collections.abc import Iterator
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async import types
from jaxrl_async.coordination import recorded_schedule
from jaxrl_async.coordination import run_schedule
from jaxrl_async.engine import sampling
from jaxrl_async.run import replay_differences
from jaxrl_async.training import draw_check
from jaxrl_async.training import trainer as trainer_lib

TOLERANCE = 1e-4  # of logprobs, and of the place in a CDF
_MOST_TOKENS = 2**20  # of trajectories that are measured at a time


class ForcedReplay:
  """Checks trajectories; see `stored_groups` for the interface.

  Attributes:
    num_restored: tokens of the groups that were closed.
    num_checked: tokens that were checked. Those of versions before the first
      one are not.
    num_at_boundary: those of them that other rounding could have drawn
      differently.
    largest_error: of a logprob.
  """

  num_generated = 0

  def __init__(
    self,
    trainer: trainer_lib.Trainer,
    seed: int,
    workdir: pathlib.Path,
    first_version: int,
  ):
    """Prepare to check the trajectories of a run.

    Args:
      trainer: its weights check the tokens that they drew.
      seed: of the run.
      workdir: of the run.
      first_version: the first version whose tokens can be checked.
    """
    self.num_restored = self.num_checked = self.num_at_boundary = 0
    self.largest_error = 0.0
    self._workdir = workdir
    self._first_version = first_version
    self._check = draw_check.DrawCheck(trainer)
    self._row = trainer.batch_settings.tokens_per_row
    self._draw = jax.jit(functools.partial(_uniforms, seed, self._row))
    self._open: dict[int, list[types.RolloutGroup]] = {}  # by train step
    self._of_version: dict[int, list[tuple[int, types.Trajectory]]] = {}

  def open(self, step: recorded_schedule.ScheduledStep) -> None:
    """Read the groups of a train step.

    Raises:
      ScheduleError: they were not stored.
    """
    groups = run_schedule.read_trajectories(self._workdir, step.step)
    self._open[step.step] = groups
    for group in groups:
      for trajectory in group.trajectories:
        versions = trajectory.policy_versions[trajectory.loss_mask]
        for version in np.unique(versions).tolist():
          if version >= self._first_version:
            found = self._of_version.setdefault(version, [])
            found.append((group.index, trajectory))

  def close(
    self, step: recorded_schedule.ScheduledStep
  ) -> list[types.RolloutGroup]:
    """Return the groups of a train step."""
    groups = self._open.pop(step.step)
    self.num_restored += sum(g.num_completion_tokens for g in groups)
    return groups

  def write(self, version: int) -> Iterator[int]:
    """Check every token of a version, and yield how many were checked.

    Raises:
      Difference: a token is not the one that had to be drawn.
    """
    waiting = self._of_version.pop(version, [])
    most = max(1, _MOST_TOKENS // self._row)
    for start in range(0, len(waiting), most):
      part = waiting[start : start + most]
      trajectories = [trajectory for _, trajectory in part]
      uniforms = [
        np.asarray(self._draw(index, t.member))[: len(t.tokens)]
        for index, t in part
      ]
      measured = self._check.measure(trajectories, uniforms)
      for (index, trajectory), logprobs, gaps in zip(
        part, *measured, strict=True
      ):
        wrong = self._look_at(version, trajectory, logprobs, gaps)
        if wrong:
          raise replay_differences.Difference(
            f"version {version}: group {index}, member {trajectory.member}:"
            f" {wrong}"
          )
      yield self.num_checked

  def _look_at(
    self,
    version: int,
    trajectory: types.Trajectory,
    logprobs: np.ndarray,
    gaps: np.ndarray,
  ) -> str:
    """Count the tokens of a version, and say which is wrong, if one is."""
    mine = np.flatnonzero(trajectory.policy_versions == version)
    errors = np.abs(logprobs - trajectory.behavior_logprobs)[mine]
    self.num_checked += len(mine)
    self.num_at_boundary += int(np.count_nonzero(gaps[mine]))
    self.largest_error = max(self.largest_error, float(errors.max()))
    # A NaN is wrong too.
    wrong = mine[~((errors <= TOLERANCE) & (gaps[mine] <= TOLERANCE))]
    if not wrong.size:
      return ""
    at = int(wrong[0])
    return (
      f"token {at} was drawn with logprob"
      f" {trajectory.behavior_logprobs[at]:.6f} and has {logprobs[at]:.6f}; its"
      f" random number is {gaps[at]:.1e} outside of its part of the CDF"
    )


def _uniforms(
  seed: int, length: int, group: jax.Array, member: jax.Array
) -> jax.Array:
  """Return the numbers [length] that draw the tokens of a trajectory."""
  keys = sampling.row_keys(
    jnp.int32(seed),
    jnp.full(1, sampling.Stream.TRAIN),
    jnp.reshape(group, 1),
    jnp.reshape(member, 1),
  )
  positions = jnp.arange(length, dtype=jnp.int32)
  return sampling.uniforms(jnp.repeat(keys, length, axis=0), positions)
