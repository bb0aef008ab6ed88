"""A group between its admission and the buffer, as the coordinator keeps it."""

from collections.abc import Iterable
import dataclasses
import traceback as traceback_lib

import numpy as np

from jaxrl_async import types
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages


@dataclasses.dataclass(kw_only=True, slots=True)
class Failure:
  """Why a group failed.

  Attributes:
    reason: one line for the ledger.
    traceback: the traceback for the error message of the run.
  """

  reason: str
  traceback: str


@dataclasses.dataclass(kw_only=True, slots=True)
class RunningGroup:
  """A group that has not reached the buffer.

  Attributes:
    episodes: the episode of each member.
    trajectories: the trajectory of each member as last reported.
    unfinished: the members whose episodes have not ended.
    replica: the replica that generates the unfinished members. None while they
      wait for a replica.
    score: the handle of the group's rewards. None until all members are
      finished.
    failure: set as soon as the group has failed. The group ends when its
      replica has reported the members it was still generating.
  """

  admission: types.Admission
  prompt: types.Prompt
  times_s: dict[str, float]
  episodes: dict[int, episode_lib.Turns] = dataclasses.field(
    default_factory=dict
  )
  trajectories: dict[int, types.Trajectory] = dataclasses.field(
    default_factory=dict
  )
  unfinished: set[int] = dataclasses.field(default_factory=set)
  replica: str | None = None
  score: service_lib.ScoreHandle | None = None
  failure: Failure | None = None

  def group(self) -> types.RolloutGroup:
    """Return the group with its trajectories so far, in order of member."""
    return types.RolloutGroup(
      admission=self.admission,
      prompt=self.prompt,
      trajectories=[self.trajectories[m] for m in sorted(self.trajectories)],
      times_s=dict(self.times_s),
    )

  def add(self, replica: str, written: messages.Written) -> None:
    """Append what a replica reported of a member.

    Raises:
      ValueError: there are tokens between what is known and what was reported.
    """
    new = written.trajectory
    known = self.trajectories[new.member]
    if written.begin != len(known.tokens):
      raise ValueError(
        f"{replica} reported group {written.group}, member {new.member} from"
        f" token {written.begin}, but {len(known.tokens)} are known"
      )
    self.trajectories[new.member] = joined(known, new, replica)

  def abort(self, members: Iterable[int]) -> None:
    """Mark these members as aborted and no longer unfinished."""
    for member in members:
      self.trajectories[member] = dataclasses.replace(
        self.trajectories[member], finish_reason=types.FinishReason.ABORTED
      )
      self.unfinished.remove(member)


def joined(
  known: types.Trajectory, new: types.Trajectory, replica: str
) -> types.Trajectory:
  """Return a trajectory with what a replica has written after it."""
  # This is called for every report of every trajectory, and
  # `dataclasses.replace` would take half of its time.
  return types.Trajectory(
    member=known.member,
    tokens=np.concatenate((known.tokens, new.tokens)),
    loss_mask=np.concatenate((known.loss_mask, new.loss_mask)),
    behavior_logprobs=np.concatenate(
      (known.behavior_logprobs, new.behavior_logprobs)
    ),
    policy_versions=np.concatenate(
      (known.policy_versions, new.policy_versions)
    ),
    finish_reason=new.finish_reason,
    reward=known.reward,
    writers=_and_writer(known.writers, replica, new.num_completion_tokens),
  )


def _and_writer(
  writers: tuple[tuple[str, int], ...], replica: str, num_tokens: int
) -> tuple[tuple[str, int], ...]:
  """Return the writers of a trajectory after a replica has added tokens."""
  if not num_tokens:
    return writers
  if writers and writers[-1][0] == replica:
    return *writers[:-1], (replica, writers[-1][1] + num_tokens)
  return *writers, (replica, num_tokens)


def failure_of(error: episode_lib.EpisodeError) -> Failure:
  """Return the failure of a group one of whose episodes raised this error."""
  lines = traceback_lib.format_exception(error.__cause__ or error)
  return Failure(reason=f"episode: {error}", traceback="".join(lines))
