"""Conversion of outstanding groups between a run and its checkpoints."""

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.storage import outstanding as outstanding_lib

_RUNNING, _FINISHED = "running", "finished"


def outstanding(
  buffer: buffer_lib.Buffer, rollout: rollout_side.RolloutSide
) -> list[outstanding_lib.OutstandingGroup]:
  """Return every outstanding group; the rollout side must be paused."""
  # First, because asking for groups may end one, which leaves the buffer.
  running = rollout.groups()
  state = buffer.state()
  groups = [(_RUNNING, running[a.index]) for a in state.running]
  groups += [(_FINISHED, group) for group in state.finished]
  return [
    outstanding_lib.OutstandingGroup(
      admission=group.admission, status=status, group=group
    )
    for status, group in groups
  ]


def count_tokens(groups: list[outstanding_lib.OutstandingGroup]) -> int:
  """Return the number of completion tokens in these groups."""
  return sum(g.group.num_completion_tokens for g in groups if g.group)


def running(
  groups: list[outstanding_lib.OutstandingGroup],
) -> list[types.RolloutGroup]:
  """Return the groups that were running, which continue where they stopped."""
  return [g.group for g in groups if g.status == _RUNNING and g.group]


def buffer_state(
  groups: list[outstanding_lib.OutstandingGroup],
  *,
  groups_per_step: int,
  next_step: int,
  next_index: int,
) -> buffer_lib.BufferState:
  """Return the state from which the buffer continues."""
  return buffer_lib.BufferState(
    groups_per_step=groups_per_step,
    next_step=next_step,
    next_index=next_index,
    running=[group.admission for group in running(groups)],
    finished=[g.group for g in groups if g.status == _FINISHED and g.group],
  )
