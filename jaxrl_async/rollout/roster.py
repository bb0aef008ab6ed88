"""The replicas of a fleet: they are started, attached, lost and replaced.

A replica may fail to answer in several ways, and each has a limit:

| what is seen | after | what follows |
| --- | --- | --- |
| its process has ended | at once | it is started again |
| it says nothing | `replica_timeout_s` | its groups go to others |
| it still says nothing | `start_timeout_s` more | it is killed and replaced |
| it answers, but its thread stands still | `hang_timeout_s` | the same |
| its process runs, but it is not attached | `start_timeout_s` | the same |
| its process waits for a free host | never | it joins late |
"""

from collections.abc import Callable, Iterator
from concurrent import futures
import dataclasses
import enum
import functools
import queue
import threading
from typing import Any

from jaxrl_async.engine import scheduler_stats
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import remote

# Seconds before a replica is started again. They double with each failure.
_RELAUNCH_S, _MAX_RELAUNCH_S = 1.0, 60.0
# The same if its host does not fit, which somebody has to mend.
_UNFIT_S = 1800.0
_MAX_FAILURES = 3  # in a row, of every replica
# What is averaged over the replicas; the other totals are summed.
_AVERAGED = ("wait_s", "adopt_s", "adoptions")
_NO_TOTALS = dataclasses.asdict(scheduler_stats.SchedulerStats()) | {
  "wait_s": 0.0,
  "adopt_s": 0.0,
}


class State(enum.Enum):
  """What the fleet waits for from a replica."""

  STARTING = "starting"  # that it is attached
  READY = "ready"  # what it says next
  SILENT = "silent"  # the same, but its groups were given to others
  RECALLED = "recalled"  # the same, because all groups were taken back
  LOST = "lost"  # nothing; it is started again later


@dataclasses.dataclass(kw_only=True, slots=True)
class Member:
  """One place of the fleet, and the replica that fills it.

  Attributes:
    name: the present name of its replica, which changes at every attachment.
    ask: its last request for work, with the room that was left then.
    given: turns given since then, by the number of the delivery.
    num_sent: number of deliveries to this name.
    since_s: when it was last heard of, or when its state began.
    rest_s: how long it is left alone after it was lost.
    attaching: the call that attaches it. It is running from when the process
      has started.
    num_failures: how often it failed since it last ended a trajectory.
    totals: its counters as it said them last.
  """

  place: int
  state: State = State.LOST
  handle: remote.Handle | None = None
  name: str = ""
  num_names: int = 0
  version: int = -1
  ask: messages.Ask | None = None
  given: dict[int, int] = dataclasses.field(default_factory=dict)
  num_sent: int = 0
  since_s: float = float("-inf")
  rest_s: float = 0.0
  attaching: futures.Future[None] | None = None
  num_failures: int = 0
  totals: dict[str, int | float] = dataclasses.field(default_factory=dict)

  @property
  def is_attaching(self) -> bool:
    """Whether its process has started, and is not attached yet."""
    return self.attaching is not None and self.attaching.running()

  @property
  def room(self) -> int:
    """For how many more trajectories it has room."""
    if self.state is not State.READY or self.ask is None:
      return 0
    return self.ask.room - sum(self.given.values())


