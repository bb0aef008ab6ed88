"""Clients whose requests a replica writes beside its groups."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib


@runtime_checkable
class ClientRequests(Protocol):
  """Requests that share a scheduler with whatever else it writes.

  All methods belong to the thread that drives the scheduler.
  """

  def feed(
    self, scheduler: scheduler_lib.Scheduler, most: int | None = None
  ) -> None:
    """Hands over what is next, and cancels what nobody wants any more.

    Args:
      scheduler: that will write it.
      most: sequences of requests that it may have at a time.
    """
    ...

  def deliver(self, ended: Iterable[sequence_lib.Sequence]) -> None:
    """Tells clients what was written since the last time.

    Args:
      ended: of `Scheduler.step`; those of others are left alone.
    """
    ...

  def num_written(self) -> int:
    """Tokens written for requests so far."""
    ...

  def close(self, *, has_failed: bool) -> None:
    """Ends everything that has not finished; nothing is taken any more."""
    ...
