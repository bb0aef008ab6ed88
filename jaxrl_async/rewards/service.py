"""The reward service: scores groups in a pool of processes, with deadlines.

A scorer is user code that runs on text which a policy generated. It may raise,
hang, exit or return something that is not a reward. After the configured
retries each of these becomes a `RewardFailure`. A failure never becomes a
score.

One group is one task of the pool: 32 groups of 16 cost 32 round trips, not 512.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import multiprocessing
import signal
import sys
import threading
import time
import traceback
import types
from typing import Any

import pebble

from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import file_lock
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import returned as returned_lib
from jaxrl_async.types import Completion, Reward

# (types.Prompt.item, completion) -> score or `Reward`. It must be a function of
# a module that imports neither jax nor the launch file.
Scorer = Callable[[dict[str, Any], Completion], float | Reward]

_PRELOAD = "jaxrl_async.rewards.preload"
# A scorer may not return to the interpreter, for example from a long loop in C.
# Its process is killed after this many seconds of CPU time past the deadline.
_KILL_GRACE_S = 1.0
# A group is given up this many seconds after the deadlines of all its scores.
_GROUP_GRACE_S = 2.0
_KILLED = "timeout: the scorer did not return; its process was killed"


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
  """Why a group has no scores.

  Attributes:
    reason: one line that starts with "timeout", "error" or "nan".
    traceback: traceback of the scorer; "" if its process died.
  """

  reason: str
  traceback: str = ""


class RewardService:
  """A pool of processes that score groups.

  Invariant: each submitted group ends as rewards or as a `RewardFailure` within
  (num_retries + 1) * (group size * timeout_s + 2 s) after its processing has
  begun, as long as the owner of the handle polls. This holds because each score
  runs under a timer in its process. A process that ignores the timer is killed
  by the kernel or, as a last resort, by pebble. A broken pool is replaced, and
  the groups that it held count a failed attempt.

  Threads: any thread may submit, and owns the handle that it gets. `_lock`
  guards the pool in use and the counters.
  """

  def __init__(
    self,
    *,
    num_workers: int,
    timeout_s: float,
    num_retries: int,
    answer_prefix: str,
    scorer: Scorer = reasoning.score,
  ):
    """Start the processes, which import their libraries in the background.

    Args:
      num_workers: number of processes that score.
      timeout_s: time limit of one score in seconds.
      num_retries: number of further attempts at a group before it fails.
      answer_prefix: prefix of the answer; see `extraction.extract_answer`.
      scorer: a function of an importable module, not of the main script.
    """
    self._num_workers = num_workers
    self._timeout_s = timeout_s
    self._num_retries = num_retries
    self._answer_prefix = answer_prefix
    self._scorer = scorer
    self._lock = threading.Lock()
    self._is_closed = False
    self._stopping: list[threading.Thread] = []
    self._num_timeouts = 0
    self._num_errors = 0
    self._latencies_s: list[float] = []
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

    The mean is over the attempts since the last call.
    """
    with self._lock:
      latencies_s, self._latencies_s = self._latencies_s, []
      return {
        "reward_service/timeouts": float(self._num_timeouts),
        "reward_service/errors": float(self._num_errors),
        "reward_service/latency_s": (
          sum(latencies_s) / len(latencies_s) if latencies_s else 0.0
        ),
      }

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
    self, item: dict[str, Any], completions: list[Completion]
  ) -> tuple[pebble.ProcessPool, futures.Future]:
    with self._lock:
      if self._is_closed:
        raise RuntimeError("the reward service is closed")
      if not self._pool.active:
        self._stop(self._pool)
        self._pool = self._new_pool()
      future = self._pool.schedule(
        _score_group,
        args=(self._scorer, item, completions, self._timeout_s),
        timeout=len(completions) * self._timeout_s + _GROUP_GRACE_S,
      )
      submitted_s = time.monotonic()
      future.add_done_callback(
        lambda _: self._count_latency(time.monotonic() - submitted_s)
      )
      return self._pool, future

  def _count_failure(self, failure: RewardFailure) -> None:
    with self._lock:
      if failure.reason.startswith("timeout"):
        self._num_timeouts += 1
      else:
        self._num_errors += 1

  def _count_latency(self, latency_s: float) -> None:
    # This does not take the lock, because it runs on a thread of the pool or
    # inside `_schedule`, which holds the lock. Appending is atomic.
    self._latencies_s.append(latency_s)


