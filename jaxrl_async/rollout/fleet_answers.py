"""An evaluation whose questions are divided among several replicas.

Either all of their groups stand still, or each replica holds the version that
is evaluated, and answers between two calls for groups.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import threading

from jaxrl_async import types
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import held_version
from jaxrl_async.rollout import remote

# Sequences of one part for each slot of an engine. Larger parts leave fewer
# slots empty at their ends, and are longer to repeat.
_SEQUENCES_PER_SLOT = 4
_LOOK_S = 0.2


class Questioning:
  """Questions in parts, of which each replica answers one at a time.

  An answer depends on the weights, the seed and the numbers of question and
  sample alone. A part of a replica that ends is therefore answered by another
  one. When no parts are left, replicas that have nothing to do repeat those
  that are still out, and the first answers count. So no slow replica, and none
  that says nothing, holds the evaluation up.
  """

  def __init__(
    self,
    prompts: Sequence[types.Prompt],
    settings: answers_lib.AnswerSettings,
    version: int,
    timeout_s: float,
    *,
    num_slots: int,
    is_held: bool = False,
  ):
    """Divide the questions into parts.

    Args:
      prompts: of the questions.
      settings: how they are answered.
      version: the policy version that answers them.
      timeout_s: how long replicas wait for that version.
      num_slots: of each replica's engine.
      is_held: whether the replicas hold the version.
    """
    size = max(1, _SEQUENCES_PER_SLOT * num_slots // settings.samples)
    numbers = range(len(prompts))
    self._parts = [
      remote.Questions(
        version=version,
        prompts=tuple(prompts[i : i + size]),
        numbers=tuple(numbers[i : i + size]),
        settings=settings,
        timeout_s=timeout_s,
        is_held=is_held,
      )
      for i in range(0, len(prompts), size)
    ]

  def answers(
    self,
    ready: Callable[[], Sequence[remote.Handle]],
    revive: Callable[[], None] | None = None,
    revive_timeout_s: float = 0.0,
  ) -> Iterator[list[answers_lib.Written]]:
    """Yield the answers of each part, and now and then none.

    Args:
      ready: returns the replicas that may answer; there may be more each time.
      revive: is called again and again while no replica answers, and helps them
        to become ready.
      revive_timeout_s: how long no replica may answer before this is an error.

    Raises:
      ReplicaLost: all replicas have ended.
      ReplicaFailed: all replicas have failed.
    """
    waiting = collections.deque(range(len(self._parts)))
    known: list[remote.Handle] = []
    idle: list[remote.Handle] = []
    out: dict[futures.Future, tuple[int, remote.Handle]] = {}
    done: set[int] = set()
    error: Exception = remote.ReplicaLost("no replica is ready")
    deadline = supervisor_lib.Deadline(revive_timeout_s)
    while len(done) < len(self._parts):
      more = [handle for handle in ready() if handle not in known]
      known += more
      idle += more
      while idle and (part := self._next(waiting, out, done)) is not None:
        handle = idle.pop()
        out[handle.answer(self._parts[part])] = part, handle
      if out:
        deadline = supervisor_lib.Deadline(revive_timeout_s)
      else:
        has_failed = isinstance(error, remote.ReplicaFailed)
        if revive is None or has_failed or deadline.next_wait_s() == 0:
          raise error
        revive()
        yield []
        continue
      ended, _ = futures.wait(
        out, timeout=_LOOK_S, return_when=futures.FIRST_COMPLETED
      )
      if not ended:
        if revive is not None:
          revive()
        yield []  # so that the caller can look whether it shall go on
      for future in ended:
        part, handle = out.pop(future)
        try:
          written = future.result()
        except (remote.ReplicaLost, remote.ReplicaFailed) as failure:
          error = failure
          if part not in done:
            waiting.append(part)
          continue
        idle.append(handle)
        if part not in done:
          done.add(part)
          yield written

  def _next(
    self,
    waiting: collections.deque[int],
    out: dict[futures.Future, tuple[int, remote.Handle]],
    done: set[int],
  ) -> int | None:
    """Return the part to answer next, or None if there is nothing to do."""
    if waiting:
      return waiting.popleft()
    times = collections.Counter(part for part, _ in out.values())
    once = [part for part, n in times.items() if n == 1 and part not in done]
    return min(once, default=None)


class HeldByFleet:
  """A version that all replicas which are ready have been asked to hold.

  A replica that adopts a newer version first is left out. So is one that
  attaches after others hold it.

  Threads: any may call any method. The lock guards which replicas were asked.
  """

  def __init__(
    self,
    ready: Callable[[], Sequence[remote.Handle]],
    version: int,
    *,
    num_slots: int,
  ):
    """Ask the replicas to hold a version.

    Args:
      ready: returns the replicas that can be asked now. If there are none, the
        first ones that are ready later are asked.
      version: the policy version that was published last.
      num_slots: of each replica's engine.
    """
    self._ready = ready
    self._version = version
    self._num_slots = num_slots
    self._lock = threading.Lock()
    self._held: list[tuple[remote.Handle, futures.Future[None]]] = []
    self._is_released = threading.Event()
    with self._lock:
      self._ask()

  def _ask(self) -> bool:
    """Ask the replicas that were not asked; return whether there are any."""
    if self._is_released.is_set():
      return False
    asked = [handle for handle, _ in self._held]
    more = [handle for handle in self._ready() if handle not in asked]
    self._held += [(handle, handle.hold(self._version)) for handle in more]
    return bool(more)

  def is_held(self) -> bool:
    """Return whether a replica holds the version.

    Raises:
      NotHeld: none does or will.
    """
    # Nobody asks a further replica between the looks of one thread.
    with self._lock:
      ended = [future for _, future in self._held if future.done()]
      errors = [future.exception() for future in ended]
      if any(error is None for error in errors):
        return True
      if len(ended) < len(self._held) or self._ask():
        return False
      if not (self._held or self._is_released.is_set()):
        return False
    raise held_version.NotHeld(
      "; ".join(map(str, errors)) or "no replica was ready"
    )

  def _holding(self) -> list[remote.Handle]:
    with self._lock:
      held = list(self._held)
    return [
      handle
      for handle, future in held
      if future.done() and future.exception() is None
    ]

  def answers(
    self, prompts: Sequence[types.Prompt], settings: answers_lib.AnswerSettings
  ) -> Iterator[list[answers_lib.Written]]:
    """Have the replicas that hold the version answer questions.

    Raises:
      NotHeld: it was released, or all of them have ended or failed.
    """
    asked = Questioning(
      prompts,
      settings,
      self._version,
      timeout_s=0.0,
      num_slots=self._num_slots,
      is_held=True,
    )
    try:
      while not self.is_held():
        if self._is_released.wait(_LOOK_S):
          raise held_version.NotHeld(f"version {self._version} was released")
      for written in asked.answers(self._holding):
        if self._is_released.is_set():
          raise held_version.NotHeld(f"version {self._version} was released")
        yield written
    except (remote.ReplicaLost, remote.ReplicaFailed) as error:
      raise held_version.NotHeld(str(error)) from error

  def release(self) -> None:
    """Have the replicas give it back."""
    with self._lock:
      self._is_released.set()
      held = list(self._held)
    for handle, _ in held:
      handle.release(self._version)
