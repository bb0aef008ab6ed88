"""The interface to client requests that a replica serves beside its groups."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib


@runtime_checkable
class ClientRequests(Protocol):
  """Client requests that share a scheduler with other sequences.

  Threads: all methods belong to the thread that drives the scheduler.
  """

  def feed(
    self, scheduler: scheduler_lib.Scheduler, most: int | None = None
  ) -> None:
    """Submit the next requests and cancel those whose clients have left.

    The scheduler may hold at most `most` sequences of requests at a time; None
    sets no limit.
    """
    ...

  def deliver(self, ended: Iterable[sequence_lib.Sequence]) -> None:
    """Send clients the tokens that were generated since the last call.

    Of what `Scheduler.step` returned, other sequences are ignored.
    """
    ...

  def num_written(self) -> int:
    """Return the number of tokens generated for requests so far."""
    ...

  def close(self, *, has_failed: bool) -> None:
    """End all unfinished requests and accept no further ones."""
    ...
