"""One start of the program: its workdir, its signals, its threads, its end."""

from collections.abc import Callable
import contextlib
import dataclasses
import pathlib
from typing import Any

from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.processes import world as world_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.weights import weight_transfer


class Shutdown:
  """A context manager that closes everything registered with it.

  At the end of its block, it first closes the buffer that it guards and calls
  the functions that `stops` and `spawn` registered, so that every thread ends.
  Then it joins the threads, within a deadline. The functions that `closes`
  registered come last, because threads may use what they close until the
  threads end. Each of the two lists is called from the newest to the oldest
  function.

  Threads: belongs to the main thread. A failure in a thread that was spawned
  here closes the buffer, which makes the main thread leave the block.
  """

  def __init__(self, timeout_s: float, note: Callable[[str], None]):
    """Register nothing yet.

    Args:
      timeout_s: seconds within which all threads together have to end.
      note: is called with a message if closing fails after another error.
    """
    self.supervisor = supervisor_lib.Supervisor(on_failure=self._close_buffer)
    self._buffer: buffer_lib.Buffer | None = None
    self._timeout_s = timeout_s
    self._note = note
    self._stopping = contextlib.ExitStack()
    self._closing = contextlib.ExitStack()

  def guards(self, buffer: buffer_lib.Buffer) -> None:
    """Close a buffer first at the end, and as soon as a thread has failed."""
    self._buffer = buffer

  def _close_buffer(self, error: BaseException | None) -> None:
    if self._buffer is not None:
      self._buffer.close(error)

  def stops(self, stop: Callable[..., Any], *arguments: Any) -> None:
    """Register a call to make before the threads are joined."""
    self._stopping.callback(stop, *arguments)

  def closes(self, close: Callable[..., Any], *arguments: Any) -> None:
    """Register a call to make after the threads have been joined."""
    self._closing.callback(close, *arguments)

  def spawn(
    self, name: str, run: Callable[[], None], *, stop: Callable[[], None]
  ) -> None:
    """Run a function in a thread of that name.

    Args:
      name: of the thread.
      run: the function.
      stop: is called at the end of the block and makes `run` return.
    """
    self.stops(stop)
    self.supervisor.spawn(name, run)

  def __enter__(self) -> "Shutdown":
    """Return this object."""
    return self

  def __exit__(
    self, kind: Any, error: BaseException | None, where: Any
  ) -> None:
    """End all threads, and close everything.

    An error while closing is raised only if the block raised none. Otherwise
    it is passed to `note`, so that it does not hide the error of the block.
    """
    del kind, where
    self._close_buffer(error)
    self._stopping.close()
    late = self.supervisor.join(self._timeout_s)
    if late:
      self._note(f"{', '.join(late)} did not end in {self._timeout_s} s")
    try:
      self._closing.close()  # calls all of them, even if one raises
    except (OSError, weight_transfer.WeightTransferError) as closing:
      if error is None:
        raise
      if closing is not error:
        self._note(f"while closing: {closing}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
  """What belongs to one start of the program rather than to the run.

  Attributes:
    workdir: of the run.
    progress: shows the progress and messages to the user.
    stop: the stop request, which a signal sets.
    claim: ensures that no other process uses the workdir.
    compilations: counts the programs that this start compiles.
    side_outputs: guards outputs whose failure must not end the run.
    profile_steps: train steps to write traces of.
    seconds: the clock of waits that end with a stall or a timeout. It stands
      still while a program is compiled.
    world: the processes that train together. This one leads them.
    shutdown: starts threads, and closes everything at the end.
  """

  workdir: pathlib.Path
  progress: progress_lib.Progress
  stop: supervisor_lib.StopRequest
  claim: workdir_lib.Claim
  seconds: Callable[[], float]
  shutdown: Shutdown
  compilations: metrics_lib.CompilationCounter
  side_outputs: side_outputs_lib.SideOutputs
  profile_steps: tuple[int, ...] = ()
  world: world_lib.World = dataclasses.field(default_factory=world_lib.alone)

  def deadline(self, timeout_s: float) -> supervisor_lib.Deadline:
    """Return a deadline by this start's clock."""
    return supervisor_lib.Deadline(timeout_s, self.seconds)
