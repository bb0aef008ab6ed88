"""A group between its admission and the buffer, as the coordinator keeps it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import traceback as traceback_lib
from typing import NamedTuple

import numpy as np

from jaxrl_async import types
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import messages

# A piece shares the memory of its whole report, so it must not be kept long.
_MAX_PIECES = 8
HAD_FAILED = "the group had failed before the checkpoint"


class Piece(NamedTuple):
  """What a replica has reported of a trajectory since its report before.

  Attributes:
    replica: that wrote it.
    new: the new tokens, in a trajectory of their own. The policy generated all
      of them, in one turn.
  """

  replica: str
  new: types.Trajectory


@dataclasses.dataclass(kw_only=True, slots=True)
class RunningGroup:
  """A group that has not reached the buffer.

  A member whose episode has begun anew has several trajectories, its branches.
  Each is kept under its own number (`types.Trajectory.member`), like a member,
  and only the last one may be unfinished.

  Attributes:
    limit: a turn ends when its trajectory has this many tokens.
    episodes: the episode of each member, under the number of its first branch.
    unfinished: the members whose episodes have not ended.
    pending: those of them whose episodes have to answer.
    ends: of the last turn of each branch, what ends it besides what ends all.
    first: the first prompt of the member that was started last.
    replica: the replica that generates the other unfinished members, and that
      gets the next turns of those that are pending. None while they wait for a
      replica.
    score: the handle of the group's rewards. None until all members are
      finished.
    failure: set as soon as the group has failed, by `fail`. The group ends when
      its replica has reported the members it was still generating.
    patience: how long its members may still be generated; None is for ever.
  """

  admission: types.Admission
  prompt: types.Prompt
  limit: int
  times_s: dict[str, float]
  episodes: dict[int, environment_lib.Conversation] = dataclasses.field(
    default_factory=dict
  )
  unfinished: set[int] = dataclasses.field(default_factory=set)
  pending: set[int] = dataclasses.field(default_factory=set)
  ends: dict[int, messages.Ends] = dataclasses.field(default_factory=dict)
  first: episode_lib.First | None = None
  replica: str | None = None
  score: service_lib.ScoreHandle | None = None
  failure: service_lib.RewardFailure | None = None
  patience: supervisor_lib.Deadline | None = None
  # A member's trajectory is what is known of it and the pieces after that.
  _known: dict[int, types.Trajectory] = dataclasses.field(default_factory=dict)
  _pieces: dict[int, list[Piece]] = dataclasses.field(default_factory=dict)

  def trajectory(self, member: int) -> types.Trajectory:
    """Return the trajectory of a member as last reported."""
    self._join([member])
    return self._known[member]

  def last_completion(
    self, member: int, num_cached: int
  ) -> episode_lib.Written:
    """Return a copy of what was generated in a member's last turn.

    So many tokens of it were cached.
    """
    new = [piece.new for piece in self._pieces.get(member, ())]
    completion = episode_lib.last_completion(self._known[member], *new)
    return completion._replace(num_cached=num_cached)

  def set(self, trajectory: types.Trajectory) -> None:
    """Replace the trajectory of a member, or add the first one."""
    self._known[trajectory.member] = trajectory
    self._pieces.pop(trajectory.member, None)

  def has(self, member: int) -> bool:
    """Return whether the member has a trajectory."""
    return member in self._known

  def has_begun(self, member: int) -> bool:
    """Return whether the episode of the member has shown its first prompt."""
    return self.has(member) and len(self._known[member].tokens) > 0

  def group(self) -> types.RolloutGroup:
    """Return the group with its trajectories so far, in order of member."""
    self._join(list(self._pieces))
    return types.RolloutGroup(
      admission=self.admission,
      prompt=self.prompt,
      trajectories=[
        self._with_events(m)
        for m in sorted(self._known, key=lambda m: (m % types.MEMBERS, m))
      ],
      times_s=dict(self.times_s),
    )

  def _with_events(self, member: int) -> types.Trajectory:
    """Return a trajectory with the events of its episode so far."""
    trajectory, episode = self._known[member], self.episodes.get(member)
    if episode is None or episode.context is None:
      return trajectory
    if (events := episode.context.events) != trajectory.events:
      trajectory = dataclasses.replace(trajectory, events=events)
      self._known[member] = trajectory
    return trajectory

  @property
  def writable(self) -> list[int]:
    """The members that a replica can generate now, in order."""
    return sorted(self.unfinished - self.pending)

  @property
  def num_starting(self) -> int:
    """The number of members whose episodes have to show their first prompt."""
    return sum(not self.has_begun(member) for member in self.pending)

  def has_episode(self, episode: environment_lib.Conversation) -> bool:
    """Return whether it is the episode of a member."""
    return self.episodes.get(episode.key[1] % types.MEMBERS) is episode

  def branches(self, member: int) -> list[types.Trajectory]:
    """Return the branches of a member up to this one, as last reported."""
    numbers = range(member % types.MEMBERS, member + 1, types.MEMBERS)
    return [self.trajectory(number) for number in numbers]

  def follow(self, member: int, answer: episode_lib.Answer) -> int:
    """Continue a member's last branch, or begin its next one.

    Returns:
      The number of the branch that goes on.
    """
    assert answer.tokens is not None
    if not answer.is_anew:
      self.set(episode_lib.extend(self.trajectory(member), answer.tokens))
      return member
    self.unfinished.discard(member)
    episode = self.episodes[member % types.MEMBERS]
    member += types.MEMBERS
    episode.key = self.admission.index, member
    self.start(member, answer.tokens)
    self.unfinished.add(member)
    return member

  def start(self, member: int, tokens: np.ndarray) -> None:
    """Begin a trajectory of a member with the first prompt of it.

    Raises:
      EpisodeError: it leaves no room.
    """
    if len(tokens) >= self.limit:
      raise episode_lib.no_room(tokens, self.limit)
    if self.first is None or not self.first.is_equal(tokens):
      self.first = episode_lib.First(tokens)
    self.set(self.first.trajectory(member))

  def finish(self, member: int) -> None:
    """Mark a member as finished, and end its episode if it has not ended."""
    self.unfinished.discard(member)
    self.pending.discard(member)
    self.episodes[member % types.MEMBERS].close()

  def fail(self, failure: service_lib.RewardFailure) -> None:
    """Let the group fail: its episodes end, and those pending are aborted."""
    self.failure = failure
    for episode in self.episodes.values():
      episode.close()
    self.abort(list(self.pending))

  def add(self, begin: int, piece: Piece) -> None:
    """Append what a replica reported after the first `begin` tokens.

    Raises:
      ValueError: there are tokens between what is known and what was reported.
    """
    member = piece.new.member
    pieces = self._pieces.setdefault(member, [])
    num_known = len(self._known[member].tokens)
    for earlier in pieces:
      num_known += len(earlier.new.tokens)
    if begin != num_known:
      raise ValueError(
        f"{piece.replica} reported group {self.admission.index}, member"
        f" {member} from token {begin}, but {num_known} are known"
      )
    pieces.append(piece)
    if len(pieces) >= _MAX_PIECES:
      self._join([member])

  @property
  def is_overdue(self) -> bool:
    """Whether a member is still generated, for longer than it may be."""
    if self.patience is None or self.failure is not None:
      return False
    return bool(self.unfinished) and self.patience.next_wait_s() == 0

  def abort(self, members: Iterable[int]) -> None:
    """Mark these members as aborted and no longer unfinished."""
    for member in members:
      self._known[member] = dataclasses.replace(
        self.trajectory(member), finish_reason=types.FinishReason.ABORTED
      )
      self.unfinished.remove(member)
      self.pending.discard(member)

  def _join(self, members: Sequence[int]) -> None:
    """Append their pieces to what is known of these members."""
    pieces = {m: self._pieces.pop(m) for m in members if m in self._pieces}
    if pieces:
      known = [self._known[member] for member in pieces]
      both = zip(pieces, joined(known, list(pieces.values())), strict=True)
      self._known.update(both)


def joined(
  known: Sequence[types.Trajectory], pieces: Sequence[Sequence[Piece]]
) -> list[types.Trajectory]:
  """Return trajectories with what replicas have written after them.

  There is at least one piece. The arrays of what is returned share one memory.
  """
  # This is done for every trajectory. One concatenation for all of them takes
  # a quarter of the time, and `dataclasses.replace` would double it.
  parts = [
    part
    for one, its in zip(known, pieces, strict=True)
    for part in (one, *[piece.new for piece in its])
  ]
  tokens, mask, logprobs, versions = [
    np.concatenate([getattr(part, name) for part in parts])
    for name in types.TOKEN_ARRAYS
  ]
  found, end = [], 0
  for one, its in zip(known, pieces, strict=True):
    writers, builds, reason = one.writers, one.cache_builds, one.finish_reason
    steered = one.steered
    start, end = end, end + len(one.tokens)
    for replica, new in its:
      writers = _and_writer(writers, replica, len(new.tokens))
      if new.cache_builds:
        # The replica's own, of which the first may have been reported before.
        builds = tuple(b for b in builds if b.length < end - start)
        builds += new.cache_builds
      steered += new.steered
      end += len(new.tokens)
      reason = new.finish_reason
    found.append(
      types.Trajectory(
        member=one.member,
        tokens=tokens[start:end],
        loss_mask=mask[start:end],
        behavior_logprobs=logprobs[start:end],
        policy_versions=versions[start:end],
        finish_reason=reason,
        reward=one.reward,
        writers=writers,
        steered=steered,
        cache_builds=builds,
        events=one.events,
      )
    )
  return found


def scored(
  group: types.RolloutGroup,
  outcome: Sequence[types.Reward | service_lib.RewardFailure],
) -> types.RolloutGroup:
  """Return a group with its rewards, without the members that have none.

  Args:
    group: as it was generated.
    outcome: of each member.
  """
  kept, dropped = [], []
  for branches, found in zip(group.branches(), outcome, strict=True):
    if isinstance(found, types.Reward):
      own = types.shares(found, branches)
      for trajectory, reward in zip(branches, own, strict=True):
        trajectory.reward = reward
      kept += branches
    else:
      dropped.append(
        types.Dropped(
          member=branches[0].member,
          num_completion_tokens=sum(t.num_completion_tokens for t in branches),
          reason=found.reason,
        )
      )
  return dataclasses.replace(group, trajectories=kept, dropped=tuple(dropped))


def oldest_metrics(
  groups: Mapping[int, RunningGroup], now_s: float
) -> dict[str, float]:
  """Return which group training will wait for first, and how old it is.

  Another thread may add and remove groups meanwhile.
  """
  oldest = min(
    list(groups.values()),
    key=lambda r: (r.admission.deadline, r.admission.index),
    default=None,
  )
  if oldest is None:
    return {"rollout/oldest_group": -1.0, "rollout/oldest_group_s": 0.0}
  return {
    "rollout/oldest_group": float(oldest.admission.index),
    "rollout/oldest_group_s": max(
      0.0, now_s - oldest.times_s.get("admitted", now_s)
    ),
  }


def _and_writer(
  writers: tuple[tuple[str, int], ...], replica: str, num_tokens: int
) -> tuple[tuple[str, int], ...]:
  """Return the writers of a trajectory after a replica has added tokens."""
  if not num_tokens:
    return writers
  if writers and writers[-1][0] == replica:
    return *writers[:-1], (replica, writers[-1][1] + num_tokens)
  return *writers, (replica, num_tokens)


def patience(
  max_group_s: float, new_deadline: Callable[[float], supervisor_lib.Deadline]
) -> supervisor_lib.Deadline | None:
  """Return how long a new group may be generated; 0 seconds are for ever."""
  return new_deadline(max_group_s) if max_group_s else None


def overdue(max_group_s: float) -> service_lib.RewardFailure:
  """Return the failure of a group that was not generated in time."""
  reason = f"not generated in {max_group_s:g} s (rollout.max_group_seconds)"
  return service_lib.RewardFailure(reason)


def check_has_not_failed(group: types.RolloutGroup) -> None:
  """Check that a group of a checkpoint can go on.

  One that had failed waited for its replica to report the members that were
  aborted. What is left of these must not count as completions.

  Raises:
    EpisodeError: it had failed.
  """
  if any(
    trajectory.finish_reason is types.FinishReason.ABORTED
    for trajectory in group.trajectories
  ):
    raise episode_lib.EpisodeError(HAD_FAILED)


def failure_of(error: episode_lib.EpisodeError) -> service_lib.RewardFailure:
  """Return the failure of a group one of whose episodes raised this error."""
  lines = traceback_lib.format_exception(error.__cause__ or error)
  return service_lib.RewardFailure(
    reason=f"episode: {error}", traceback="".join(lines)
  )
