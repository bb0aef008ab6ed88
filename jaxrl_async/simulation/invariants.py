"""What has to hold at every moment of a run, whatever goes wrong.

    bound     no token is trained that is older than the bound under which its
              group was admitted
    balance   every generated token is in the ledger or in a group in flight,
              every group is in one place, and is trained at most once
    text      what is trained is what the policy wrote, whoever wrote it
    wait      no group is outstanding for longer than its steps can take
    slot      no replica has room while a group could be admitted for it
    deadlock  something happens until all steps are trained

They are computed from what was admitted and written, and not from what the
buffer and the coordinator count.
"""

from collections.abc import Iterable
import json

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import schedule
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.simulation import modelled_engine

# How long a replica may have free slots before it is given what there is: the
# longest ways of a request and of its answer, and a version that is adopted.
_GRACE_S = 10.0
# A step takes less, with all faults.
_LONGEST_STEP_S = 90.0


class Violation(AssertionError):
  """An invariant does not hold.

  Attributes:
    kind: its name in the module's docstring.
  """

  def __init__(self, kind: str, text: str):
    """Create a violation; the text says what was found."""
    super().__init__(f"{kind}: {text}")
    self.kind = kind


class WatchedBuffer(buffer_lib.Buffer):
  """A buffer that tells of each admission, and is otherwise the real one.

  Attributes:
    bounds: the bound under which each group was admitted.
    admitted_s: when each group was admitted.
  """

  def __init__(self, groups_per_step: int, max_staleness: int, **settings):
    """Create a buffer; the clock has to be given."""
    super().__init__(groups_per_step, max_staleness, **settings)
    self.bounds: dict[int, int] = {}
    self.admitted_s: dict[int, float] = {}

  def try_admit(self, engine_version: int) -> types.Admission | None:
    """Admit a group as the real buffer does, and write it down."""
    admission = super().try_admit(engine_version)
    if admission is not None:
      self.bounds[admission.index] = self._max_staleness
      self.admitted_s[admission.index] = self._clock()
    return admission


class Invariants:
  """The invariants of one start of the trainer.

  Attributes:
    trained: the groups that were trained.
  """

  def __init__(
    self,
    buffer: WatchedBuffer,
    coordinator: coordinator_lib.Coordinator,
    script: modelled_engine.Script,
    *,
    groups_per_step: int,
    trained: Iterable[int],
  ):
    """Look at these parts from now on.

    Args:
      buffer: of this start.
      coordinator: of this start.
      script: what the policy writes.
      groups_per_step: the number of groups of a batch.
      trained: the groups that were trained before the checkpoint.
    """
    self.trained = set(trained)
    self._buffer = buffer
    self._coordinator = coordinator
    self._script = script
    self._groups_per_step = groups_per_step
    self._free_since_s: dict[str, float] = {}

  def check_batch(self, step: int, groups: list[types.RolloutGroup]) -> None:
    """Check the groups that a step is going to train."""
    if len(groups) != self._groups_per_step:
      raise Violation("balance", f"a batch of {len(groups)} groups")
    for group in groups:
      index = group.index
      if index in self.trained:
        raise Violation("balance", f"group {index} is trained twice")
      self.trained.add(index)
      staleness = step - int(group.written_versions().min())
      bound = self._buffer.bounds[index]
      if not 0 <= staleness <= bound:
        raise Violation(
          "bound",
          f"step {step} trains a token of group {index} that is {staleness}"
          f" versions old; the bound is {bound}",
        )
      for trajectory in group.trajectories:
        if not self._script.is_whole(index, trajectory):
          raise Violation(
            "text",
            f"group {index}, member {trajectory.member}:"
            f" {trajectory.tokens.tolist()}",
          )

  def check_groups(self, now_s: float) -> None:
    """Check where the outstanding groups are, and how long they have waited."""
    state = self._buffer.state()
    running = {admission.index for admission in state.running}
    known = self._coordinator._running
    if running != known.keys():
      raise Violation(
        "balance",
        f"the buffer has {sorted(running)} running, the coordinator"
        f" {sorted(known)}",
      )
    admissions = state.admissions()
    is_schedulable = schedule.is_schedulable(
      [a.deadline for a in admissions], state.next_step, self._groups_per_step
    )
    if not is_schedulable:
      raise Violation("bound", f"step {state.next_step}: not in time: {state}")
    for admission in admissions:
      num_steps = self._buffer.bounds[admission.index] + 2
      waited_s = now_s - self._buffer.admitted_s[admission.index]
      if waited_s > num_steps * _LONGEST_STEP_S:
        raise Violation(
          "wait", f"{admission} is outstanding for {waited_s:.0f} s"
        )

  def can_get_group(self, version: int) -> bool:
    """Return whether there is a group for a replica of this version."""
    waiting = self._coordinator._waiting.values()
    if any(one.admission.birth <= version for one in waiting):
      return True
    return self._coordinator.has_prompt() and self._buffer._can_admit(version)

  def check_members(self, members: Iterable[fleet_lib._Member]) -> None:
    """Check that the fleet has handed out all that it could."""
    for member in members:
      if member.room > 0 and self.can_get_group(member.version):
        raise Violation(
          "slot",
          f"{member.name} has room for {member.room}, and gets no group at"
          f" version {member.version}",
        )

  def check_slots(
    self, replica: replica_lib.Replica, is_well: bool, now_s: float
  ) -> None:
    """Check that a replica has no free slots for long."""
    is_free = (
      is_well
      and replica.version >= 0
      and replica.scheduler.num_free > 0
      and self.can_get_group(replica.version)
    )
    if not is_free:
      self._free_since_s.pop(replica.name, None)
      return
    free_s = now_s - self._free_since_s.setdefault(replica.name, now_s)
    if free_s > _GRACE_S:
      raise Violation(
        "slot",
        f"{replica.name} has {replica.scheduler.num_free} free slots for"
        f" {free_s:.0f} s, and gets no group at version {replica.version}",
      )

  def check_ledger(self, content: bytes, next_index: int) -> int:
    """Check that every group ended once or is outstanding.

    Args:
      content: of the ledger.
      next_index: the number of groups that were admitted.

    Returns:
      The number of groups that ended.
    """
    lines = [json.loads(line) for line in content.splitlines()]
    ended = [line["index"] for line in lines]
    state = self._buffer.state()
    outstanding = [a.index for a in state.admissions()]
    if sorted(ended + outstanding) != list(range(next_index)):
      raise Violation(
        "balance",
        f"of {next_index} groups {sorted(ended)} ended and"
        f" {sorted(outstanding)} are outstanding",
      )
    return len(ended)
