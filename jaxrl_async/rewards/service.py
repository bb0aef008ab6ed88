"""The reward service: scores groups in processes, with deadlines.

A scorer is user code that runs on text which a policy generated. It may raise,
hang, exit or return something that is not a reward. After the configured
retries each of these becomes a `RewardFailure`. A failure never becomes a
score.

A score may be the sum of several terms, each with its own deadline, retries and
counters. The processes belong to a pool on this host (`pool`).
"""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import threading
import time
from typing import Any

from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.types import Reward, Trajectory

_LOOK_S = 0.5  # between two looks whether the processes are alive

RewardFailure = scoring.RewardFailure
Scorer = term_lib.Scorer


@dataclasses.dataclass(slots=True)
class _Counters:
  """Failed attempts so far, and the seconds of the last attempts."""

  num_timeouts: int = 0
  num_errors: int = 0
  latencies_s: list[float] = dataclasses.field(default_factory=list)


class RewardService:
  """Scores groups in a pool of processes.

  Each submitted group ends as rewards or as a `RewardFailure`, as long as the
  owner of the handle polls. Each term of its score takes at most
  num_retries + 1 attempts, and the pool ends every attempt.

  Threads: any thread may submit, and owns the handle that it gets. `_lock`
  guards the counters.
  """

  def __init__(self, scorers: scoring.Scorers, num_workers: int):
    """Create a service.

    Args:
      scorers: of the pool's processes.
      num_workers: how many processes.
    """
    self._terms = scorers.terms
    self._pool = pool_lib.Pool(scorers, num_workers)
    self._lock = threading.Lock()
    self._counters = {term.name: _Counters() for term in self._terms}

  def warm_up(self, timeout_s: float = 120.0) -> None:
    """Wait until the processes are ready.

    Raises:
      TimeoutError: they were not ready in time.
      RuntimeError: they cannot score; the message says why.
    """
    self._pool.warm_up(timeout_s)

  def submit(
    self, item: dict[str, Any], trajectories: Sequence[Trajectory]
  ) -> "ScoreHandle":
    """Start to score a group, without waiting for the result.

    Args:
      item: the item of the prompt, which is passed to the scorer.
      trajectories: finished ones. The processes decode them.

    Raises:
      RuntimeError: the service was closed before.
    """
    return ScoreHandle(self, item, completion_lib.pack(trajectories))

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
    self._pool.close(timeout_s)

  def _begin(
    self, number: int, item: dict[str, Any], group: completion_lib.Unscored
  ) -> pool_lib.Running:
    """Start an attempt at a term of a group."""
    running = self._pool.score(
      scoring.Attempt(term=number, item=item, group=group)
    )
    submitted_s = time.monotonic()
    counters = self._counters[self._terms[number].name]
    # The callback does not take the lock, because it may run inside this
    # method. Appending is atomic.
    running.future.add_done_callback(
      lambda _: counters.latencies_s.append(time.monotonic() - submitted_s)
    )
    return running

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
    group: completion_lib.Unscored,
  ):
    """Start the first attempts."""
    self._outcome: list[Reward] | RewardFailure | None = None
    self._parts: list[_TermHandle] = []
    terms = service._terms
    try:
      used = [i for i, term in enumerate(terms) if term.scores(item)]
    except KeyError:
      used = []
    if not used:
      self._outcome = RewardFailure(
        "error: no reward is for an item of the source"
        f" {item.get('source')!r:.80}"
      )
      service._count_failure(terms[0], self._outcome)
    self._parts = [_TermHandle(service, i, item, group) for i in used]

  def done(self) -> bool:
    """Return whether the result has arrived, without waiting for it.

    Raises:
      RuntimeError: the service was closed before.
    """
    if self._outcome is None and all([part.done() for part in self._parts]):
      self._outcome = self._settled()
    return self._outcome is not None

  def result(self) -> list[Reward] | RewardFailure:
    """Wait for the rewards and return them in the order of the trajectories.

    Returns:
      The rewards, or the failure of the last attempt at the first term that
      failed.

    Raises:
      RuntimeError: the service was closed before.
    """
    while not self.wait(_LOOK_S):
      pass
    assert self._outcome is not None
    return self._outcome

  def wait(self, timeout_s: float) -> bool:
    """Wait until an attempt ends, and return whether the result has arrived.

    Raises:
      RuntimeError: the service was closed before.
    """
    if not self.done():
      futures.wait(
        [part.running.future for part in self._parts if part.outcome is None],
        timeout_s,
        futures.FIRST_COMPLETED,
      )
    return self.done()

  def _settled(self) -> list[Reward] | RewardFailure:
    rewards, answers = [], []
    for part in self._parts:
      if isinstance(part.outcome, RewardFailure):
        return part.outcome
      assert part.outcome is not None
      rewards.append(part.outcome.rewards)
      answers = part.outcome.answers
    return [
      dataclasses.replace(reward, answer=answer)
      if reward.answer is None
      else reward
      for reward, answer in zip(
        term_lib.combined([part.term for part in self._parts], rewards),
        answers,
        strict=True,
      )
    ]


class _TermHandle:
  """One term of a group's score.

  Attributes:
    outcome: None until the term is scored or has failed for the last time.
    running: the attempt that is under way.
  """

  def __init__(
    self,
    service: RewardService,
    number: int,
    item: dict[str, Any],
    group: completion_lib.Unscored,
  ):
    """Start the first attempt at the term of this number."""
    self.term = service._terms[number]
    self.outcome: scoring.Outcome | None = None
    self._service = service
    self._attempt = number, item, group
    self._attempts_left = self.term.num_retries
    self.running = service._begin(*self._attempt)

  def done(self) -> bool:
    """Return whether there is an outcome; start the next attempt if not."""
    if self.outcome is None:
      found = self.running.outcome()
      if found is not None:
        self._settle(found)
    return self.outcome is not None

  def _settle(self, outcome: scoring.Outcome) -> None:
    if isinstance(outcome, RewardFailure):
      self._service._count_failure(self.term, outcome)
      if self._attempts_left > 0:
        self._attempts_left -= 1
        self.running = self._service._begin(*self._attempt)
        return
      if self.term.name:
        outcome = dataclasses.replace(
          outcome, reason=f"{outcome.reason} (reward {self.term.name})"
        )
    self.outcome = outcome


def _metrics(prefix: str, counters: Sequence[_Counters]) -> dict[str, float]:
  latencies_s = [s for counter in counters for s in counter.latencies_s]
  return {
    f"{prefix}/timeouts": float(sum(x.num_timeouts for x in counters)),
    f"{prefix}/errors": float(sum(x.num_errors for x in counters)),
    f"{prefix}/latency_s": (
      sum(latencies_s) / len(latencies_s) if latencies_s else 0.0
    ),
  }
