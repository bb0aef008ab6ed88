"""An evaluation whose questions are divided among several replicas."""

import collections
from collections.abc import Iterator, Sequence
from concurrent import futures

from jaxrl_async import types
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import remote

# Sequences of one part for each slot of an engine. Larger parts leave fewer
# slots empty at their ends, and are longer to repeat.
_SEQUENCES_PER_SLOT = 4


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
  ):
    """Divide the questions into parts.

    Args:
      prompts: of the questions.
      settings: how they are answered.
      version: the policy version that answers them.
      timeout_s: how long replicas wait for that version.
      num_slots: of each replica's engine.
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
      )
      for i in range(0, len(prompts), size)
    ]

  def answers(
    self, handles: Sequence[remote.Handle]
  ) -> Iterator[list[answers_lib.Written]]:
    """Yield the answers of each part.

    Raises:
      ReplicaLost: all replicas have ended.
      ReplicaFailed: all replicas have failed.
    """
    waiting = collections.deque(range(len(self._parts)))
    idle = list(handles)
    out: dict[futures.Future, tuple[int, remote.Handle]] = {}
    done: set[int] = set()
    error: Exception = remote.ReplicaLost("no replica is ready")
    while len(done) < len(self._parts):
      while idle and (part := self._next(waiting, out, done)) is not None:
        handle = idle.pop()
        out[handle.answer(self._parts[part])] = part, handle
      if not out:
        raise error
      ended, _ = futures.wait(out, return_when=futures.FIRST_COMPLETED)
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
