"""The reward service: scores groups in a pool of processes, with deadlines.

A scorer is user code that runs on text which a policy generated. It may raise,
hang, exit or return something that is not a reward. After the configured
retries each of these becomes a `RewardFailure`. A failure never becomes a
score.

A score may be the sum of several terms, each with its own deadline, retries and
counters. One term of one group is one task of the pool: 32 groups of 16 cost 32
round trips, not 512.
"""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import multiprocessing
import signal
import sys
import threading
import time
import traceback
from typing import Any

import pebble

from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import file_lock
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.types import Completion, Reward

RewardFailure = scoring.RewardFailure
Scorer = term_lib.Scorer

_PRELOAD = "jaxrl_async.rewards.preload"
# A group is given up this many seconds after the deadlines of all its scores.
_GROUP_GRACE_S = 2.0
_KILLED = "timeout: the scorer did not return; its process was killed"


@dataclasses.dataclass(slots=True)
class _Counters:
  """Failed attempts so far, and the seconds of the last attempts."""

  num_timeouts: int = 0
  num_errors: int = 0
  latencies_s: list[float] = dataclasses.field(default_factory=list)


class RewardService:
  """A pool of processes that score groups.

  Invariant: each submitted group ends as rewards or as a `RewardFailure`, as
  long as the owner of the handle polls. Each term of its score takes at most
  num_retries + 1 attempts. An attempt ends within group size * timeout_s + 2 s
  after a process has taken it up, or timeout_s + 2 s if a server scores the
  group. This holds because each score runs under a timer in its process. A
  process that ignores the timer is killed by the kernel or, as a last resort,
  by pebble. A broken pool is replaced, and the groups that it held count a
  failed attempt.

  Threads: any thread may submit, and owns the handle that it gets. `_lock`
  guards the pool in use and the counters.
  """

  def __init__(
    self,
    *,
    num_workers: int,
    terms: Sequence[term_lib.Term],
    answer_prefix: str,
  ):
    """Start the processes, which import their libraries in the background.

    Args:
      num_workers: number of processes that score.
      terms: at least one, with different names.
      answer_prefix: prefix of the answer; see `extraction.extract_answer`.
    """
    self._num_workers = num_workers
    self._terms = tuple(terms)
    self._answer_prefix = answer_prefix
    self._lock = threading.Lock()
    self._is_closed = False
    self._stopping: list[threading.Thread] = []
    self._counters = {term.name: _Counters() for term in terms}
    multiprocessing.set_forkserver_preload([_PRELOAD])
    self._pool = self._new_pool()
    self._greetings: list[futures.Future] = []
    self._started: futures.Future[None] = futures.Future()
    threading.Thread(
      target=self._start, name="start reward processes", daemon=True
    ).start()

  def warm_up(self, timeout_s: float = 120.0) -> None:
    """Wait until the processes are ready, and check what they imported.

    Raises:
      TimeoutError: they were not ready in time.
      RuntimeError: they imported jax, or they did not import `preload`.
    """
    deadline = time.monotonic() + timeout_s
    self._started.result(timeout=timeout_s)
    for greeting in self._greetings:
      is_preloaded, has_jax = greeting.result(
        timeout=max(0.0, deadline - time.monotonic())
      )
      if has_jax:
        raise RuntimeError("a reward process imported jax; its scorer must not")
      if not is_preloaded:
        raise RuntimeError(
          "reward processes lack their libraries: a fork server was running "
          "before the reward service; make the service first"
        )

  def submit(
    self, item: dict[str, Any], completions: Sequence[Completion]
  ) -> "ScoreHandle":
    """Start to score a group, without waiting for the result.

    Args:
      item: the item of the prompt, which is passed to the scorer.
      completions: results of `completion.of_trajectory`. This method fills in
        their answers.
    """
    answered = [
      dataclasses.replace(
        completion,
        answer=extraction.extract_answer(completion.text, self._answer_prefix),
      )
      for completion in completions
    ]
    return ScoreHandle(self, item, answered)

  def metrics(self) -> dict[str, float]:
    """Return the failed attempts so far and the mean seconds of an attempt.

    The mean is over the attempts since the last call. Each term that has a name
    has these metrics too.
    """
    with self._lock:
      read = {}
      for name, counters in self._counters.items():
        latencies_s, counters.latencies_s = counters.latencies_s, []
        read[name] = dataclasses.replace(counters, latencies_s=latencies_s)
    values = _metrics("reward_service", [*read.values()])
    for name, counters in read.items():
      if name:
        values |= _metrics(f"reward_service/{name}", [counters])
    return values

  def close(self, timeout_s: float = 10.0) -> None:
    """End the processes and give up the groups that are being scored.

    Raises:
      TimeoutError: the processes did not end in time.
    """
    with self._lock:
      if not self._is_closed:
        self._is_closed = True
        self._stop(self._pool)
      stopping = list(self._stopping)
    deadline = time.monotonic() + timeout_s
    for thread in stopping:
      thread.join(max(0.0, deadline - time.monotonic()))
      if thread.is_alive():
        raise TimeoutError(
          f"reward processes did not end within {timeout_s:g} s"
        )

  def _start(self) -> None:
    """Fork the processes, which waits for the fork server's imports."""
    try:
      with self._lock:
        if not self._is_closed:
          # There is one task for each process, so that all of them start now.
          self._greetings = [
            self._pool.schedule(_loaded_modules)
            for _ in range(self._num_workers)
          ]
      self._started.set_result(None)
    except BaseException as error:  # `warm_up` raises it
      self._started.set_exception(error)

  def _new_pool(self) -> pebble.ProcessPool:
    return pebble.ProcessPool(
      max_workers=self._num_workers,
      context=file_lock.ForkServerContext(),
    )

  def _stop(self, pool: pebble.ProcessPool) -> None:
    """Stop a pool on a separate thread, since pebble's join has no timeout."""
    pool.stop()
    thread = threading.Thread(
      target=pool.join, name="stop reward processes", daemon=True
    )
    thread.start()
    self._stopping.append(thread)

  def _schedule(
    self,
    term: term_lib.Term,
    item: dict[str, Any],
    completions: list[Completion],
  ) -> tuple[pebble.ProcessPool, futures.Future]:
    with self._lock:
      if self._is_closed:
        raise RuntimeError("the reward service is closed")
      if not self._pool.active:
        self._stop(self._pool)
        self._pool = self._new_pool()
      future = self._pool.schedule(
        scoring.score_group,
        args=(term, item, completions),
        timeout=scoring.max_group_s(term, len(completions)) + _GROUP_GRACE_S,
      )
      submitted_s = time.monotonic()
      # The callback does not take the lock, because it runs on a thread of the
      # pool or inside this method. Appending is atomic.
      future.add_done_callback(
        lambda _: self._counters[term.name].latencies_s.append(
          time.monotonic() - submitted_s
        )
      )
      return self._pool, future

  def _count_failure(self, term: term_lib.Term, failure: RewardFailure) -> None:
    with self._lock:
      if failure.reason.startswith("timeout"):
        self._counters[term.name].num_timeouts += 1
      else:
        self._counters[term.name].num_errors += 1


