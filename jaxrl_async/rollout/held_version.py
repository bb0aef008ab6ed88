"""A version of the weights that is held for an evaluation beside the groups.

A replica that holds a version answers questions with it between its calls for
groups, one call of each in turn, while it adopts newer versions for the groups.
An answer depends on the weights, the seed and its numbers alone, so that it is
the same as that of an evaluation for which everything else stands still.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
import queue
import threading

from jaxrl_async import types
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

EVALUATE = "evaluate"  # an activity
# Steps whose answers nobody has taken yet. With more of them the questions
# wait, as those do whose scores fall behind.
_MOST_UNREAD = 16
_LOOK_S = 0.2


class NotHeld(RuntimeError):
  """A version was released, or no replica could hold it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pass:
  """Questions to answer, and where the answers of each step go.

  The queue gets None after the last answer.
  """

  begin: Callable[
    [scheduler_lib.Scheduler], Iterator[list[answers_lib.Written]]
  ]
  written: "queue.Queue[list[answers_lib.Written] | None]"


class HeldVersion:
  """Weights of one version in a scheduler of their own, with its own cache.

  Invariant: the scheduler exists from the round in which the replica has the
  version until the first round after `release`. All programs are started by the
  replica's thread.

  Threads: `round` and `drop` belong to the replica's thread, the rest to any
  others.

  Attributes:
    version: the policy version.
    held: ends when the replica holds the version. It raises `NotHeld` if the
      replica has a newer one already, or if the version was released.
  """

  def __init__(
    self,
    version: int,
    tokenizer: tokenizer_lib.Tokenizer,
    on_drop: Callable[[], None] = lambda: None,
  ):
    """Ask for a version; the replica's rounds do the rest.

    Args:
      version: the policy version, which the replica has or will have next.
      tokenizer: of the policy, to find the texts that end answers.
      on_drop: is called in the replica's thread when the scheduler is dropped.
    """
    self.version = version
    self.held: futures.Future[None] = futures.Future()
    self._tokenizer = tokenizer
    self._on_drop = on_drop
    self._is_released = threading.Event()
    self._passes: queue.SimpleQueue[_Pass] = queue.SimpleQueue()
    self._scheduler: scheduler_lib.Scheduler | None = None
    self._now: tuple[_Pass, Iterator[list[answers_lib.Written]]] | None = None

  # -- other threads --------------------------------------------------------

  def is_held(self) -> bool:
    """Return whether a newer version may be published.

    Raises:
      NotHeld: as `held`.
    """
    if not self.held.done():
      return False
    self.held.result()
    return True

  def answers(
    self,
    prompts: Sequence[types.Prompt] | Mapping[int, types.Prompt],
    settings: answers_lib.AnswerSettings,
    questions: Iterable[int] | None = None,
  ) -> Iterator[list[answers_lib.Written]]:
    """Have questions answered, and yield as `answers.write`.

    Raises:
      NotHeld: the version was released before all were answered.
    """
    asked = _Pass(
      begin=lambda scheduler: answers_lib.write(
        scheduler,
        prompts,
        settings,
        tokenizer=self._tokenizer,
        questions=questions,
      ),
      written=queue.Queue(_MOST_UNREAD),
    )
    self._passes.put(asked)
    while True:
      try:
        written = asked.written.get(timeout=_LOOK_S)
      except queue.Empty:
        if self._is_released.is_set():
          raise NotHeld(f"version {self.version} was released") from None
        continue
      if written is None:
        return
      yield written

  def release(self) -> None:
    """Give the weights and the cache back in the next round."""
    self._is_released.set()

  # -- the replica's thread -------------------------------------------------

  def round(
    self,
    groups: scheduler_lib.Scheduler,
    params: decode_state_lib.EngineParams | None,
    busy: metrics_lib.BusyClock,
  ) -> bool:
    """Hold the version as soon as it is there, or make one step for a question.

    Args:
      groups: the scheduler of the replica's groups.
      params: the weights that this one has.
      busy: records the time of the step.

    Returns:
      Whether a step was made.
    """
    if self._is_released.is_set():
      self.drop()
      return False
    if self._scheduler is None and not self._hold(groups, params):
      return False
    assert self._scheduler is not None
    if self._now is None:
      try:
        asked = self._passes.get_nowait()
      except queue.Empty:
        return False
      self._now = asked, asked.begin(self._scheduler)
    asked, steps = self._now
    if asked.written.full():
      return False
    with busy.record(EVALUATE):
      written = next(steps, None)
    asked.written.put(written)
    if written is None:
      self._now = None
    return written is not None

  def _hold(
    self,
    groups: scheduler_lib.Scheduler,
    params: decode_state_lib.EngineParams | None,
  ) -> bool:
    """Hold the version if the groups have it, and return whether they do."""
    if params is None or groups.version < self.version:
      return False
    if groups.version > self.version:
      self.drop()
      return False
    self._scheduler = groups.fresh(metrics_lib.BusyClock())
    self._scheduler.adopt(params, self.version)
    self.held.set_result(None)
    return True

  def drop(self) -> None:
    """Give everything back at once."""
    self._is_released.set()
    self._now = None
    if self._scheduler is not None:
      self._scheduler = None
      self._on_drop()
    if not self.held.done():
      self.held.set_exception(NotHeld(f"version {self.version} was not held"))
