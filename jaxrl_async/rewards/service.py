"""The reward service: scores groups in processes, with deadlines.

A scorer is user code that runs on text which a policy generated. It may raise,
hang, exit or return something that is not a reward. After the configured
retries each of these becomes a `RewardFailure` of that completion, and its
group goes on without it. It becomes the score 0 only where the config says so.
If a server is down or no completion can be scored, the group fails.

A score may be the sum of several terms, each with its own deadline, retries and
counters. The processes belong to a pool on this host (`pool`).
"""

from collections.abc import Iterable, Sequence
from concurrent import futures
import dataclasses
import itertools
import threading
import time
from typing import Any

from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import cut_scores
from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.types import Reward, Trajectory

_LOOK_S = 0.5  # between two looks whether the processes are alive

RewardFailure = scoring.RewardFailure
Scorer = term_lib.Scorer
Outcome = list[Reward | RewardFailure] | RewardFailure


@dataclasses.dataclass(slots=True)
class _Counters:
  """Failed scores so far, and the seconds of the last attempts."""

  num_timeouts: int = 0
  num_errors: int = 0
  latencies_s: list[float] = dataclasses.field(default_factory=list)


class RewardService:
  """Scores groups in a pool of processes.

  Each submitted group ends as rewards or as a `RewardFailure`, as long as the
  owner of the handle polls. Each term of a completion's score takes at most
  num_retries + 2 attempts, and the pool ends every attempt.

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
    self._scorers = scorers
    self._pool = pool_lib.Pool(scorers, num_workers)
    self._lock = threading.Lock()
    self._counters = {term.name: _Counters() for term in self._terms}
    self._num_lost = dict.fromkeys(scoring.KINDS, 0)

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
      trajectories: finished ones, one for each member. The processes decode
        them.

    Raises:
      RuntimeError: the service was closed before.
    """
    return ScoreHandle(self, item, trajectories)

  def metrics(self) -> dict[str, float]:
    """Return the failed scores so far and the mean seconds of an attempt.

    The mean is over the attempts since the last call. Each term that has a name
    has these metrics too. Those that failed for good are counted by reason.
    """
    with self._lock:
      read = {}
      for name, counters in self._counters.items():
        latencies_s, counters.latencies_s = counters.latencies_s, []
        read[name] = dataclasses.replace(counters, latencies_s=latencies_s)
      lost = dict(self._num_lost)
    values = _metrics("reward_service", [*read.values()])
    values |= {f"reward_service/lost/{k}": float(n) for k, n in lost.items()}
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
    self, number: int, item: dict[str, Any], trajectories: Sequence[Trajectory]
  ) -> pool_lib.Attempted:
    """Start an attempt at a term of a group."""
    group = completion_lib.pack(trajectories)
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

  def _count_lost(self, failures: Iterable[RewardFailure]) -> None:
    with self._lock:
      for failure in failures:
        self._num_lost[failure.kind] += 1


