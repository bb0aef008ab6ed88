"""The thread that drives the rollout side, as the main thread sees it."""

from collections.abc import Callable, Iterator
import contextlib

from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import session as session_lib

NAME = "rollout worker"


class RolloutThread:
  """Starts the thread, pauses it, and looks whether it hangs.

  Threads: belongs to the main thread, which waits while the one that takes a
  last checkpoint uses it.

  Attributes:
    is_hung: whether it was left alone where it hangs, because the run ends.
    is_ending: whether the run ends with a failure. What waits for the thread
      then has less patience, and does not look whether it has failed.
    stall_timeout_s: how long nothing may move.
  """

  def __init__(
    self,
    rollout: rollout_side.RolloutSide,
    session: session_lib.Session,
    section: sections.RunSection,
    stall_timeout_s: float,
  ):
    """Prepare the thread.

    Args:
      rollout: what it drives.
      session: of this start.
      section: says how long a thread may take to end.
      stall_timeout_s: how long nothing may move.
    """
    self.is_hung = False
    self.is_ending = False
    self.stall_timeout_s = stall_timeout_s
    self._rollout = rollout
    self._shutdown = session.shutdown
    self._join_timeout_s = section.join_timeout_s
    self._seconds = session.seconds

  @property
  def is_started(self) -> bool:
    """Whether it was started, whatever became of it."""
    return self._shutdown.supervisor.has_spawned(NAME)

  def start(self) -> None:
    """Start it."""
    self._shutdown.spawn(NAME, self._rollout.run, stop=self._rollout.stop)

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Pause the rollout side inside the block, if it has been started.

    If the run ends, and the thread hangs, it is left alone: what it has
    reported last is whole.

    Raises:
      StallError: it did not pause for `run.stall_timeout_s`.
    """
    if not self.is_started:
      yield
      return
    is_ending = self.is_ending
    timeout_s = self._join_timeout_s if is_ending else self.stall_timeout_s
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(self._rollout.paused(timeout_s))
      except TimeoutError as error:
        if not is_ending:
          raise supervisor_lib.StallError(str(error)) from error
        self._rollout.abandon()
        self.is_hung = True
      if not is_ending:
        # A thread that has ended already has failed.
        self._shutdown.supervisor.check()
      yield

  def watch(self) -> supervisor_lib.StallWatch:
    """Return what a wait has to pass to `check`."""
    return supervisor_lib.StallWatch(self.stall_timeout_s, self._seconds)

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
      StallError: nothing moves.
    """
    watch.check((self._rollout.moving(), progress), report)
