"""A replica's process and the way to it, under the faults of a case.

The replica, its scheduler and its side of the messages are the real ones. The
threads of `cluster.replica_process` take turns here.
"""

from collections.abc import Callable, Mapping
from concurrent import futures
import functools
from typing import Any, cast

from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import attached_replica
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from simulation import case as case_lib
from simulation import event_loop
from simulation import modelled_engine
from simulation import surroundings

HEARTBEAT_S = 0.5
LEASE_S = 1.5
MOST_SILENCE_S = 4.0
MOST_ABSENCE_S = 30.0
HANG_S = 8.0  # longer than the longest call at the pace `case.SLOW`
_MOST_LATE_S = 3.0
_ATTACH_S = 0.5
_IDLE_S = 0.25


def make_replica(
  loop: event_loop.Loop,
  case: case_lib.Case,
  name: str,
  link: messages.CoordinatorLink,
  channel: surroundings.Channel,
  busy: metrics_lib.BusyClock,
) -> replica_lib.Replica:
  """Return a replica whose engine and whose weights are models."""
  return replica_lib.Replica(
    name,
    link,
    scheduler_lib.Scheduler(
      modelled_engine.ModelledEngine(case.sizes, case.script),
      kv_on_adopt=case.kv_on_adopt,
      busy=busy,
    ),
    channel=cast(Any, channel),
    tokenizer=tokenizer(),
    fetch=lambda *_: surroundings.Fetch(loop, case.adopt_s, channel),
  )


def fail_next_call(replica: replica_lib.Replica) -> None:
  """Let the next call of a replica's engine raise."""
  engine: Any = replica.scheduler.engine
  engine.fails_next = True


def newest(processes: Mapping[int, "ReplicaProcess"]) -> int:
  """Return the place of the replica with the newest version."""
  versions = {
    place: process.replica.version
    for place, process in processes.items()
    if process.replica is not None
  }
  return max(versions, key=lambda place: versions[place], default=0)


@functools.cache
def tokenizer() -> tokenizer_lib.Tokenizer:
  """Return the tokenizer of all replicas; no text is looked at."""
  return tokenizer_lib.character_level()


class ReplicaProcess:
  """A process with a replica, whoever attached it last.

  Attributes:
    is_dead: whether the process has ended.
    pace: times as long as usual take its calls.
    silence_s: by how much the next report is late.
    silent_until_s: when that report arrives at the latest.
    late_until_s: when all work that is on its way has arrived.
    has_failed: whether its next report is that it has failed.
    has_hung: whether its thread never comes back.
    heard_s: when the trainer's process heard of it last.
  """

  def __init__(self, loop: event_loop.Loop, case: case_lib.Case):
    """Start a process, which waits to be attached."""
    self.is_dead = self.has_failed = self.has_hung = False
    self.pace = 1.0
    self.silence_s = self.silent_until_s = self.late_until_s = 0.0
    self.heard_s = 0.0
    self._loop = loop
    self._case = case
    self._attached: attached_replica.AttachedReplica | None = None
    self._caller: tuple[Handle, futures.Future, float] | None = None
    self._process = self._new_process()
    self._speaker = event_loop.Process(loop, self._speak)

  def _new_process(self) -> event_loop.Process:
    """Return what generates; the real one looks for weights while it waits."""
    return event_loop.Process(self._loop, self._turn, poll_s=_IDLE_S)

  @property
  def replica(self) -> replica_lib.Replica | None:
    """The replica under its present name; None before the first."""
    return self._attached and self._attached.replica

  @property
  def is_well(self) -> bool:
    """Whether nothing keeps it from working at its usual pace."""
    late_until_s = max(self.silent_until_s, self.late_until_s)
    is_late = self.silence_s > 0 or self._loop.now < late_until_s
    is_broken = self.is_dead or self.has_failed or self.has_hung
    return not (is_broken or self.pace > 1 or is_late)

  def die(self) -> None:
    """End the process; what it was about to say is lost."""
    self.is_dead = True
    self._process.end()
    self._speaker.end()
    if self._caller is not None:
      handle, future, _ = self._caller
      handle.end_later(future)

  def hang(self) -> None:
    """Let the thread that generates never come back."""
    self.has_hung = True
    self._process.end()

  def attach(self, name: str, channel: surroundings.Channel) -> None:
    """Become the replica of this name, and forget everything else."""
    self._process.end()
    self._process = self._new_process()
    self._caller = None
    if self._attached is not None:
      self._attached.replica.close(has_failed=False)
    link = remote.RemoteLink(name, new_condition=self._loop.condition)
    busy = metrics_lib.BusyClock(seconds=self._loop.seconds)
    self._attached = attached_replica.AttachedReplica(
      make_replica(self._loop, self._case, name, link, channel, busy),
      link,
      busy=busy,
      report_every_s=self._case.report_every_s,
      seconds=self._loop.seconds,
    )
    self._process.wake()

  def deliver(self, delivery: remote.Delivery) -> None:
    """Take work, if it is for the present name."""
    if self._attached is not None:
      self._attached.link.deliver(delivery)

  def collect(self, handle: "Handle", future: futures.Future) -> None:
    """Answer as soon as there is something to say, or after a heartbeat."""
    self._caller = handle, future, self._loop.now + HEARTBEAT_S
    self._speaker.wake()
    self._loop.after(HEARTBEAT_S, self._speaker.wake)

  def _turn(self) -> float | None:
    assert self._attached is not None
    if not self._attached.round(_IDLE_S):
      return None
    return self._case.call_s * self._loop.rng.random() * self.pace

  def _speak(self) -> None:
    if self._caller is None:
      return
    handle, future, latest_s = self._caller
    assert self._attached is not None
    said = self._attached.collect(HEARTBEAT_S)
    if not said.told and said.ask is None and self._loop.now < latest_s:
      return
    self._caller = None
    silence_s, self.silence_s = self.silence_s, 0.0
    if silence_s:
      self.silent_until_s = self._loop.now + silence_s + self._case.message_s
    handle.say_later(future, said, silence_s)


