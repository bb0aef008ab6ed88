"""The thread that drives the rollout side, as the main thread sees it."""

from collections.abc import Callable, Iterator
import contextlib

from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.run import start_up


class RolloutThread:
  """Starts the thread, pauses it, and replaces it if it hangs in its engine.

  Threads: belongs to the main thread, which waits while the one that takes a
  last checkpoint uses it.

  Attributes:
    is_hung: whether it was left alone where it hangs, because the run ends.
  """

  def __init__(self, parts: start_up.Parts, is_ending: Callable[[], bool]):
    """Prepare the thread.

    Args:
      parts: of the run.
      is_ending: whether the run ends with a failure.
    """
    self.is_hung = False
    self._rollout = parts.rollout
    self._shutdown = parts.shutdown
    self._note = parts.session.progress.note
    self._join_timeout_s = parts.setup.config.run.join_timeout_s
    self._stall_timeout_s = parts.stall_timeout_s
    self._seconds = parts.session.seconds
    self._is_ending = is_ending

  @property
  def is_started(self) -> bool:
    """Whether it was started, whatever became of it."""
    return self._shutdown.supervisor.has_spawned(start_up.ROLLOUT)

  def start(self) -> None:
    """Start it."""
    self._shutdown.spawn(
      start_up.ROLLOUT, self._rollout.run, stop=self._rollout.stop
    )

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Pause the rollout side inside the block, if it has been started.

    If the run ends, and the thread hangs, it is left alone: what it has
    reported last is whole.

    Raises:
      TimeoutError: it did not pause for `run.stall_timeout_s`.
    """
    if not self.is_started:
      yield
      return
    is_ending = self._is_ending()
    timeout_s = self._join_timeout_s if is_ending else self._stall_timeout_s
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(self._rollout.paused(timeout_s))
      except TimeoutError:
        if is_ending:
          self._rollout.abandon()
          self.is_hung = True
        elif self._replace():
          stack.enter_context(self._rollout.paused(timeout_s))
        else:
          raise
      if not is_ending:
        # A thread that has ended already has failed.
        self._shutdown.supervisor.check()
      yield

  def watch(self) -> supervisor_lib.StallWatch:
    """Return what a wait has to pass to `check`."""
    return supervisor_lib.StallWatch(self._stall_timeout_s, self._seconds)

  def check(
    self,
    watch: supervisor_lib.StallWatch,
    progress: object,
    report: Callable[[], list[str]],
  ) -> None:
    """Check that anything moves; every wait calls this repeatedly.

    Args:
      watch: of the wait.
      progress: a value that changes when something beside it moves.
      report: as for `StallWatch.check`.

    Raises:
      StallError: nothing moves, and another thread would not help.
    """
    try:
      watch.check((self._rollout.moving(), progress), report)
    except supervisor_lib.StallError:
      if not self._replace():
        raise
      watch.renew()

  def _replace(self) -> bool:
    """Start another thread if this one hangs in its engine; say whether."""
    status = self._rollout.status()
    if not self._rollout.take_over():
      return False
    supervisor = self._shutdown.supervisor
    supervisor.give_up(start_up.ROLLOUT)
    supervisor.spawn(start_up.ROLLOUT, self._rollout.run)
    self._note(
      f"WARNING: nothing moved for {self._stall_timeout_s:g} s"
      f" (run.stall_timeout_s); {status}. The engine begins anew in another"
      " thread"
    )
    return True