class ScoreHandle:
  """A group that is being scored. Retries start when its owner polls.

  All terms of its score run to their end, also if one of them has failed.
  """

  def __init__(
    self,
    service: RewardService,
    item: dict[str, Any],
    trajectories: Sequence[Trajectory],
  ):
    """Start the first attempts."""
    self._outcome: Outcome | None = None
    self._parts: list[_TermHandle] = []
    self._service = service
    self._members = trajectories
    budgets, tokenizer = service._scorers.budgets, service._scorers.tokenizer
    self._counts: list[int] | None = None  # answers of each member
    if budgets is not None:
      cut = [cut_scores.answers(t, budgets, tokenizer) for t in trajectories]
      self._counts = [len(answers) for answers in cut]
      trajectories = [answer for answers in cut for answer in answers]
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
    self._parts = [_TermHandle(service, i, item, trajectories) for i in used]

  def done(self) -> bool:
    """Return whether the result has arrived, without waiting for it.

    Raises:
      RuntimeError: the service was closed before.
    """
    if self._outcome is None and all([part.done() for part in self._parts]):
      self._outcome = self._settled()
    return self._outcome is not None

  def result(self) -> Outcome:
    """Wait for the rewards and return them in the order of the trajectories.

    Returns:
      For each trajectory its reward, or why it is to be left out; at least one
      has a reward, unless there are no trajectories. Or why the group failed.

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
        [running.future for part in self._parts for running in part.running()],
        timeout_s,
        futures.FIRST_COMPLETED,
      )
    return self.done()

  def _settled(self) -> Outcome:
    for part in self._parts:
      if part.failure is not None:
        return part.failure
    terms = [part.term for part in self._parts]
    outcome: list[Reward | RewardFailure] = []
    for member, answer in enumerate(self._parts[-1].answers()):
      found = [part.found[member] for part in self._parts]
      rewards = [x for x in found if isinstance(x, Reward)]
      failed = [x for x in found if isinstance(x, RewardFailure)]
      if failed:
        outcome.append(failed[0])
        continue
      (reward,) = term_lib.combined(terms, [[x] for x in rewards])
      if reward.answer is None:
        reward = dataclasses.replace(reward, answer=answer)
      outcome.append(reward)
    if self._counts is not None:
      outcome = self._of_members(outcome, self._counts)
    if outcome and not any(isinstance(one, Reward) for one in outcome):
      (failure,) = outcome[:1]
      assert isinstance(failure, RewardFailure)
      return failure
    return outcome

  def _of_members(
    self, outcome: Sequence[Reward | RewardFailure], counts: Sequence[int]
  ) -> list[Reward | RewardFailure]:
    """Return the rewards of members, from those of their answers."""
    budgets, rest = self._service._scorers.budgets, iter(outcome)
    assert budgets is not None
    return [
      cut_scores.reward(member, list(itertools.islice(rest, count)), budgets)
      for member, count in zip(self._members, counts, strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attempt:
  """An attempt at some members of a group, which is under way."""

  members: Sequence[int]
  num_retries: int  # that are left
  running: pool_lib.Attempted


class _TermHandle:
  """One term of a group's score.

  An attempt whose process dies says of no completion whether it was the cause.
  Each of them is then tried alone, so that only those are lost that end their
  process again.

  Attributes:
    failure: why the term has failed for all of the group.
    found: the reward or the failure of each member, by member.
  """

  def __init__(
    self,
    service: RewardService,
    number: int,
    item: dict[str, Any],
    trajectories: Sequence[Trajectory],
  ):
    """Start the first attempt at the term of this number."""
    self.term = service._terms[number]
    self.failure: RewardFailure | None = None
    self.found: dict[int, Reward | RewardFailure] = {}
    self._answers: dict[int, str | None] = {}
    self._service = service
    self._number, self._item = number, item
    self._trajectories = trajectories
    self._attempts: list[_Attempt] = []
    self._begin(range(len(trajectories)), self.term.num_retries)

  def running(self) -> list[pool_lib.Attempted]:
    """Return the attempts that are under way."""
    return [attempt.running for attempt in self._attempts]

  def answers(self) -> list[str | None]:
    """Return the answers that were extracted from the completions."""
    return [self._answers.get(i) for i in range(len(self._trajectories))]

  def done(self) -> bool:
    """Return whether all attempts have ended; start the next ones if not."""
    for attempt in list(self._attempts):
      outcome = attempt.running.outcome()
      if outcome is not None:
        self._attempts.remove(attempt)
        self._settle(attempt, outcome)
        if not self._attempts:
          self._finish()
    return not self._attempts

  def _begin(self, members: Sequence[int], num_retries: int) -> None:
    running = self._service._begin(
      self._number, self._item, [self._trajectories[i] for i in members]
    )
    self._attempts.append(
      _Attempt(members=members, num_retries=num_retries, running=running)
    )

  def _settle(self, attempt: _Attempt, outcome: scoring.Outcome) -> None:
    members, retries = attempt.members, attempt.num_retries
    if isinstance(outcome, RewardFailure):
      self._service._count_failure(self.term, outcome)
      if len(members) > 1 and not outcome.is_of_group:
        for member in members:
          self._begin([member], retries)
        return
      rewards = [outcome for _ in members]
    else:
      rewards = outcome.rewards
      self._answers |= zip(members, outcome.answers, strict=True)
      for reward in rewards:
        if isinstance(reward, RewardFailure):
          self._service._count_failure(self.term, reward)
    self.found |= zip(members, rewards, strict=True)
    failed = [i for i in members if isinstance(self.found[i], RewardFailure)]
    if retries and (failed or isinstance(outcome, RewardFailure)):
      self._begin(failed, retries - 1)
    elif isinstance(outcome, RewardFailure) and outcome.is_of_group:
      self.failure = self._named(outcome)

  def _finish(self) -> None:
    """Decide what becomes of the members that failed for good."""
    failed = {
      i: self._named(found)
      for i, found in self.found.items()
      if isinstance(found, RewardFailure)
    }
    if self.failure is None and failed:
      self._service._count_lost(failed.values())
    are_all = len(failed) == len(self.found)
    has_tokens = any(
      isinstance(x, Reward) and x.token_scores is not None
      for x in self.found.values()
    )
    for i, failure in failed.items():
      self.found[i] = failure
      if self.term.fails_as_zero:
        self.found[i] = Reward(
          score=0.0, token_scores={} if has_tokens else None
        )
    # If nothing can be scored, the scorer is broken. Zeros would hide that.
    if failed and are_all and len(failed) > 1 and self.failure is None:
      self.failure = failed[min(failed)]

  def _named(self, failure: RewardFailure) -> RewardFailure:
    if not self.term.name:
      return failure
    reason = f"{failure.reason} (reward {self.term.name})"
    return dataclasses.replace(failure, reason=reason)


def _metrics(prefix: str, counters: Sequence[_Counters]) -> dict[str, float]:
  latencies_s = [s for counter in counters for s in counter.latencies_s]
  return {
    f"{prefix}/timeouts": float(sum(x.num_timeouts for x in counters)),
    f"{prefix}/errors": float(sum(x.num_errors for x in counters)),
    f"{prefix}/latency_s": (
      sum(latencies_s) / len(latencies_s) if latencies_s else 0.0
    ),
  }