class Handle:
  """A replica's process as one start of the trainer knows it."""

  def __init__(
    self,
    loop: event_loop.Loop,
    case: case_lib.Case,
    process: ReplicaProcess,
    *,
    absence_s: float,
    wake: Callable[[], None],
    has_ended: Callable[[], bool],
  ):
    """Create a handle.

    Args:
      loop: the clock.
      case: how long messages take.
      process: the process, which may be an old one.
      absence_s: until it has a host.
      wake: wakes the process that drives the fleet.
      has_ended: returns whether that start of the trainer has ended.
    """
    self.process = process
    self._loop = loop
    self._case = case
    self._absence_s = absence_s
    self._wake = wake
    self._has_ended = has_ended

  def _way_s(self) -> float:
    return self._case.message_s * self._loop.rng.random()

  def attach(self, name: str, spec: Any) -> futures.Future[None]:
    """Give the replica a name; the spec is the channel of this start."""
    future: futures.Future[None] = futures.Future()
    delay_s = self._absence_s + _ATTACH_S * self._loop.rng.random()
    self._absence_s = 0.0
    self._loop.after(delay_s, self._attach, future, name, spec)
    return future

  def _attach(self, future: futures.Future, name: str, spec: Any) -> None:
    future.set_running_or_notify_cancel()
    # Nobody waits for a host any more after the end of that process.
    if self.process.has_failed:
      self.process.die()
    elif self.process.has_hung and not self.process.is_dead:
      return  # its thread would have to do it
    elif not self.process.is_dead and not self._has_ended():
      self.process.attach(name, spec)
    self._end(future, None)

  def collect(self) -> futures.Future[remote.Said]:
    """Return what it says next, or nothing new after a while."""
    future: futures.Future[remote.Said] = futures.Future()
    self._loop.after(self._way_s(), self._collect, future)
    return future

  def _collect(self, future: futures.Future) -> None:
    if self.process.is_dead:
      self._end(future, None)
    else:
      self.process.collect(self, future)

  def deliver(self, delivery: remote.Delivery) -> None:
    """Send work, which may arrive in another order, and sometimes very late."""
    way_s = self._way_s()
    if self._loop.rng.random() < self._case.late_frac:
      way_s += _MOST_LATE_S * self._loop.rng.random()
      process = self.process
      process.late_until_s = max(process.late_until_s, self._loop.now + way_s)
    self._loop.after(way_s, self._deliver, delivery)

  def _deliver(self, delivery: remote.Delivery) -> None:
    if not self.process.is_dead and not self._has_ended():
      self.process.deliver(delivery)

  def kill(self) -> None:
    """End the process."""
    if not self.process.is_dead:
      self.process.die()

  def say_later(
    self, future: futures.Future, said: remote.Said, late_s: float
  ) -> None:
    """Let what was said arrive, unless the process ends before that."""
    self._loop.after(late_s + self._way_s(), self._end, future, said)

  def end_later(self, future: futures.Future) -> None:
    """Let it be known that the process has ended."""
    self._loop.after(self._way_s(), self._end, future, None)

  def _end(self, future: futures.Future, result: Any) -> None:
    if future.done():
      return
    if self.process.is_dead:
      future.set_exception(remote.ReplicaLost("its process has ended"))
    elif self.process.has_failed:
      future.set_exception(remote.ReplicaFailed("a fault of the simulation"))
    else:
      self.process.heard_s = self._loop.now
      future.set_result(result)
    self._wake()
