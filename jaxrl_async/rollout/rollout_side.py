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
class Held(Protocol):
  """A version that answers questions while groups go on with newer ones.

  `held_version` has that of one replica, and `fleet_answers` that of several.
  """

  def is_held(self) -> bool:
    """Return whether a newer version may be published.

    Raises:
      NotHeld: no replica has the version, or will have it.
    """
    ...

  def answers(
    self, prompts: Sequence[types.Prompt], settings: answers_lib.AnswerSettings
  ) -> Iterator[list[answers_lib.Written]]:
    """Have questions answered, and yield as `answers.write`.

    Raises:
      NotHeld: the version was released, or its replicas have ended.
    """
    ...

  def release(self) -> None:
    """Give its memory back soon."""
    ...


@runtime_checkable
class RolloutSide(Protocol):
  """The coordinator and its replicas, driven by one thread.

  Threads: `run` belongs to that thread. While it runs, the coordinator belongs
  to it too. Other threads may call the rest, but `groups`, `answers` and `hold`
  only inside `paused`.
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

  def abandon(self) -> None:
    """Give its thread up, which could not be paused: the run ends.

    From now on `groups` and `generated_tokens` are about what was reported
    last, and need no pause. They must not be relied on if the thread goes on.
    """
    ...

  def groups(self) -> dict[int, types.RolloutGroup]:
    """Return the groups being generated or scored, by index."""
    ...

  def cut(self, version: int) -> None:
    """Make all trajectories go on from their tokens alone, inside `paused`.

    All caches are made again, under this version of the weights or a newer one,
    as they are when a run continues from a checkpoint.
    """
    ...

  def totals(self) -> dict[str, int | float]:
    """Return counters since the start: `SchedulerStats`, and two of seconds.

    In `wait_s` there was nothing to generate. In `adopt_s` nothing was decoded
    because weights were adopted.
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

  def hold(self, version: int) -> Held:
    """Hold the newest published version for questions, beside the groups.

    Its cache and its weights stay in memory until it is released. A version
    that was held before is released.
    """
    ...
