"""Where a replay differs from the record, in words."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import timing_record


class Difference(supervisor_lib.RunError):
  """The replay has come to something else than the record; it says what."""


def of_groups(
  step: recorded_timing.RecordedStep,
  found: list[types.RolloutGroup],
) -> str:
  """Return what is different about the groups of a step; "" if nothing is."""
  where = f"train step {step.step}"
  if len(found) != len(step.groups):
    return f"{where}: it had {len(step.groups)} groups, there are {len(found)}"
  for group, recorded in zip(found, step.groups, strict=True):
    if group.admission != recorded.admission:
      return (
        f"{where}: {recorded.admission} was recorded, not {group.admission}"
      )
    at = f"{where}, group {group.index}"
    if group.prompt.prompt_id != recorded.prompt_id:
      return (
        f"{at}: its prompt was {recorded.prompt_id} and is"
        f" {group.prompt.prompt_id}"
      )
    members = [t.member for t in group.trajectories]
    then = [t.member for t in recorded.trajectories]
    if members != then:
      return f"{at}: its members were {then} and are {members}"
    for trajectory, one in zip(
      group.trajectories, recorded.trajectories, strict=True
    ):
      what = _of_trajectory(trajectory, one)
      if what:
        return f"{at}, member {one.member}: {what}"
  return ""


def _of_trajectory(
  found: types.Trajectory,
  recorded: recorded_timing.RecordedTrajectory,
) -> str:
  """Return what is different about a trajectory; "" if nothing is."""
  then, now = map(_trained, (recorded.reward, found.reward))
  if then != now:
    return f"its score and token scores were {then} and are {now}"
  if (
    timing_record.digest(found) == recorded.digest
    and found.finish_reason == recorded.finish_reason
  ):
    return ""
  return (
    f"the digest is another one; {recorded.num_tokens} tokens, ended by"
    f" {recorded.finish_reason}, were recorded, and there are"
    f" {len(found.tokens)}, ended by {found.finish_reason}"
  )


def _trained(reward: types.Reward | None) -> Any:
  """Return what the timing record has of a reward."""
  return reward and (reward.score, reward.token_scores)


def of_sums(
  step: recorded_timing.RecordedStep, found: Mapping[str, list[Any]]
) -> str:
  """Return which number of a step is different; "" if none is.

  Args:
    step: what the timing record says.
    found: what the updates of the replay measured, as
      `timing_record.plain_sums` returns it.
  """
  for name, recorded in step.sums.items():
    if not recorded_timing.are_equal(found.get(name), recorded):
      return (
        f"train step {step.step}: {name} was {recorded} and is"
        f" {found.get(name)}"
      )
  return ""


def of_state(found: Mapping[str, np.ndarray], stored: Mapping[str, Any]) -> str:
  """Return which array of a train state is another one; "" if none is.

  Args:
    found: arrays of the replay by name, in host memory.
    stored: those of the checkpoint, on any devices.
  """
  for name, array in stored.items():
    here, there = found[name], np.asarray(array)
    if here.tobytes() == there.tobytes():
      continue
    with np.errstate(invalid="ignore"):
      difference = np.abs(here.astype(np.float64) - there.astype(np.float64))
    is_other = ~(difference == 0)
    return (
      f"{name} has {np.count_nonzero(is_other)} numbers of {here.size} that"
      f" differ, by up to {np.max(difference):.1e}"
    )
  return ""
