"""The interface of the rollout side, wherever its engines are.

`worker.RolloutWorker` has one replica in this process. `fleet.Fleet` has any
number of them in other processes.
"""

from collections.abc import Iterator, Sequence
import contextlib
from typing import Protocol, runtime_checkable

from jaxrl_async import types
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import coordinator as coordinator_lib


@runtime_checkable
class RolloutSide(Protocol):
  """The coordinator and its replicas, driven by one thread.

  Threads: `run` belongs to that thread. While it runs, the coordinator belongs
  to it too. Other threads may call the rest, `groups` and `answers` only inside
  `paused`.
  """

  @property
  def coordinator(self) -> coordinator_lib.Coordinator:
    """The coordinator."""
    ...

  def run(self) -> None:
    """Generate until it is stopped or the buffer is closed."""
    ...

  def stop(self) -> None:
    """End `run` soon."""
    ...

  def status(self) -> str:
    """Return what it is doing, for the stall report."""
    ...

  def moving(self) -> object:
    """Return a value that changes when something is generated or adopted."""
    ...

  def paused(self, timeout_s: float) -> contextlib.AbstractContextManager[None]:
    """Hold its thread while the context is open.

    Raises:
      TimeoutError: the thread did not pause within `timeout_s` seconds.
    """
    ...

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups being generated or scored, by index."""
    ...

  def totals(self) -> dict[str, int | float]:
    """Return counters since the start: those of `SchedulerStats`, and seconds.

    The seconds are `wait_s`, in which there was nothing to generate, and
    `adopt_s`, in which nothing was decoded because weights were adopted.
    """
    ...

  def metrics(self) -> dict[str, float]:
    """Return how many replicas generate, and the tokens that were refused."""
    ...

  @property
  def generated_tokens(self) -> int:
    """The tokens generated for groups since the start."""
    ...

  def answers(
    self,
    prompts: Sequence[types.Prompt],
    settings: answers_lib.AnswerSettings,
    version: int,
    timeout_s: float,
  ) -> Iterator[list[answers_lib.Written]]:
    """Answer questions with the weights of a version, or of a newer one.

    Raises:
      TimeoutError: the version did not arrive within `timeout_s` seconds.
    """
    ...
