"""What a coordinator and a replica in another process send each other.

The coordinator's process makes all calls, so that only it has to reach the
other one:

    attach    gives the replica a name and everything that it needs
    collect   waits until the replica has something to say, and returns it
    deliver   hands over turns and cancellations

`RemoteLink` turns the verbs of `messages` into these calls on the replica's
side, and `fleet.Fleet` turns them back on the coordinator's. Neither side waits
for the other: the engine decodes while its reports are on the way.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import threading
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import wire


class Activity(NamedTuple):
  """A period in which the replica's devices were busy.

  The times are seconds before the replica said so.
  """

  start_s: float
  end_s: float
  name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Said:
  """What a replica has said since the last `collect`.

  Attributes:
    name: the name that the replica had when it said this.
    told: reports and adoptions, in their order.
    ask: how many trajectories it has room for; None if nothing has changed.
    received: number of deliveries that it had taken when it asked.
    version: the policy version that it holds.
    totals: its counters, as `RolloutSide.totals` returns them.
    busy_s: seconds in which its devices were busy since the last `collect`.
    activities: the last of these periods.
    still_s: for how long the thread that generates has not come round, without
      the seconds in which it has compiled.
  """

  name: str
  told: tuple[wire.PackedReport | messages.Adopted, ...]
  ask: messages.Ask | None
  received: int
  version: int
  totals: dict[str, int | float]
  busy_s: float
  activities: tuple[Activity, ...] = ()
  still_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
  """Work for a replica.

  Attributes:
    name: the name of the replica that it is for. A replica that has got another
      name ignores it.
    number: counts the deliveries to this name, from 1. They may arrive in
      another order than they were sent.
    work: the work.
  """

  name: str
  number: int
  work: wire.PackedWork


@runtime_checkable
class Handle(Protocol):
  """A replica in another process, as the coordinator's process knows it.

  A future raises `ReplicaLost` if that process has ended, and `ReplicaFailed`
  if the replica has failed in it. No method waits.
  """

  def attach(self, name: str, spec: Any) -> futures.Future[None]:
    """Give the replica a name; it forgets all it had for an earlier one.

    The future is running from when the process is known to have started. Before
    that it may wait for a free host.
    """
    ...

  def collect(self) -> futures.Future[Said]:
    """Return what it says next, or nothing new after a while."""
    ...

  def deliver(self, delivery: Delivery) -> None:
    """Send work, without waiting for it to arrive."""
    ...

  def kill(self) -> None:
    """End the process, if it has not ended."""
    ...


class ReplicaLost(RuntimeError):
  """The process of a replica has ended, or its host cannot be reached."""


class ReplicaFailed(supervisor_lib.RunError):
  """A replica has failed; the message says why."""


class DoesNotFit(ReplicaFailed):
  """The host of a replica cannot work with the coordinator's.

  Another attempt on that host would end in the same way.
  """


class RemoteLink:
  """The coordinator as a replica in another process sees it.

  `admit` and `report` return the work that has arrived since the last call. A
  request for work stands until the replica makes another one.

  Threads: the replica's thread calls the verbs and `wait`. Threads of the
  transport call `collect` and `deliver`. A lock guards everything.
  """

  def __init__(
    self,
    name: str,
    new_condition: Callable[[], threading.Condition] = threading.Condition,
  ):
    """Create a link for a replica; a virtual clock has its own conditions."""
    self.name = name
    self._condition = new_condition()
    self._told: list[wire.PackedReport | messages.Adopted] = []
    self._ask: messages.Ask | None = None
    self._sent_ask: messages.Ask | None = None
    self._arrived: dict[int, messages.Work] = {}  # by number
    self._received = 0
    self._asked_after = 0  # deliveries taken when the ask was made

  # -- the replica's thread -------------------------------------------------

  def admit(self, ask: messages.Ask) -> messages.Work:
    """Keep a request until it is collected, and return what has arrived."""
    with self._condition:
      work = self._take()
      # The room that was asked for does not count what has just arrived.
      ask = dataclasses.replace(ask, room=max(0, ask.room - len(work.turns)))
      if ask != self._sent_ask or self._asked_after != self._received:
        self._ask, self._asked_after = ask, self._received
        self._condition.notify_all()
      return work

  def report(self, report: messages.Report) -> messages.Work:
    """Keep a report until it is collected, and return what has arrived."""
    with self._condition:
      self._told.append(wire.pack_report(report))
      self._condition.notify_all()
      return self._take()

  def adopted(self, adopted: messages.Adopted) -> None:
    """Keep this until it is collected."""
    with self._condition:
      self._told.append(adopted)
      self._condition.notify_all()

  def wait(self, timeout_s: float) -> None:
    """Wait until work has arrived, at most `timeout_s` seconds."""
    with self._condition:
      self._condition.wait_for(self._has_work, timeout_s)

  def _has_work(self) -> bool:
    return self._received + 1 in self._arrived

  def _take(self) -> messages.Work:
    """Return the deliveries that arrived, up to the first that is missing."""
    turns: list[messages.Turn] = []
    cancelled: list[int] = []
    while self._has_work():
      self._received += 1
      work = self._arrived.pop(self._received)
      turns += work.turns
      cancelled += work.cancelled
    return messages.Work(turns=tuple(turns), cancelled=tuple(cancelled))

  # -- threads of the transport ---------------------------------------------

  def collect(
    self, timeout_s: float
  ) -> tuple[
    tuple[wire.PackedReport | messages.Adopted, ...], messages.Ask | None, int
  ]:
    """Wait until there is something to say, at most `timeout_s` seconds.

    Returns:
      What was told, the request for work if it is a new one, and the number of
      deliveries that were taken when it was made.
    """
    with self._condition:
      self._condition.wait_for(
        lambda: self._told or self._ask is not None, timeout_s
      )
      told, self._told = tuple(self._told), []
      ask, self._ask = self._ask, None
      if ask is not None:
        self._sent_ask = ask
      return told, ask, self._asked_after

  def wake(self) -> None:
    """End a waiting `collect` at once."""
    with self._condition:
      self._condition.notify_all()

  def deliver(self, delivery: Delivery) -> None:
    """Keep work for the replica's thread."""
    if delivery.name != self.name:
      return
    work = wire.unpack_work(delivery.work)
    with self._condition:
      self._arrived[delivery.number] = work
      self._condition.notify_all()
