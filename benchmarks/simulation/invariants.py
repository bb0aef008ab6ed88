"""What has to hold at every moment of a run, whatever goes wrong.

    bound     no token is trained that is older than the bound under which its
              group was admitted, and all groups can be trained in time
    balance   every generated token is in the ledger or in a group in flight;
              every group is in one place, ends once, and as its script says
    text      what is trained is what the policy wrote, with its logprobs, the
              versions that wrote it and its rewards
    order     a batch takes the groups that are due first
    lease     a group is written by a replica that has a lease, or waits; who
              is not heard has none
    room      no replica is given more than it has room for
    whole     with kv_on_adopt WAIT, one version writes a turn
    cut       what is written after a cut, or after a start from a checkpoint,
              has no version below it, and no cache from before
    overdue   no group is generated for longer than it may be, and none fails
              for that before
    eval      an evaluation's answers are those of its version or newer ones
    wait      no group is outstanding for longer than its steps can take, and
              no batch lies ready while the loader sleeps
    slot      no replica has room while a group could be admitted for it
    deadlock  something happens until all steps are trained

They look into the buffer, the coordinator and the fleet for what these parts
hold, and decide by themselves whether it is right.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import json

import numpy as np

from jaxrl_async import types
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import roster as roster_lib
from jaxrl_async.rollout import running_group
from simulation import modelled_replica
from simulation import script as script_lib
from simulation import watched_buffer

# A replica keeps its lease at most so much longer than it should.
_LOOK_S = 1.0
# The longest ways of a request and its answer, and a version that is adopted.
_SLOT_GRACE_S = 6.0
# A group that has failed ends within this time: its replica is slow to say so,
# or is not heard.
_ENDING_S = 15.0
OVERDUE = "not generated in "  # how such a failure begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
  """A moment after which nothing may depend on what was before.

  Attributes:
    version: no older one writes from then on.
    lengths: of the trajectories that were outstanding, by group and member.
  """

  version: int
  lengths: Mapping[tuple[int, int], int]


def cut_at(version: int, groups: Iterable[types.RolloutGroup]) -> Cut:
  """Return the cut at which these groups were outstanding."""
  return Cut(
    version=version,
    lengths={
      (group.index, t.member): len(t.tokens)
      for group in groups
      for t in group.trajectories
    },
  )


class Invariants:
  """The invariants of one start of the trainer.

  Attributes:
    trained: the groups that were trained.
    cuts: of this timeline, in order.
  """

  def __init__(
    self,
    buffer: watched_buffer.WatchedBuffer,
    coordinator: coordinator_lib.Coordinator,
    script: script_lib.Script,
    *,
    groups_per_step: int,
    group_size: int,
    max_group_s: float,
    most_group_s: float,
    longest_wait_s: Callable[[int], float],
    is_whole: bool,
    trained: Iterable[int],
    cuts: Iterable[Cut],
  ):
    """Look at these parts from now on.

    Args:
      buffer: of this start.
      coordinator: of this start.
      script: what the policy writes.
      groups_per_step: the number of groups of a batch.
      group_size: the number of trajectories of a group.
      max_group_s: a group fails that is not generated after so long; 0 waits.
      most_group_s: the same, with what a look for such groups may be late.
      longest_wait_s: returns for how long a group may be outstanding that is
        due in so many steps.
      is_whole: whether one version writes each turn.
      trained: the groups that were trained before the checkpoint.
      cuts: those before, with that of the checkpoint.
    """
    self.trained = set(trained)
    self.cuts = list(cuts)
    self._is_whole = is_whole
    self._max_group_s = max_group_s
    self._most_group_s = most_group_s
    self._longest_wait_s = longest_wait_s
    self._buffer = buffer
    self._coordinator = coordinator
    self._script = script
    self._groups_per_step = groups_per_step
    self._group_size = group_size
    self._free_since_s: dict[str, float] = {}
    self._failed_s: dict[int, float] = {}  # since when, of those that go on

  def check_batch(self, step: int, groups: list[types.RolloutGroup]) -> None:
    """Check the groups that a step is going to train."""
    if len(groups) != self._groups_per_step:
      raise watched_buffer.Violation(
        "balance", f"a batch of {len(groups)} groups"
      )
    for group in groups:
      index = group.index
      if index in self.trained:
        raise watched_buffer.Violation(
          "balance", f"group {index} is trained twice"
        )
      self.trained.add(index)
      members = [x.member for x in (*group.trajectories, *group.dropped)]
      if sorted(members) != [*range(self._group_size)]:
        raise watched_buffer.Violation(
          "balance", f"group {index} is not whole: {group}"
        )
      staleness = step - int(group.written_versions().min())
      bound = self._buffer.bounds[index]
      if not 0 <= staleness <= bound:
        raise watched_buffer.Violation(
          "bound",
          f"step {step} trains a token of group {index} that is {staleness}"
          f" versions old; the bound is {bound}",
        )
      if self._is_whole:
        self._check_whole_turns(group)
      self._check_cuts(group)
      difference = self._script.difference(group)
      if difference is not None:
        raise watched_buffer.Violation("text", f"group {index}: {difference}")

  def _check_cuts(self, group: types.RolloutGroup) -> None:
    """Check what was written of a group after each cut."""
    for trajectory in group.trajectories:
      places = np.flatnonzero(trajectory.loss_mask)
      versions = trajectory.policy_versions[places]
      lengths = np.array([b.length for b in trajectory.cache_builds])
      # The cache with which each token was written.
      builds = lengths[np.searchsorted(lengths, places, "right") - 1]
      for cut in self.cuts:
        begin = cut.lengths.get((group.index, trajectory.member), 0)
        later = places >= begin
        if (versions[later] < cut.version).any():
          raise watched_buffer.Violation(
            "cut", f"group {group.index}, cut at {cut.version}: {trajectory}"
          )
        if (builds[later] < begin).any():
          raise watched_buffer.Violation(
            "cut",
            f"group {group.index} goes on with a cache from before the cut at"
            f" {cut.version}, token {begin}: {trajectory}",
          )

  def goes_across_a_cut(self, group: types.RolloutGroup) -> bool:
    """Return whether a turn of it was begun before a cut, and ended after."""
    lengths = [
      (cut.lengths.get((group.index, t.member), 0), t.loss_mask)
      for cut in self.cuts
      for t in group.trajectories
    ]
    return any(
      0 < begin < len(mask) and mask[begin - 1] and mask[begin]
      for begin, mask in lengths
    )

  def check_answer(self, written: questions_lib.Answer, version: int) -> None:
    """Check an answer of an evaluation of this version."""
    question = written.question
    expected = self._script.expected(question.number, question.sample)
    tokens = expected.tokens
    has_failed = self._script.raises(question.number)
    if has_failed:
      tokens = tokens[: expected.turn_ends[0]]
    found = written.trajectory
    places = np.flatnonzero(found.loss_mask)
    versions = found.policy_versions[places]
    logprobs = script_lib.logprobs(places, versions)
    if not (
      (versions >= version).all()
      and has_failed == (written.failure is not None)
      and np.array_equal(found.tokens, tokens)
      and np.array_equal(found.behavior_logprobs[places], logprobs)
    ):
      raise watched_buffer.Violation("eval", f"version {version}: {written}")

  def check_groups(self, now_s: float) -> None:
    """Check where the outstanding groups are, and how long they have waited."""
    state = self._buffer.state()
    running = {admission.index for admission in state.running}
    known = self._coordinator._running
    if running != known.keys():
      raise watched_buffer.Violation(
        "balance",
        f"the buffer has {sorted(running)} running, the coordinator"
        f" {sorted(known)}",
      )
    admissions = state.admissions()
    if not self._is_schedulable(admissions, state.next_step):
      raise watched_buffer.Violation(
        "bound", f"step {state.next_step}: not in time: {state}"
      )
    for admission in admissions:
      num_steps = self._buffer.bounds[admission.index] + 2
      waited_s = now_s - self._buffer.admitted_s[admission.index]
      if waited_s > self._longest_wait_s(num_steps):
        raise watched_buffer.Violation(
          "wait", f"{admission} is outstanding for {waited_s:.0f} s"
        )
    self._check_overdue(now_s)

  def _check_overdue(self, now_s: float) -> None:
    """Check, after a look for groups that are overdue, that none is left."""
    if not self._max_group_s:
      return
    known = self._coordinator._running
    for index, running in known.items():
      generated_s = now_s - self._buffer.admitted_s[index]
      is_late = generated_s > self._most_group_s
      if running.unfinished and running.failure is None and is_late:
        raise watched_buffer.Violation(
          "overdue",
          f"group {index} is generated for {generated_s:.1f} s",
        )
      if running.unfinished and running.failure is not None:
        failed_s = self._failed_s.setdefault(index, now_s)
        if now_s - failed_s > _ENDING_S:
          raise watched_buffer.Violation(
            "overdue", f"group {index} has failed, and goes on"
          )
    self._failed_s = {i: s for i, s in self._failed_s.items() if i in known}

  def _is_schedulable(
    self, admissions: Iterable[types.Admission], step: int
  ) -> bool:
    """Return whether P groups a step, oldest deadline first, are in time."""
    deadlines = sorted(admission.deadline for admission in admissions)
    return all(
      deadline >= step + rank // self._groups_per_step
      for rank, deadline in enumerate(deadlines)
    )

  def check_wakeup(self) -> None:
    """Check, where the loader waits for a batch, that there is none."""
    buffer = self._buffer
    finished = sorted(
      (g.admission for heap in buffer._finished.values() for _, g in heap),
      key=watched_buffer.due,
    )
    rest = finished[self._groups_per_step :]
    if len(finished) >= self._groups_per_step and self._is_schedulable(
      [*rest, *buffer._running.values()], buffer._next_step + 1
    ):
      raise watched_buffer.Violation(
        "wait", f"nobody wakes the loader for {finished}"
      )

  def bound_of(self, group: types.RolloutGroup) -> int:
    """Return the bound under which a group was admitted."""
    return self._buffer.bounds[group.index]

  def can_get_group(self, version: int) -> bool:
    """Return whether there is a group for a replica of this version."""
    if self.cuts and version < self.cuts[-1].version:
      return False
    running = self._coordinator._running
    waiting = [i for _, i in self._coordinator._waiting if i in running]
    if any(running[i].admission.birth <= version for i in waiting):
      return True
    buffer = self._buffer
    new = types.Admission(
      index=-1, birth=version, deadline=version + buffer.bound
    )
    outstanding = [
      *buffer._running.values(),
      *(g.admission for heap in buffer._finished.values() for _, g in heap),
    ]
    return self._coordinator.has_prompt() and self._is_schedulable(
      [*outstanding, new], buffer._next_step
    )

  def _check_lease(self, name: str, silence_s: float) -> None:
    """Check that a replica that has a lease was heard of."""
    if silence_s > modelled_replica.LEASE_S + _LOOK_S:
      raise watched_buffer.Violation(
        "lease", f"{name} was not heard of for {silence_s:.0f} s"
      )

  def check_room(self, replica: replica_lib.Replica) -> None:
    """Check that a replica has no more than it has asked for."""
    sizes = replica.scheduler.engine.sizes
    # It asks for the sequences of all slots, and for as many to come after
    # them as may end. The last group may be larger than what is left.
    most = 2 * sizes.num_slots + sizes.insert_rows + self._group_size - 1
    found = len(replica.scheduler.sequences())
    if found > most:
      raise watched_buffer.Violation(
        "room", f"{replica.name} has {found} sequences"
      )

  def _check_whole_turns(self, group: types.RolloutGroup) -> None:
    """Check that each turn has one version."""
    for trajectory in group.trajectories:
      ends = self._script.expected(group.index, trajectory.member).turn_ends
      for versions in np.split(trajectory.policy_versions, ends[:-1]):
        if len(set(versions[versions >= 0].tolist())) > 1:
          raise watched_buffer.Violation(
            "whole", f"group {group.index}: {trajectory}"
          )

  def check_members(self, members: Iterable[roster_lib.Member]) -> None:
    """Check that the fleet has handed out all that it could, and to whom."""
    ready = {m.name: m for m in members if m.state is roster_lib.State.READY}
    waiting = {index for _, index in self._coordinator._waiting}
    for index, running in self._coordinator._running.items():
      if running.unfinished and running.replica not in ready:
        if running.replica is not None or index not in waiting:
          raise watched_buffer.Violation(
            "lease", f"group {index} is with {running.replica}, not {[*ready]}"
          )
    for member in ready.values():
      if member.room > 0 and self.can_get_group(member.version):
        raise watched_buffer.Violation(
          "slot",
          f"{member.name} has room for {member.room}, and gets no group at"
          f" version {member.version}",
        )

  def check_replicas(
    self,
    members: Iterable[roster_lib.Member],
    processes: Mapping[int, modelled_replica.ReplicaProcess],
    now_s: float,
    *,
    looks_at_slots: bool,
  ) -> None:
    """Check what each replica that is ready does, and for how long it may.

    Args:
      members: of the fleet.
      processes: of the replicas, by place.
      now_s: the time.
      looks_at_slots: whether no slots are free on purpose.
    """
    ready = [m for m in members if m.state is roster_lib.State.READY]
    for member in ready:
      process = processes[member.place]
      replica = process.replica
      assert replica is not None
      self._check_lease(member.name, now_s - process.heard_s)
      self.check_room(replica)
      if looks_at_slots:
        self.check_slots(
          replica,
          is_well=process.is_well,
          now_s=now_s,
          grace_s=_SLOT_GRACE_S,
        )

  def check_slots(
    self,
    replica: replica_lib.Replica,
    *,
    is_well: bool,
    now_s: float,
    grace_s: float,
  ) -> None:
    """Check that a replica has no free slots for long.

    Args:
      replica: the replica.
      is_well: whether nothing keeps it from working at its usual pace.
      now_s: the time.
      grace_s: how long it may have them before it is given what there is.
    """
    is_free = (
      is_well
      and replica.version >= 0
      and replica.scheduler.num_free > 0
      and self.can_get_group(replica.version)
      # Otherwise groups may be overdue before they are on the replica.
      and not 0 < self._max_group_s < _LOOK_S
    )
    if not is_free:
      self._free_since_s.pop(replica.name, None)
      return
    free_s = now_s - self._free_since_s.setdefault(replica.name, now_s)
    if free_s > grace_s:
      raise watched_buffer.Violation(
        "slot",
        f"{replica.name} has {replica.scheduler.num_free} free slots for"
        f" {free_s:.0f} s, and gets no group at version {replica.version}",
      )

  def check_ledger(self, content: bytes, next_index: int) -> int:
    """Check that every group ended once and as it should, or is outstanding.

    Args:
      content: of the ledger.
      next_index: the number of groups that were admitted.

    Returns:
      The number of groups that ended.
    """
    lines = [*map(json.loads, content.splitlines())]
    fates = [(line["index"], line["fate"]) for line in lines]
    overdue = {
      line["index"]
      for line in lines
      if line.get("reason", "").startswith(OVERDUE)
    }
    buffer = self._buffer
    for index in overdue & buffer.dropped_s.keys():
      lived_s = buffer.dropped_s[index] - buffer.admitted_s[index]
      if not 0 < self._max_group_s <= lived_s:
        raise watched_buffer.Violation(
          "overdue", f"group {index} fails after {lived_s:.1f} s"
        )
    outstanding = [a.index for a in self._buffer.state().admissions()]
    ended = [index for index, _ in fates]
    if sorted(ended + outstanding) != list(range(next_index)):
      raise watched_buffer.Violation(
        "balance",
        f"of {next_index} groups {sorted(ended)} ended and"
        f" {sorted(outstanding)} are outstanding",
      )
    # A checkpoint may come while a group that is overdue still has members that
    # were not reported. It then fails at the start from there.
    given_up = overdue | {
      line["index"]
      for line in lines
      if line.get("reason", "").endswith(running_group.HAD_FAILED)
    }
    wrong = [
      (i, fate)
      for i, fate in fates
      if i not in given_up and fate != self._script.fate(i)
    ]
    if wrong or self.trained != {i for i, f in fates if f == "trained"}:
      raise watched_buffer.Violation(
        "balance", f"{self.trained} were trained, not {fates}"
      )
    return len(ended)
