"""A pool of processes that score, on this host.

Each attempt at a term of a group is one task of the pool: 32 groups of 16 cost
32 round trips, not 512.
"""

from collections.abc import Sequence
from concurrent import futures
import dataclasses
import multiprocessing
import pickle
import signal
import threading
import time

import pebble

from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.rewards import scoring

# An attempt is given up this many seconds after the deadlines of its scores.
GRACE_S = 2.0
_KILLED = "timeout: the scorer did not return; its process was killed"
_BROKE = "error: the pool of reward processes broke"


class Closed(RuntimeError):
  """The pool was closed before an attempt ended."""

  def __init__(self):
    super().__init__("the reward service is closed")


class Pool:
  """Forked processes that score.

  An attempt ends within `Scorers.max_attempt_s` + `GRACE_S` seconds after a
  process has taken it up. This holds because each score runs under a timer in
  its process. A process that ignores the timer is killed by the kernel or, as a
  last resort, by pebble. A pool that broke, as one does whose idle process was
  killed, is replaced when something is to be scored next. The attempts that it
  held have failed.

  Threads: any thread may call any method. `_lock` guards the pool in use.
  """

  def __init__(self, scorers: scoring.Scorers, num_workers: int):
    """Start the processes, which import their libraries in the background."""
    self._scorers = scorers
    self._num_workers = num_workers
    # The tokenizer may be large, and every process that is started gets it.
    self._pickled = pickle.dumps(scorers)
    self._lock = threading.Lock()
    self._is_closed = False
    self._stopping: list[threading.Thread] = []
    multiprocessing.set_forkserver_preload([scoring.PRELOAD])
    self._pool = self._new_pool()
    self._greetings: futures.Future[Sequence[futures.Future]] = futures.Future()
    # It waits for the fork server's imports.
    threading.Thread(
      target=self._greet, name="start reward processes", daemon=True
    ).start()

  def warm_up(self, timeout_s: float) -> None:
    """Wait until the processes are ready, and check what they imported.

    Raises:
      TimeoutError: they were not ready in time.
      ConfigError: they cannot import a reward.
      RuntimeError: they imported jax, or they did not import `preload`.
    """
    deadline = time.monotonic() + timeout_s
    for greeting in self._greetings.result(timeout=timeout_s):
      try:
        is_preloaded, has_jax = greeting.result(
          timeout=max(0.0, deadline - time.monotonic())
        )
      except user_code.UserCodeError as error:
        raise sections.ConfigError(
          "task.reward: a process that scores cannot import a reward that this"
          f" one could import: {error}"
        ) from error
      if has_jax:
        raise RuntimeError("a reward process imported jax; its scorer must not")
      if not is_preloaded:
        raise RuntimeError(
          "reward processes lack their libraries: a fork server was running "
          "before the reward service; make the service first"
        )

  def score(self, attempt: scoring.Attempt) -> "Running":
    """Start an attempt.

    Raises:
      Closed: the pool was closed before.
    """
    with self._lock:
      if self._is_closed:
        raise Closed
      if not self._pool.active:
        self._stop()
        self._pool = self._new_pool()
      future = self._pool.schedule(
        scoring.score,
        args=(attempt,),
        timeout=self._scorers.max_attempt_s(attempt) + GRACE_S,
      )
      return Running(self, self._pool, future)

  def close(self, timeout_s: float) -> None:
    """End the processes, and give up the attempts that are under way.

    Raises:
      TimeoutError: the processes did not end in time.
    """
    with self._lock:
      if not self._is_closed:
        self._is_closed = True
        self._stop()
    deadline = time.monotonic() + timeout_s
    for thread in self._stopping:
      thread.join(max(0.0, deadline - time.monotonic()))
      if thread.is_alive():
        raise TimeoutError(
          f"reward processes did not end within {timeout_s:g} s"
        )

  def _greet(self) -> None:
    """Start the processes, with one task for each of them."""
    greetings = []
    try:
      with self._lock:
        if not self._is_closed:
          greetings = [
            self._pool.schedule(scoring.loaded_modules)
            for _ in range(self._num_workers)
          ]
    except BaseException as error:  # `warm_up` raises it
      self._greetings.set_exception(error)
    else:
      self._greetings.set_result(greetings)

  def _new_pool(self) -> pebble.ProcessPool:
    return pebble.ProcessPool(
      max_workers=self._num_workers,
      initializer=scoring.begin,
      initargs=(self._pickled,),
      context=multiprocessing.get_context("forkserver"),
    )

  def _stop(self) -> None:
    """Stop the pool on a separate thread, since pebble's join may last."""
    self._pool.stop()
    thread = threading.Thread(
      target=self._pool.join, name="stop reward processes", daemon=True
    )
    thread.start()
    self._stopping.append(thread)


@dataclasses.dataclass(frozen=True)
class Running:
  """An attempt that was given to a pool of processes."""

  owner: Pool
  processes: pebble.ProcessPool
  future: futures.Future

  def outcome(self) -> scoring.Outcome | None:
    """Return how the attempt ended, or None as long as it has not.

    Raises:
      Closed: the pool was closed before.
    """
    if self.future.done() and not self.future.cancelled():
      return _outcome(self.future)
    if self.owner._is_closed:
      raise Closed
    if self.future.cancelled() or not self.processes.active:
      return scoring.RewardFailure(_BROKE)
    return None


def _outcome(future: futures.Future) -> scoring.Outcome:
  """Return the outcome of an attempt whose future is done."""
  error = future.exception()
  if error is None:
    return future.result()
  if isinstance(error, pebble.ProcessExpired):
    if error.exitcode == -signal.SIGVTALRM:
      return scoring.RewardFailure(_KILLED)
    return scoring.RewardFailure(
      f"died: the reward process ended with exit code {error.exitcode}"
    )
  if isinstance(error, TimeoutError):
    return scoring.RewardFailure(_KILLED)
  return scoring.RewardFailure(
    f"error: {scoring.one_line(error)}",
    scoring.where_raised(error),
    is_of_group=True,  # scorers raise nothing
  )
