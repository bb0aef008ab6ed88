"""The batch loader: prepares the next batch while the current one trains.

Advantages, packing and the transfer to the device need no weights, so that
another thread can do them. The loader is one batch ahead: it takes the batch of
step s + 1 as soon as that of step s has been handed over and the buffer allows
it. With max_staleness = 0 the buffer does not allow it before step s is done,
so that nothing is prepared ahead.
"""

from collections.abc import Callable, Generator
import dataclasses
import threading
import time
from typing import Generic, TypeVar

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib

Prepared = TypeVar("Prepared")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loaded(Generic[Prepared]):
  """A prepared batch and the time at which its groups were taken.

  Attributes:
    taken_s: when the groups were taken from the buffer, in seconds of
      `time.perf_counter`.
  """

  batch: Prepared
  taken_s: float


class BatchLoader(Generic[Prepared]):
  """Takes batches from the buffer in order and prepares them, one ahead.

  Invariant: groups that were taken but not yet trained on are still in the
  buffer's `state`. A checkpoint needs nothing of the loader.

  Threads: `run` belongs to the loader's thread and `next` to the thread that
  trains. The other methods may be called from any thread. One condition guards
  the batch that is ready. `run` waits for the buffer and, while a batch is
  ready, for `next` or `stop`. `next` waits for a batch or for the end of `run`.
  """

  def __init__(
    self,
    buffer: buffer_lib.Buffer,
    prepare: Callable[[list[types.RolloutGroup]], Prepared],
    *,
    first_step: int,
    end_step: int,
    new_condition: Callable[[], threading.Condition] = threading.Condition,
  ):
    """Create a loader of the batches of steps first_step to end_step - 1.

    Args:
      first_step: the first step that has not taken its batch.
      end_step: the number of steps of the run.
      new_condition: makes the condition; on another clock, of another kind.
    """
    self._buffer = buffer
    self._prepare = prepare
    self._steps = range(first_step, end_step)
    self._ready: Loaded[Prepared] | None = None
    self._is_stopping = False
    self._has_ended = False
    self._condition = new_condition()
    self._status = "not started", time.perf_counter()

  def status(self) -> str:
    """Return what the loader is doing, for the stall report."""
    text, since_s = self._status
    return f"batch loader: {text} since {time.perf_counter() - since_s:.1f} s"

  def stop(self) -> None:
    """End `run`, at the latest when the buffer is closed."""
    with self._condition:
      self._is_stopping = True
      self._condition.notify_all()

  def next(self, timeout_s: float) -> Loaded[Prepared] | None:
    """Return the next step's batch.

    The result is None after the timeout, or if there are no more batches.
    """
    with self._condition:
      self._condition.wait_for(
        lambda: self._ready is not None or self._has_ended, timeout_s
      )
      loaded, self._ready = self._ready, None
      if loaded is not None:
        self._condition.notify_all()
      return loaded

  def run(self) -> None:
    """Load batches until the loader is stopped or the buffer is closed."""
    for _ in self.waits():
      pass

  def waits(self) -> Generator[None, None, None]:
    """Do what `run` does, and yield after each wait that was in vain."""
    try:
      for step in self._steps:
        self._show(f"waiting for a batch for step {step}")
        while (groups := self._take(step)) is None:
          if self._is_stopping:
            return
          yield
        taken_s = time.perf_counter()
        self._show(f"preparing the batch of step {step}")
        batch = self._prepare(groups)
        self._show(f"ready with the batch of step {step}")
        self._offer(Loaded(batch=batch, taken_s=taken_s))
        while not self._is_taken():
          yield
        if self._is_stopping:
          return
    except buffer_lib.BufferClosed:
      pass
    finally:
      with self._condition:
        self._has_ended = True
        self._show("ended")
        self._condition.notify_all()

  def _take(self, step: int) -> list[types.RolloutGroup] | None:
    if self._is_stopping:
      return None
    return self._buffer.get_batch(step, timeout_s=0.2)

  def _offer(self, loaded: Loaded[Prepared]) -> None:
    with self._condition:
      self._ready = loaded
      self._condition.notify_all()

  def _is_taken(self) -> bool:
    """Wait until the batch was taken or the loader is stopped."""
    with self._condition:
      return self._condition.wait_for(
        lambda: self._ready is None or self._is_stopping
      )

  def _show(self, status: str) -> None:
    self._status = status, time.perf_counter()