class ScoreHandle:
  """A group that is being scored. Retries start when its owner polls.

  All terms of its score run to their end, also if one of them has failed.
  """

  def __init__(
    self,
    service: RewardService,
    item: dict[str, Any],
    completions: list[Completion],
  ):
    """Start the first attempts."""
    self._completions = completions
    self._outcome: list[Reward] | RewardFailure | None = None
    self._parts: list[_TermHandle] = []
    try:
      used = [term for term in service._terms if term.scores(item)]
    except KeyError:
      used = []
    if not used:
      self._outcome = RewardFailure(
        "error: no reward is for an item of the source"
        f" {item.get('source')!r:.80}"
      )
      service._count_failure(service._terms[0], self._outcome)
    self._parts = [_TermHandle(service, x, item, completions) for x in used]

  def done(self) -> bool:
    """Return whether the result has arrived, without waiting for it.

    Raises:
      RuntimeError: the service was closed before.
    """
    if self._outcome is None and all([part.done() for part in self._parts]):
      self._outcome = self._settled()
    return self._outcome is not None

  def result(self) -> list[Reward] | RewardFailure:
    """Wait for the rewards and return them in the order of the completions.

    Returns:
      The rewards, or the failure of the last attempt at the first term that
      failed.

    Raises:
      RuntimeError: the service was closed before.
    """
    while not self.done():
      # The wait has a timeout, because a closed or broken pool never completes
      # its futures.
      futures.wait(
        [part.future for part in self._parts if part.outcome is None],
        timeout=0.1,
        return_when=futures.FIRST_COMPLETED,
      )
    assert self._outcome is not None
    return self._outcome

  def _settled(self) -> list[Reward] | RewardFailure:
    rewards = []
    for part in self._parts:
      assert part.outcome is not None
      if isinstance(part.outcome, RewardFailure):
        return part.outcome
      rewards.append(part.outcome)
    return [
      dataclasses.replace(reward, answer=completion.answer)
      if reward.answer is None
      else reward
      for reward, completion in zip(
        term_lib.combined([part.term for part in self._parts], rewards),
        self._completions,
        strict=True,
      )
    ]