class Roster:
  """The members of a fleet, and what they were asked for.

  Invariant: every member that is not LOST has exactly one call outstanding,
  whose result will be an event: that it is attached, or what it says. `on_gone`
  has been called with the name of every member that was READY and is not.

  Threads: everything belongs to the thread that drives the fleet, but
  `totals`, and reading the members. Futures end in threads of the transport
  and only add to the queue of events.

  Attributes:
    members: one for each place.
    may_fail: whether the run goes on if a replica fails.
    start_timeout_s: how long a process may take to be attached.
  """

  def __init__(
    self,
    launch: Callable[[int], remote.Handle],
    spec: Any,
    *,
    num_replicas: int,
    replica_timeout_s: float,
    start_timeout_s: float,
    hang_timeout_s: float,
    on_gone: Callable[[str], None],
    has_trained: Callable[[], bool],
    note: Callable[[str], None],
    seconds: Callable[[], float],
  ):
    """Create a roster of places without replicas.

    Args:
      launch: starts the replica of a place, or finds one that was started by an
        earlier start of this run. It does not wait for it.
      spec: what each replica is attached with.
      on_gone: is called with the name of a replica that loses its groups.
      has_trained: returns whether this start of the run has made a train step.
      note: is called with a line when a replica comes, goes or fails.
    """
    self.members = [Member(place=i) for i in range(num_replicas)]
    self.may_fail = False
    self.start_timeout_s = start_timeout_s
    self._launch = launch
    self._spec = spec
    self._replica_timeout_s = replica_timeout_s
    self._hang_timeout_s = hang_timeout_s
    self._on_gone = on_gone
    self._has_trained = has_trained
    self._note = note
    self._seconds = seconds
    self._looked_s = seconds()
    self._events = queue.SimpleQueue[
      tuple[Member, remote.Handle, str, futures.Future]
    ]()
    self._totals_lock = threading.Lock()
    self._ended_totals = dict(_NO_TOTALS)

  # -- any thread -----------------------------------------------------------

  @property
  def num_ready(self) -> int:
    """The number of replicas that generate."""
    return sum(m.state is State.READY for m in self.members)

  def totals(self) -> dict[str, int | float]:
    """Return the sums over all replicas; of some, the averages."""
    with self._totals_lock:
      totals = dict(self._ended_totals)
      for member in self.members:
        for name, value in member.totals.items():
          totals[name] += value
    for name in _AVERAGED:
      totals[name] /= len(self.members)
    return totals

  # -- the thread that drives the fleet -------------------------------------

  def relaunch_lost(self) -> None:
    """Start the replicas again that were lost long enough ago."""
    for member in self.members:
      waited_s = self._seconds() - member.since_s
      if member.state is State.LOST and waited_s >= member.rest_s:
        member.handle = self._launch(member.place)
        self._attach(member)

  def said(self, timeout_s: float) -> Iterator[tuple[Member, remote.Said]]:
    """Wait a moment for an event, and yield what replicas have said.

    Whoever gets it calls `heard` with it. Each replica has one event at most.
    More would only be answers to what is asked meanwhile, and taking them too
    could keep the thread from handing out work.

    Args:
      timeout_s: how long to wait for the first event.

    Raises:
      ReplicaFailed: see `_fail`.
    """
    for _ in self.members:
      try:
        member, handle, kind, future = self._events.get(timeout=timeout_s)
      except queue.Empty:
        return
      timeout_s = 0.0
      if member.handle is not handle:
        continue  # it was replaced, perhaps after the call had ended
      try:
        result = future.result()
      except remote.ReplicaLost as error:
        self._lose(member, str(error))
      except remote.ReplicaFailed as error:
        self._fail(member, error)
      else:
        if kind == "attached":
          self._on_attached(member)
        else:
          yield member, result

  def heard(self, member: Member, said: remote.Said) -> bool:
    """Listen on to a replica after its reports were taken.

    One whose groups were taken from it gets another name, and begins anew.

    Returns:
      Whether it is READY, as it was before.
    """
    if said.still_s > self._hang_timeout_s:
      self._fail(
        member,
        remote.ReplicaFailed(
          f"its thread has stood still for {said.still_s:.0f} s"
          " (cluster.hang_timeout_s)"
        ),
      )
      return False
    if member.state is not State.READY:
      if member.state is State.SILENT:
        self._note(f"{member.name} is heard again")
      self._attach(member)
      return False
    member.since_s, member.version = self._seconds(), said.version
    with self._totals_lock:
      member.totals = said.totals
    if said.ask is not None:
      member.ask = said.ask
      member.given = {
        number: count
        for number, count in member.given.items()
        if number > said.received
      }
    self._collect(member)
    return True

  def recall(self) -> None:
    """Let each replica begin anew under another name."""
    for member in self.members:
      if member.state is State.READY:
        self._leave(member, State.RECALLED)

  def look_for_silence(self) -> None:
    """Take the groups of silent replicas, and replace those that are stuck."""
    now_s = self._seconds()
    # While this process stood still, nobody could be heard.
    unheard_s = max(0.0, now_s - self._looked_s - self._replica_timeout_s / 4)
    self._looked_s = now_s
    for member in self.members:
      member.since_s += unheard_s
      if member.state is State.STARTING and not member.is_attaching:
        # Its process has not started. It may wait for a host, however long.
        member.since_s = now_s
      silence_s = now_s - member.since_s
      if member.state is State.STARTING and silence_s > self.start_timeout_s:
        self._lose(member, f"it was not attached in {silence_s:.0f} s")
      elif member.state in (State.READY, State.RECALLED):
        if silence_s > self._replica_timeout_s:
          self._leave(member, State.SILENT)
          self._note(
            f"{member.name} has said nothing for {silence_s:.0f} s"
            " (cluster.replica_timeout_s); its groups go to others"
          )
      elif member.state is State.SILENT:
        if silence_s > self._replica_timeout_s + self.start_timeout_s:
          self._lose(member, f"it has said nothing for {silence_s:.0f} s")

  def close(self) -> None:
    """End all replicas."""
    for member in self.members:
      if member.handle is not None:
        member.handle.kill()
        member.handle = None

  # -- calls and their ends -------------------------------------------------

  def _attach(self, member: Member) -> None:
    """Give the replica of a member a new name."""
    assert member.handle is not None
    with self._totals_lock:
      for name, value in member.totals.items():
        self._ended_totals[name] += value
      member.totals = {}
    member.num_names += 1
    member.name = f"replica {member.place}"
    if member.num_names > 1:
      member.name += f" #{member.num_names}"
    member.state, member.since_s = State.STARTING, self._seconds()
    member.version, member.ask = -1, None
    member.given, member.num_sent = {}, 0
    member.attaching = member.handle.attach(member.name, self._spec)
    self._expect(member, "attached", member.attaching)

  def _on_attached(self, member: Member) -> None:
    member.state, member.since_s = State.READY, self._seconds()
    self._note(f"{member.name} is ready")
    self._collect(member)

  def _collect(self, member: Member) -> None:
    assert member.handle is not None
    self._expect(member, "said", member.handle.collect())

  def _expect(self, member: Member, kind: str, future: futures.Future) -> None:
    assert member.handle is not None
    future.add_done_callback(
      functools.partial(self._put, member, member.handle, kind)
    )

  def _put(
    self,
    member: Member,
    handle: remote.Handle,
    kind: str,
    future: futures.Future,
  ) -> None:
    self._events.put((member, handle, kind, future))

  def _leave(self, member: Member, state: State) -> None:
    """Give a member a state in which it has no groups."""
    if member.state is State.READY:
      self._on_gone(member.name)
    member.state = state

  def _lose(self, member: Member, why: str) -> None:
    """Give the groups of a replica to others, and start it again later."""
    self._lose_for(
      member,
      min(_RELAUNCH_S * 2**member.num_failures, _MAX_RELAUNCH_S),
      f"{member.name} is gone ({why}); it is started again",
    )

  def _lose_for(self, member: Member, rest_s: float, line: str) -> None:
    self._leave(member, State.LOST)
    member.since_s, member.rest_s = self._seconds(), rest_s
    self._note(line)
    assert member.handle is not None
    member.handle.kill()  # it may have other processes
    member.handle = member.attaching = None

  def _fail(self, member: Member, error: remote.ReplicaFailed) -> None:
    """Start a replica again that has failed, unless this ends the run.

    Raises:
      ReplicaFailed: the run has not begun, each replica failed several times,
        or a host does not fit and there was no train step yet.
    """
    if isinstance(error, remote.DoesNotFit):
      if not self.may_fail or not self._has_trained():
        raise error
      self._lose_for(
        member,
        _UNFIT_S,
        f"{member.name} has no host that fits ({error}); another attempt"
        f" follows in {_UNFIT_S / 60:.0f} min",
      )
      return
    member.num_failures += 1
    fewest = min(m.num_failures for m in self.members)
    if fewest >= _MAX_FAILURES or not self.may_fail:
      raise error
    self._lose(member, str(error))
