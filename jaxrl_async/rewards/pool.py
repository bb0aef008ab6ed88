"""A pool of processes that score, on this host.

Each attempt at a term of a group is one task of the pool: 32 groups of 16 cost
32 round trips, not 512.
"""

from concurrent import futures
import multiprocessing
import pickle
import signal
import threading
import time

import pebble

from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.rewards import file_lock
from jaxrl_async.rewards import scoring

# An attempt is given up this many seconds after the deadlines of its scores.
GRACE_S = 2.0
_LOOK_S = 0.1
_KILLED = "timeout: the scorer did not return; its process was killed"
_BROKE = "error: the pool of reward processes broke"


class Closed(RuntimeError):
  """The pool was closed before an attempt ended."""

  def __init__(self):
    super().__init__("the reward service is closed")


class Pool:
  """Forked processes that score.

  Invariant: the future of each attempt ends. An attempt ends within
  `Scorers.max_attempt_s` + `GRACE_S` seconds after a process has taken it up.
  This holds because each score runs under a timer in its process. A process
  that ignores the timer is killed by the kernel or, as a last resort, by
  pebble. A broken pool is replaced, and the attempts that it held have failed.

  Threads: any thread may call any method. `_lock` guards the pool in use and
  the attempts under way. A thread of its own starts the processes, which waits
  for the fork server's imports, and then looks for a broken pool.
  """

  def __init__(self, scorers: scoring.Scorers, num_workers: int):
    """Start the processes, which import their libraries in the background."""
    self._scorers = scorers
    self._num_workers = num_workers
    # The tokenizer may be large, and every process that is started gets it.
    self._pickled = pickle.dumps(scorers)
    self._lock = threading.Lock()
    self._is_closed = threading.Event()
    self._stopping: list[threading.Thread] = []
    self._outcomes: dict[futures.Future, futures.Future[scoring.Outcome]] = {}
    multiprocessing.set_forkserver_preload([scoring.PRELOAD])
    self._pool = self._new_pool()
    self._greetings: list[futures.Future] = []
    self._started: futures.Future[None] = futures.Future()
    threading.Thread(
      target=self._look_after, name="reward processes", daemon=True
    ).start()

  def warm_up(self, timeout_s: float) -> None:
    """Wait until the processes are ready, and check what they imported.

    Raises:
      TimeoutError: they were not ready in time.
      ConfigError: they cannot import a reward.
      RuntimeError: they imported jax, or they did not import `preload`.
    """
    deadline = time.monotonic() + timeout_s
    self._started.result(timeout=timeout_s)
    for greeting in self._greetings:
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

  def score(self, attempt: scoring.Attempt) -> futures.Future[scoring.Outcome]:
    """Start an attempt. Its future ends, whatever becomes of the processes.

    The future raises `Closed` if the pool is closed before.

    Raises:
      Closed: the pool was closed before.
    """
    outcome: futures.Future[scoring.Outcome] = futures.Future()
    with self._lock:
      if self._is_closed.is_set():
        raise Closed
      self._replace_if_broken()
      future = self._pool.schedule(
        scoring.score,
        args=(attempt,),
        timeout=self._scorers.max_attempt_s(attempt) + GRACE_S,
      )
      self._outcomes[future] = outcome
    future.add_done_callback(self._on_done)
    return outcome

  def close(self, timeout_s: float) -> None:
    """End the processes, and give up the attempts that are under way.

    Raises:
      TimeoutError: the processes did not end in time.
    """
    with self._lock:
      if not self._is_closed.is_set():
        self._is_closed.set()
        self._stop(self._pool)
      outcomes = list(self._outcomes)
      stopping = list(self._stopping)
    for future in outcomes:
      outcome = self._outcomes.pop(future, None)
      if outcome is not None:
        outcome.set_exception(Closed())
    deadline = time.monotonic() + timeout_s
    for thread in stopping:
      thread.join(max(0.0, deadline - time.monotonic()))
      if thread.is_alive():
        raise TimeoutError(
          f"reward processes did not end within {timeout_s:g} s"
        )

  def _look_after(self) -> None:
    """Fork the processes, which waits for the fork server's imports."""
    try:
      with self._lock:
        if not self._is_closed.is_set():
          # There is one task for each process, so that all of them start now.
          self._greetings = [
            self._pool.schedule(scoring.loaded_modules)
            for _ in range(self._num_workers)
          ]
      self._started.set_result(None)
    except BaseException as error:  # `warm_up` raises it
      self._started.set_exception(error)
    while not self._is_closed.wait(_LOOK_S):
      with self._lock:
        self._replace_if_broken()

  def _replace_if_broken(self) -> None:
    if self._is_closed.is_set() or self._pool.active:
      return
    self._stop(self._pool)
    self._pool = self._new_pool()
    for future in list(self._outcomes):
      self._end(future, scoring.RewardFailure(_BROKE))

  def _new_pool(self) -> pebble.ProcessPool:
    return pebble.ProcessPool(
      max_workers=self._num_workers,
      initializer=scoring.begin,
      initargs=(self._pickled,),
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

  def _on_done(self, future: futures.Future) -> None:
    if future.cancelled() and self._is_closed.is_set():
      return  # `close` says so
    self._end(future, _outcome(future))

  def _end(self, future: futures.Future, outcome: scoring.Outcome) -> None:
    # Taking it out of the dict is atomic, so that only one thread ends it.
    waiting = self._outcomes.pop(future, None)
    if waiting is not None:
      waiting.set_result(outcome)


def _outcome(future: futures.Future) -> scoring.Outcome:
  """Return the outcome of an attempt whose future is done."""
  if future.cancelled():
    return scoring.RewardFailure("error: cancelled")
  error = future.exception()
  if error is None:
    return future.result()
  if isinstance(error, pebble.ProcessExpired):
    if error.exitcode == -signal.SIGVTALRM:
      return scoring.RewardFailure(_KILLED)
    return scoring.RewardFailure(
      f"error: the reward process died with exit code {error.exitcode}"
    )
  if isinstance(error, TimeoutError):
    return scoring.RewardFailure(_KILLED)
  return scoring.RewardFailure(
    f"error: {scoring.one_line(error)}",
    scoring.where_raised(error),
  )