class _TermHandle:
  """One term of a group's score.

  Attributes:
    outcome: None until the term is scored or has failed for the last time.
    future: of the attempt that is under way.
  """

  def __init__(
    self,
    service: RewardService,
    term: term_lib.Term,
    item: dict[str, Any],
    completions: list[Completion],
  ):
    """Start the first attempt."""
    self.term = term
    self.outcome: list[Reward] | RewardFailure | None = None
    self._service = service
    self._group = item, completions
    self._attempts_left = term.num_retries
    self._begin()

  def done(self) -> bool:
    """Return whether there is an outcome; start the next attempt if not."""
    if self.outcome is not None:
      return True
    if not self.future.done():
      if self._service._is_closed:
        raise RuntimeError("the reward service is closed")
      if self._pool.active:
        return False
    self._settle(_outcome(self.future))
    return self.outcome is not None

  def _begin(self) -> None:
    self._pool, self.future = self._service._schedule(self.term, *self._group)

  def _settle(self, outcome: list[Reward] | RewardFailure) -> None:
    if isinstance(outcome, RewardFailure):
      self._service._count_failure(self.term, outcome)
      if self._attempts_left > 0:
        self._attempts_left -= 1
        self._begin()
        return
      if self.term.name:
        outcome = dataclasses.replace(
          outcome, reason=f"{outcome.reason} (reward {self.term.name})"
        )
    self.outcome = outcome


def _outcome(future: futures.Future) -> list[Reward] | RewardFailure:
  """Return the rewards or the failure of one attempt."""
  if not future.done():
    return RewardFailure("error: the pool of reward processes broke")
  if future.cancelled():
    return RewardFailure("error: cancelled")
  error = future.exception()
  if error is None:
    return future.result()
  if isinstance(error, pebble.ProcessExpired):
    if error.exitcode == -signal.SIGVTALRM:
      return RewardFailure(_KILLED)
    return RewardFailure(
      f"error: the reward process died with exit code {error.exitcode}"
    )
  if isinstance(error, TimeoutError):
    return RewardFailure(_KILLED)
  return RewardFailure(
    f"error: {scoring.one_line(error)}",
    "".join(traceback.format_exception(error)),
  )


def _metrics(prefix: str, counters: Sequence[_Counters]) -> dict[str, float]:
  latencies_s = [s for counter in counters for s in counter.latencies_s]
  return {
    f"{prefix}/timeouts": float(sum(x.num_timeouts for x in counters)),
    f"{prefix}/errors": float(sum(x.num_errors for x in counters)),
    f"{prefix}/latency_s": (
      sum(latencies_s) / len(latencies_s) if latencies_s else 0.0
    ),
  }


def _loaded_modules() -> tuple[bool, bool]:
  """Run in a reward process: whether it has the preload, and jax."""
  return _PRELOAD in sys.modules, "jax" in sys.modules
