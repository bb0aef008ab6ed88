"""A pool of processes that score, on this host.

Each attempt at a term of a group is one task of the pool: 32 groups of 16 cost
32 round trips, not 512.
"""

from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import multiprocessing
import pickle
import signal
import threading
import time
from typing import Any

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


class Broke(RuntimeError):
  """The pool broke, or the task was cancelled, before it ended."""


class Processes:
  """Forked processes that run functions of importable modules.

  A pool that broke, as one does whose idle process was killed, is replaced when
  something is to be run next. The tasks that it held have failed.

  Threads: any thread may call any method. `_lock` guards the pool in use.
  """

  def __init__(
    self,
    num_workers: int,
    *,
    initializer: Callable[..., Any] | None = None,
    initargs: Sequence[Any] = (),
  ):
    """Prepare the pool, whose processes start with the first task.

    Args:
      num_workers: how many processes.
      initializer: is called in each process that starts.
      initargs: its arguments.
    """
    self.num_workers = num_workers
    self._initializer, self._initargs = initializer, initargs
    self._lock = threading.Lock()
    self.is_closed = False
    self._stopping: list[threading.Thread] = []
    multiprocessing.set_forkserver_preload([scoring.PRELOAD])
    self._pool = self._new_pool()

  def run(
    self,
    function: Callable[..., Any],
    arguments: Sequence[Any] = (),
    timeout_s: float | None = None,
  ) -> "Running":
    """Start a task.

    The process of a task is killed so many seconds after it has taken up the
    task.

    Raises:
      Closed: the pool was closed before.
    """
    with self._lock:
      if self.is_closed:
        raise Closed
      if not self._pool.active:
        self._stop()
        self._pool = self._new_pool()
      future = self._pool.schedule(function, args=arguments, timeout=timeout_s)
      return Running(self, self._pool, future)

  def close(self, timeout_s: float) -> None:
    """End the processes, and give up the tasks that are under way.

    Raises:
      TimeoutError: the processes did not end in time.
    """
    with self._lock:
      if not self.is_closed:
        self.is_closed = True
        self._stop()
    deadline = time.monotonic() + timeout_s
    for thread in self._stopping:
      thread.join(max(0.0, deadline - time.monotonic()))
      if thread.is_alive():
        raise TimeoutError(
          f"reward processes did not end within {timeout_s:g} s"
        )

  def _new_pool(self) -> pebble.ProcessPool:
    return pebble.ProcessPool(
      max_workers=self.num_workers,
      initializer=self._initializer,
      initargs=self._initargs,
      context=multiprocessing.get_context("forkserver"),
    )

  def _stop(self) -> None:
    """Stop the pool on a separate thread, since pebble's join may last."""
    self._pool.stop()
    thread = threading.Thread(
      target=self._pool.join, name="stop processes", daemon=True
    )
    thread.start()
    self._stopping.append(thread)


@dataclasses.dataclass(frozen=True)
class Running:
  """A task that was given to a pool of processes."""

  owner: Processes
  processes: pebble.ProcessPool
  future: futures.Future

  def is_done(self) -> bool:
    """Return whether the future is done.

    Raises:
      Closed: the pool was closed before.
      Broke: the task will never end.
    """
    if self.future.done() and not self.future.cancelled():
      return True
    if self.owner.is_closed:
      raise Closed
    if self.future.cancelled() or not self.processes.active:
      raise Broke
    return False


class Pool:
  """Forked processes that score.

  An attempt ends within `Scorers.max_attempt_s` + `GRACE_S` seconds after a
  process has taken it up. This holds because each score runs under a timer in
  its process. A process that ignores the timer is killed by the kernel or, as a
  last resort, by pebble.

  Threads: any thread may call any method.
  """

  def __init__(self, scorers: scoring.Scorers, num_workers: int):
    """Start the processes, which import their libraries in the background."""
    self._scorers = scorers
    # The tokenizer may be large, and every process that is started gets it.
    self._processes = Processes(
      num_workers, initializer=scoring.begin, initargs=(pickle.dumps(scorers),)
    )
    self._greetings: futures.Future[Sequence[Running]] = futures.Future()
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
        is_preloaded, has_jax = greeting.future.result(
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

  def score(self, attempt: scoring.Attempt) -> "Attempted":
    """Start an attempt.

    Raises:
      Closed: the pool was closed before.
    """
    timeout_s = self._scorers.max_attempt_s(attempt) + GRACE_S
    return Attempted(self._processes.run(scoring.score, (attempt,), timeout_s))

  def close(self, timeout_s: float) -> None:
    """Do what `Processes.close` does."""
    self._processes.close(timeout_s)

  def _greet(self) -> None:
    """Start the processes, with one task for each of them."""
    try:
      greetings = [
        self._processes.run(scoring.loaded_modules)
        for _ in range(self._processes.num_workers)
      ]
    except Closed:
      self._greetings.set_result([])
    except BaseException as error:  # `warm_up` raises it
      self._greetings.set_exception(error)
    else:
      self._greetings.set_result(greetings)


@dataclasses.dataclass(frozen=True)
class Attempted:
  """An attempt that was given to a pool of processes."""

  running: Running

  @property
  def future(self) -> futures.Future:
    """It is done when the attempt has ended."""
    return self.running.future

  def outcome(self) -> scoring.Outcome | None:
    """Return how the attempt ended, or None as long as it has not.

    Raises:
      Closed: the pool was closed before.
    """
    try:
      return _outcome(self.future) if self.running.is_done() else None
    except Broke:
      return scoring.RewardFailure(_BROKE)


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
