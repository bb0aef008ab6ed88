"""The rollout side whose replicas are in other processes.

The fleet starts replicas, listens to all of them, and hands out the
coordinator's work. A replica may join late, end, be silent or be slow. This
changes how fast groups are generated and nothing else: what it reported last is
continued by another replica.
"""

from collections.abc import Callable, Mapping
import functools
import heapq
import time
from typing import Any

from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import rollout_side
from jaxrl_async.rollout import roster as roster_lib
from jaxrl_async.rollout import wire

_POLL_S = 0.005


class NoReplicaError(supervisor_lib.RunError):
  """No replica was ready in time; the message says why."""


class Fleet(rollout_side.RolloutSide):
  """Drives a coordinator and its replicas in other processes.

  Invariant: `coordinator` knows a replica by the name of its member while the
  member is READY, and has been told that the name is drained otherwise.

  Threads: see `RolloutSide`. `start` and `close` belong to the main thread,
  before and after `run`.
  """

  def __init__(
    self,
    coordinator: coordinator_lib.Coordinator,
    launch: Callable[[int], remote.Handle],
    spec: Any,
    *,
    num_replicas: int,
    replica_timeout_s: float,
    start_timeout_s: float,
    hang_timeout_s: float = float("inf"),
    busy: metrics_lib.BusyClock,
    note: Callable[[str], None],
    seconds: Callable[[], float] = time.monotonic,
    poll_s: float = _POLL_S,
  ):
    """Create a fleet without replicas.

    What is not named here is described in `roster`.

    Args:
      coordinator: belongs to the fleet from now on.
      busy: records how long the replicas' devices are busy, on average.
      poll_s: how long a round waits for something to happen.
    """
    super().__init__(coordinator)
    self._busy = busy
    self._seconds = seconds
    self._poll_s = poll_s
    self._first_version = -1  # of this start
    self._roster = roster_lib.Roster(
      launch,
      spec,
      num_replicas=num_replicas,
      replica_timeout_s=replica_timeout_s,
      start_timeout_s=start_timeout_s,
      hang_timeout_s=hang_timeout_s,
      on_gone=coordinator.drained,
      has_trained=self._has_trained,
      note=note,
      seconds=seconds,
    )
    self._members = self._roster.members
    self._newest_version = -1  # that any of them has had

  # -- other threads --------------------------------------------------------

  def _states(self) -> list[str]:
    return [
      f"{m.name or f'replica {m.place}'} {m.state.value}" for m in self._members
    ]

  def moving(self) -> object:
    """Return a value that changes when something moves; see `RolloutSide`.

    What is adopted again does not count: replicas may end and begin for ever.
    """
    newest = max(member.version for member in self._members)
    self._newest_version = max(newest, self._newest_version)
    answered = self.coordinator.questions.recorded_tokens
    written = self.coordinator.recorded_tokens, answered
    return *written, self.coordinator.num_answers, self._newest_version

  def _recall(self) -> None:
    self._roster.recall()

  @property
  def num_ready(self) -> int:
    """The number of replicas that generate."""
    return self._roster.num_ready

  def totals(self) -> dict[str, int | float]:
    """Return the sums over all replicas; of some, the averages."""
    return self._roster.totals()

  # -- start and end --------------------------------------------------------

  def start(
    self, check: Callable[[], None] = lambda: None, num_needed: int = 1
  ) -> None:
    """Start the replicas, and wait until enough of them are ready.

    The others may join later.

    Args:
      check: is called now and then, and may raise.
      num_needed: how many replicas are enough.

    Raises:
      NoReplicaError: too few were ready in time.
      ReplicaFailed: one could not be started for a reason that will not pass.
    """
    limit_s = self._roster.start_timeout_s
    deadline = supervisor_lib.Deadline(limit_s, self._seconds)
    while (num_ready := self.num_ready) < num_needed:
      check()
      self._revive()
      if deadline.next_wait_s() > 0:
        continue
      which = "no replica was"
      if num_ready:
        which = f"{num_ready} of {num_needed} replicas were"
      raise NoReplicaError(
        f"{which} ready in {limit_s:g} s (cluster.start_timeout_s)"
      )
    self._roster.may_fail = True

  def close(self) -> None:
    """End all replicas."""
    self._roster.close()

  # -- the rollout thread ---------------------------------------------------

  def _hear(self) -> None:
    """Take what has happened.

    Raises:
      ReplicaFailed: all replicas have failed over and over.
    """
    self._gate.show("listening")
    if self._first_version < 0:
      self._first_version = self.coordinator.policy_version
    if self.num_ready:
      self._roster.may_fail = True
    self._revive()

  def _take(self, name: str, work: messages.Work) -> None:
    for member in self._members:
      if member.name == name:
        self._deliver(member, work)

  def _go_on(self) -> bool:
    self._hand_out()
    return False

  def _take_events(self, timeout_s: float) -> None:
    for member, said in self._roster.said(timeout_s):
      self._on_said(member, said)

  def _revive(self) -> None:
    """Start replicas that have ended, and take what has happened."""
    self._roster.relaunch_lost()
    self._take_events(self._poll_s)
    self._roster.look_for_silence()

  def _has_trained(self) -> bool:
    """Return whether this start of the run has made a train step."""
    return 0 <= self._first_version < self.coordinator.policy_version

  # -- what replicas say ----------------------------------------------------

  def _on_said(self, member: roster_lib.Member, said: remote.Said) -> None:
    """Take reports, and listen on.

    What a replica says after its groups were taken from it is refused.
    """
    for told in said.told:
      if isinstance(told, messages.Adopted):
        if member.state is roster_lib.State.READY:
          self.coordinator.adopted(told)
        continue
      report = wire.unpack_report(told)
      answer = self.coordinator.report(report)
      if any(one.trajectory.finish_reason for one in report.written):
        member.num_failures = 0
      if member.state is roster_lib.State.READY:
        self._deliver(member, answer)
    if self._roster.heard(member, said):
      self._record_busy(member, said)

  def _record_busy(self, member: roster_lib.Member, said: remote.Said) -> None:
    """Record the average over the replicas, and what one of them does."""
    first = next(m for m in self._members if m.state is roster_lib.State.READY)
    now_s = self._busy.now()
    self._busy.add(
      said.busy_s / len(self._members),
      [
        timeline_lib.Interval(now_s - a.start_s, now_s - a.end_s, a.name)
        for a in said.activities
        if member is first
      ],
    )

  def _deliver(self, member: roster_lib.Member, work: messages.Work) -> None:
    if not work.turns and not work.cancelled:
      return
    assert member.handle is not None
    member.num_sent += 1
    member.given[member.num_sent] = len(work.turns)
    member.handle.deliver(
      remote.Delivery(
        name=member.name, number=member.num_sent, work=wire.pack_work(work)
      )
    )

  def _hand_out(self) -> None:
    """Give each group to the replica with the most room."""
    turns: dict[int, list[messages.Turn]] = {m.place: [] for m in self._members}
    rooms = {
      m.place: m.room - self.coordinator.num_starting(m.name)
      for m in self._members
    }
    share_out(rooms, functools.partial(self._give, turns))
    for member in self._members:
      self._deliver(member, messages.Work(turns=tuple(turns[member.place])))

  def _give(self, turns: dict[int, list[messages.Turn]], place: int) -> int:
    """Add the turns of a group for a place.

    Returns:
      How many there are, and how many come later.
    """
    member = self._members[place]
    ask = messages.Ask(replica=member.name, version=member.version, room=1)
    more, num_pending = self.coordinator.hand_out(ask, ask.room)
    turns[place] += more
    return len(more) + num_pending


def share_out(rooms: Mapping[int, int], give: Callable[[int], int]) -> None:
  """Give each group to the place with the most room, the first among equals.

  Args:
    rooms: for how many trajectories there is room, by place.
    give: gives a group to a place, and returns the trajectories of the group;
      0 if there is none for this place.
  """
  heap = [(-room, place) for place, room in rooms.items() if room > 0]
  heapq.heapify(heap)
  while heap:
    room, place = heap[0]
    num_given = give(place)
    room += num_given
    if num_given and room < 0:
      heapq.heapreplace(heap, (room, place))
    else:
      heapq.heappop(heap)