class ScoreHandle:
  """A group that is being scored. Retries start when its owner polls."""

  def __init__(
    self,
    service: RewardService,
    item: dict[str, Any],
    completions: list[Completion],
  ):
    """Start the first attempt."""
    self._service = service
    self._item = item
    self._completions = completions
    self._attempts_left = service._num_retries
    self._outcome: list[Reward] | RewardFailure | None = None
    self._begin()

  def done(self) -> bool:
    """Return whether the result has arrived, without waiting for it.

    Raises:
      RuntimeError: the service was closed before.
    """
    if self._outcome is not None:
      return True
    if not self._future.done():
      if self._service._is_closed:
        raise RuntimeError("the reward service is closed")
      if self._pool.active:
        return False
    self._settle(_outcome(self._future))
    return self._outcome is not None

  def result(self) -> list[Reward] | RewardFailure:
    """Wait for the rewards and return them in the order of the completions.

    Returns:
      The rewards, or the failure of the group's last attempt.

    Raises:
      RuntimeError: the service was closed before.
    """
    while not self.done():
      # The wait has a timeout, because a closed or broken pool never completes
      # its futures.
      futures.wait([self._future], timeout=0.1)
    assert self._outcome is not None
    return self._outcome

  def _begin(self) -> None:
    self._pool, self._future = self._service._schedule(
      self._item, self._completions
    )

  def _settle(self, outcome: list[Reward] | RewardFailure) -> None:
    if isinstance(outcome, RewardFailure):
      self._service._count_failure(outcome)
      if self._attempts_left > 0:
        self._attempts_left -= 1
        self._begin()
        return
    self._outcome = outcome


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
    f"error: {_one_line(error)}", "".join(traceback.format_exception(error))
  )


# The code below runs in a reward process.


class _ScoreTimeout(BaseException):
  """The time of a scorer is up. `except Exception` does not catch it."""


def _loaded_modules() -> tuple[bool, bool]:
  return _PRELOAD in sys.modules, "jax" in sys.modules


def _score_group(
  scorer: Scorer,
  item: dict[str, Any],
  completions: list[Completion],
  timeout_s: float,
) -> list[Reward] | RewardFailure:
  """Return the reward of each completion, or the first failure."""
  rewards = []
  for completion in completions:
    reward = _score_before_deadline(scorer, item, completion, timeout_s)
    if isinstance(reward, RewardFailure):
      return reward
    rewards.append(reward)
  return rewards


def _score_before_deadline(
  scorer: Scorer,
  item: dict[str, Any],
  completion: Completion,
  timeout_s: float,
) -> Reward | RewardFailure:
  ran_out = False

  def run_out(signum: int, frame: types.FrameType | None) -> None:
    nonlocal ran_out
    ran_out = True
    raise _ScoreTimeout

  signal.signal(signal.SIGALRM, run_out)
  # The signal repeats every second, in case a bare `except` in the scorer
  # catches the first one.
  signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)
  # This signal keeps its default action, which ends the process even while it
  # runs C code.
  signal.setitimer(signal.ITIMER_VIRTUAL, timeout_s + _KILL_GRACE_S)
  error = None
  try:
    returned = scorer(item, completion)
  except BaseException as raised:  # user code may also raise SystemExit
    error, returned = raised, None
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
  where = "".join(traceback.format_exception(error)) if error else ""
  if ran_out:
    return RewardFailure(
      f"timeout: a score took longer than {timeout_s:g} s", where
    )
  if error is not None:
    return RewardFailure(f"error: {_one_line(error)}", where)
  try:
    return returned_lib.as_reward(returned, len(completion.tokens))
  except returned_lib.NoRewardError as unusable:
    return RewardFailure(str(unusable))


def _one_line(error: BaseException) -> str:
  message = " ".join(str(error).split())
  return f"{type(error).__name__}: {message}"
