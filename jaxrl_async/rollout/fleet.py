"""The rollout side whose replicas are in other processes.

The fleet starts replicas, listens to all of them, and hands out the
coordinator's work. A replica may join late, end, be silent or be slow. This
changes how fast groups are generated and nothing else: what it reported last is
continued by another replica.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import contextlib
import functools
import queue
import time
from typing import Any

from jaxrl_async import types
from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import timeline as timeline_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import fleet_answers
from jaxrl_async.rollout import fleet_member
from jaxrl_async.rollout import gate as gate_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import most_room
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import wire

_POLL_S = 0.005
# Seconds before a replica is started again. They double with each failure.
_RELAUNCH_S, _MAX_RELAUNCH_S = 1.0, 60.0
_MAX_FAILURES = 3  # in a row, of every replica
# Seconds that are averaged over the replicas; the other totals are summed.
_SECONDS = ("wait_s", "adopt_s")


class NoReplicaError(supervisor_lib.RunError):
  """No replica was ready in time; the message says why."""


class Fleet:
  """Drives a coordinator and its replicas in other processes.

  Invariant: `coordinator` knows a replica by the name of its member while the
  member is READY, and has been told that the name is drained otherwise. Every
  member that is not LOST has exactly one call outstanding, whose result will be
  an event: that it is attached, or what it says.

  Threads: `run` belongs to the rollout thread. `start` and `close` belong to
  the main thread, before and after it. Futures end in threads of the transport
  and only add to the queue of events. See `RolloutSide` for the rest.
  """

  def __init__(
    self,
    coordinator: coordinator_lib.Coordinator,
    launch: Callable[[int], remote.Handle],
    spec: Any,
    *,
    num_replicas: int,
    num_slots: int,
    replica_timeout_s: float,
    start_timeout_s: float,
    busy: metrics_lib.BusyClock,
    zero_totals: dict[str, int | float],
    note: Callable[[str], None],
    seconds: Callable[[], float] = time.monotonic,
  ):
    """Create a fleet without replicas.

    Args:
      coordinator: belongs to the fleet from now on.
      launch: starts the replica of a place, or finds one that was started by an
        earlier start of this run.
      spec: what each replica is attached with.
      num_replicas: the number of places.
      num_slots: of each replica's engine.
      replica_timeout_s: a replica loses its groups after so long a silence.
      start_timeout_s: at least one replica has to be ready after so long.
      busy: records how long the replicas' devices are busy, on average.
      zero_totals: the counters of a replica that has done nothing.
      note: is called with a line when a replica comes, goes or fails.
      seconds: a clock.
    """
    self.coordinator = coordinator
    self._launch = launch
    self._spec = spec
    self._num_slots = num_slots
    self._replica_timeout_s = replica_timeout_s
    self._start_timeout_s = start_timeout_s
    self._busy = busy
    self._note = note
    self._seconds = seconds
    self._gate = gate_lib.Gate()
    self._members = [fleet_member.Member(place=i) for i in range(num_replicas)]
    self._events = queue.SimpleQueue[
      tuple[fleet_member.Member, str, futures.Future]
    ]()
    self._ended_totals = dict(zero_totals)
    self._started_s = float("inf")
    self._was_ready = False

  # -- other threads --------------------------------------------------------

  def status(self) -> str:
    """Return what the replicas are doing, for the stall report."""
    states = [
      f"{m.name or f'replica {m.place}'} {m.state.value}" for m in self._members
    ]
    return (
      f"rollout: {self._gate.status()}, {', '.join(states)},"
      f" {self.coordinator.status()}"
    )

  def moving(self) -> object:
    """Return a value that changes when something is generated or adopted."""
    versions = [member.version for member in self._members]
    return self.coordinator.recorded_tokens, versions

  def stop(self) -> None:
    """End `run` soon."""
    self._gate.stop()

  def paused(self, timeout_s: float) -> contextlib.AbstractContextManager[None]:
    """Hold the rollout thread; the replicas go on with what they have."""
    return self._gate.paused(timeout_s, self.status)

  def abandon(self) -> None:
    """Give the thread up; the coordinator knows only what was reported."""
    self._gate.stop()

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups in progress, as they were last reported."""
    return self.coordinator.groups()

  def cut(self, version: int) -> None:
    """Take all groups back; each replica begins anew under another name."""
    for member in self._members:
      if member.state is fleet_member.State.READY:
        self._drain(member)
        member.state = fleet_member.State.RECALLED
    self.coordinator.cut(version)

  def metrics(self) -> dict[str, float]:
    """Return metrics of the replicas."""
    return self.coordinator.metrics(num_replicas=self.num_ready)

  @property
  def generated_tokens(self) -> int:
    """The tokens that replicas reported, without those that were refused."""
    return self.coordinator.recorded_tokens

  @property
  def num_ready(self) -> int:
    """The number of replicas that generate."""
    return sum(m.state is fleet_member.State.READY for m in self._members)

  def totals(self) -> dict[str, int | float]:
    """Return the sums over all replicas; of seconds, the averages."""
    totals = dict(self._ended_totals)
    for member in self._members:
      for name, value in member.totals.items():
        totals[name] += value
    for name in _SECONDS:
      totals[name] /= len(self._members)
    return totals

  def answers(
    self,
    prompts: Sequence[types.Prompt],
    settings: answers_lib.AnswerSettings,
    version: int,
    timeout_s: float,
  ) -> Iterator[list[answers_lib.Written]]:
    """Have the replicas answer questions, while `run` is held.

    If none is ready, replicas that have ended are started again.

    Raises:
      NoReplicaError: none was ready in time.
      ReplicaFailed: all of them have failed.
    """
    ask = fleet_answers.Questioning(
      prompts, settings, version, timeout_s, num_slots=self._num_slots
    )
    try:
      yield from ask.answers(
        lambda: self._handles(
          fleet_member.State.READY, fleet_member.State.RECALLED
        ),
        self._revive,
        self._start_timeout_s,
      )
    except remote.ReplicaLost as error:
      raise NoReplicaError(
        f"no replica was ready for an evaluation in {self._start_timeout_s:g} s"
        f" (cluster.start_timeout_s): {error}"
      ) from error

  def hold(self, version: int) -> fleet_answers.HeldByFleet:
    """Have the replicas that are ready hold a version for questions.

    One that was recalled begins anew first.
    """
    return fleet_answers.HeldByFleet(
      lambda: self._handles(fleet_member.State.READY),
      version,
      num_slots=self._num_slots,
    )

  def _handles(self, *states: fleet_member.State) -> list[remote.Handle]:
    handles = [(member.state, member.handle) for member in self._members]
    return [h for state, h in handles if state in states and h is not None]

  # -- start and end --------------------------------------------------------

  def start(self, check: Callable[[], None] = lambda: None) -> None:
    """Start the replicas, and wait until at least one of them is ready.

    Args:
      check: is called now and then, and may raise.

    Raises:
      NoReplicaError: none was ready in time.
      ReplicaFailed: one could not be started for a reason that will not pass.
    """
    self._started_s = self._seconds()
    while not self.num_ready:
      check()
      self._revive()
      waited_s = self._seconds() - self._started_s
      if waited_s > self._start_timeout_s:
        raise NoReplicaError(
          f"no replica was ready in {self._start_timeout_s:g} s"
          " (cluster.start_timeout_s)"
        )

  def close(self) -> None:
    """End all replicas."""
    for member in self._members:
      if member.handle is not None:
        member.handle.kill()
        member.handle = None

  # -- the rollout thread ---------------------------------------------------

  def run(self) -> None:
    """Hand out work and take reports, until stopped or the buffer is closed."""
    try:
      while self._gate.passes():
        self._gate.show("listening")
        self.round(_POLL_S)
    except buffer_lib.BufferClosed:
      pass
    finally:
      self._gate.end()

  def round(self, timeout_s: float) -> None:
    """Take what has happened, then hand out work.

    Args:
      timeout_s: how long to wait for something to happen.

    Raises:
      BufferClosed: the buffer is closed.
      ReplicaFailed: all replicas have failed over and over.
    """
    self._relaunch_lost()
    self._take_events(timeout_s)
    self._look_for_silence()
    self.coordinator.collect_scores()
    overdue = self.coordinator.overdue()
    for member in self._members:
      self._deliver(member, overdue.get(member.name, messages.Work()))
    self._hand_out()

  def _take_events(self, timeout_s: float) -> None:
    """Wait a moment for an event, and take those that there are.

    Each replica has one at most. More would only be answers to what is asked
    here, and taking them too could keep the thread from handing out work.
    """
    for _ in self._members:
      try:
        member, kind, future = self._events.get(timeout=timeout_s)
      except queue.Empty:
        return
      timeout_s = 0.0
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
          self._on_said(member, result)

  def _revive(self) -> None:
    """Start replicas that have ended, and take what has happened."""
    self._relaunch_lost()
    self._take_events(_POLL_S)

  # -- replicas come and go -------------------------------------------------

  def _relaunch_lost(self) -> None:
    for member in self._members:
      wait_s = min(_RELAUNCH_S * 2**member.num_failures, _MAX_RELAUNCH_S)
      waited_s = self._seconds() - member.since_s
      if member.state is fleet_member.State.LOST and waited_s >= wait_s:
        member.handle = self._launch(member.place)
        member.is_running = False
        self._attach(member)

  def _attach(self, member: fleet_member.Member) -> None:
    """Give the replica of a member a new name."""
    assert member.handle is not None
    for name, value in member.totals.items():
      self._ended_totals[name] += value
    member.totals = {}
    member.num_names += 1
    member.name = f"replica {member.place}"
    if member.num_names > 1:
      member.name += f" #{member.num_names}"
    member.state, member.since_s = fleet_member.State.STARTING, self._seconds()
    member.version, member.ask = -1, None
    member.given, member.num_sent = {}, 0
    self._expect(
      member, "attached", member.handle.attach(member.name, self._spec)
    )

  def _on_attached(self, member: fleet_member.Member) -> None:
    member.state, member.since_s = fleet_member.State.READY, self._seconds()
    member.is_running = True
    self._note(f"{member.name} is ready")
    self._collect(member)

  def _collect(self, member: fleet_member.Member) -> None:
    assert member.handle is not None
    self._expect(member, "said", member.handle.collect())

  def _expect(
    self, member: fleet_member.Member, kind: str, future: futures.Future
  ) -> None:
    assert member.handle is not None
    future.add_done_callback(
      functools.partial(self._put, member, kind, member.handle)
    )

  def _put(
    self,
    member: fleet_member.Member,
    kind: str,
    handle: remote.Handle,
    future: futures.Future,
  ) -> None:
    # A call to a replica that was replaced says nothing any more.
    if member.handle is handle:
      self._events.put((member, kind, future))

  def _lose(self, member: fleet_member.Member, why: str) -> None:
    """Give the groups of a replica whose process has ended to others."""
    self._drain(member)
    self._note(f"{member.name} is gone ({why}); it is started again")
    member.state, member.since_s = fleet_member.State.LOST, self._seconds()
    assert member.handle is not None
    member.handle.kill()  # it may have other processes
    member.handle = None

  def _fail(
    self, member: fleet_member.Member, error: remote.ReplicaFailed
  ) -> None:
    """Start a replica again that has failed, unless all fail over and over.

    Raises:
      ReplicaFailed: each failed several times, or none was ready before.
    """
    member.num_failures += 1
    fewest = min(m.num_failures for m in self._members)
    if fewest >= _MAX_FAILURES or not self._was_ready:
      raise error
    self._lose(member, str(error))

  def _drain(self, member: fleet_member.Member) -> None:
    if member.state is fleet_member.State.READY:
      self.coordinator.drained(messages.Drained(replica=member.name))

  def _look_for_silence(self) -> None:
    now_s = self._seconds()
    for member in self._members:
      silence_s = now_s - member.since_s
      if (
        member.state is fleet_member.State.READY
        and silence_s > self._replica_timeout_s
      ):
        self._drain(member)
        member.state = fleet_member.State.SILENT
        self._note(
          f"{member.name} has said nothing for {silence_s:.0f} s"
          " (cluster.replica_timeout_s); its groups go to others"
        )
      # A process that has not started may wait for a free host, however long.
      is_stuck = (
        member.state is fleet_member.State.STARTING and member.is_running
      )
      if is_stuck and silence_s > self._start_timeout_s:
        self._lose(member, f"it was not attached in {silence_s:.0f} s")

  # -- what replicas say ----------------------------------------------------

  def _on_said(self, member: fleet_member.Member, said: remote.Said) -> None:
    """Take reports, and listen on.

    What a replica says after its groups were taken from it is refused. It gets
    another name then, and begins anew.
    """
    for told in said.told:
      if isinstance(told, messages.Adopted):
        if member.state is fleet_member.State.READY:
          self.coordinator.adopted(told)
        continue
      report = wire.unpack_report(told)
      answer = self.coordinator.report(report)
      if any(one.trajectory.finish_reason for one in report.written):
        member.num_failures = 0
      if member.state is fleet_member.State.READY:
        self._deliver(member, answer)
    if member.state is not fleet_member.State.READY:
      if member.state is fleet_member.State.SILENT:
        self._note(f"{member.name} is heard again")
      self._attach(member)
      return
    self._was_ready = True
    member.since_s, member.version = self._seconds(), said.version
    member.totals = said.totals
    if said.ask is not None:
      member.ask = said.ask
      member.given = {
        number: count
        for number, count in member.given.items()
        if number > said.received
      }
    self._record_busy(member, said)
    self._collect(member)

  def _record_busy(
    self, member: fleet_member.Member, said: remote.Said
  ) -> None:
    """Record the average over the replicas, and what one of them does."""
    first = next(
      m for m in self._members if m.state is fleet_member.State.READY
    )
    now_s = self._busy.now()
    self._busy.add(
      said.busy_s / len(self._members),
      [
        timeline_lib.Interval(now_s - a.start_s, now_s - a.end_s, a.name)
        for a in said.activities
        if member is first
      ],
    )

  def _deliver(self, member: fleet_member.Member, work: messages.Work) -> None:
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
    rooms = {member.place: member.room for member in self._members}
    most_room.share_out(rooms, functools.partial(self._give, turns))
    for member in self._members:
      self._deliver(member, messages.Work(turns=tuple(turns[member.place])))

  def _give(self, turns: dict[int, list[messages.Turn]], place: int) -> int:
    """Add the turns of a group for a place, and return how many there are."""
    member = self._members[place]
    work = self.coordinator.admit(
      messages.Ask(replica=member.name, version=member.version, room=1)
    )
    turns[place] += work.turns
    return len(work.turns)
