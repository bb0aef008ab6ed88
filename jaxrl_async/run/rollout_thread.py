"""The thread that drives the rollout side, as the main thread sees it."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses

from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import session as session_lib

NAME = "rollout worker"


@dataclasses.dataclass(kw_only=True)
class RolloutThread:
  """Starts the thread, pauses it, and looks whether it hangs.

  Threads: belongs to the main thread, which waits while the one that takes a
  last checkpoint uses it.

  Attributes:
    rollout: what it drives.
    session: of this start.
    join_timeout_s: how long the thread may take to end.
    stall_timeout_s: how long nothing may move.
    is_hung: whether it was left alone where it hangs, because the run ends.
    is_ending: whether the run ends with a failure. What waits for the thread
      then has less patience, and does not look whether it has failed.
  """

  rollout: rollout_side.RolloutSide
  session: session_lib.Session
  join_timeout_s: float
  stall_timeout_s: float
  is_hung: bool = False
  is_ending: bool = False

  @property
  def is_started(self) -> bool:
    """Whether it was started, whatever became of it."""
    return self.session.shutdown.supervisor.has_spawned(NAME)

  def start(self) -> None:
    """Start it."""
    self.session.shutdown.spawn(NAME, self.rollout.run, stop=self.rollout.stop)

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
    timeout_s = self.join_timeout_s if is_ending else self.stall_timeout_s
    with contextlib.ExitStack() as stack:
      try:
        stack.enter_context(self.rollout.paused(timeout_s))
      except TimeoutError as error:
        if not is_ending:
          raise supervisor_lib.StallError(str(error)) from error
        self.rollout.abandon()
        self.is_hung = True
      if not is_ending:
        # A thread that has ended already has failed.
        self.session.shutdown.supervisor.check()
      yield

  def watch(self) -> supervisor_lib.StallWatch:
    """Return what a wait has to pass to `check`."""
    return supervisor_lib.StallWatch(self.stall_timeout_s, self.session.seconds)

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
    watch.check((self.rollout.moving(), progress), report)
