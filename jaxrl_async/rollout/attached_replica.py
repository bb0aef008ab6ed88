"""A replica in a process of its own, under the name it was attached with.

What the replica does, and what it says to the coordinator's process, without
the thread that drives it and the transport that calls it.
"""

from collections.abc import Callable
import dataclasses
import time

from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import replica as replica_lib


class AttachedReplica:
  """A replica, its link, and what was said of it.

  Threads: `round` belongs to the thread that drives the replica, and `collect`
  to a thread of the transport.

  Attributes:
    replica: the replica; its coordinator is `link`.
    link: the coordinator as the replica sees it.
  """

  def __init__(
    self,
    replica: replica_lib.Replica,
    link: remote.RemoteLink,
    *,
    busy: metrics_lib.BusyClock,
    report_every_s: float,
    seconds: Callable[[], float] = time.monotonic,
  ):
    """Take over a replica.

    Args:
      link: that the replica was created with.
      busy: of its scheduler.
      report_every_s: seconds between two reports of what is half-written.
      seconds: a clock, which stands still while a program is compiled.
    """
    self.replica = replica
    self.link = link
    self._busy = busy
    self._report_every_s = report_every_s
    self._seconds = seconds
    self._wait_s = 0.0
    self._reported_s = self._beat_s = seconds()
    self._said_s = 0.0  # by the clock `busy`, at the last `collect`
    self._busy_s = 0.0  # as of then

  def beat(self) -> None:
    """Show that the thread goes on, or waits for another process that does."""
    self._beat_s = self._seconds()

  def round(self, idle_s: float) -> bool:
    """Take work, make one step or wait, and sometimes report what there is.

    Args:
      idle_s: the longest wait if there is nothing to generate. Newer weights
        do not end it.

    Returns:
      Whether it made a step.
    """
    self.beat()
    replica = self.replica
    if replica.may_adopt():
      replica.adopt()
    replica.feed()
    can_step = replica.can_step
    if can_step:
      replica.step()
    else:
      start_s = self._seconds()
      if replica.version < 0:
        replica.wait_for_weights(idle_s)
      else:
        self.link.wait(idle_s)
      self._wait_s += self._seconds() - start_s
    now_s = self._seconds()
    if now_s - self._reported_s >= self._report_every_s:
      self._reported_s = now_s
      replica.report_all()
    return can_step

  def collect(self, timeout_s: float) -> remote.Said:
    """Return what the replica says next, or nothing new after `timeout_s`."""
    replica = self.replica
    told, ask, received = self.link.collect(timeout_s)
    before_s, self._said_s = self._said_s, self._busy.now()
    busy_s = metrics_lib.read({"": self._busy}).busy_s[""]
    before_busy_s, self._busy_s = self._busy_s, busy_s
    return remote.Said(
      name=replica.name,
      told=told,
      ask=ask,
      received=received,
      version=replica.version,
      totals={
        **dataclasses.asdict(replica.scheduler.stats),
        "wait_s": self._wait_s,
        "adopt_s": replica.adopt_s,
      },
      busy_s=max(0.0, busy_s - before_busy_s),
      activities=tuple(
        remote.Activity(
          self._said_s - one.start_s, self._said_s - one.end_s, one.activity
        )
        for one in self._busy.since(before_s)
      ),
      still_s=self._seconds() - self._beat_s,
    )
