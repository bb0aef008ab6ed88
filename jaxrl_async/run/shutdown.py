"""Starts the threads of a run, and ends threads and processes in order."""

from collections.abc import Callable
import contextlib
from typing import Any

from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import weight_transfer


class Shutdown:
  """Closes what was registered, when the block that it guards has ended.

  First it closes the buffer and calls what `stops` and `spawn` registered, so
  that every thread comes to its end. Then it joins the threads, within a
  deadline. What `closes` registered comes last, because threads may use it up
  to their end. Each of the two lists is called from the newest to the oldest.

  Threads: belongs to the main thread. A failure in a thread that it has spawned
  closes the buffer, which makes the main thread leave the block.
  """

  def __init__(
    self,
    buffer: buffer_lib.Buffer,
    *,
    timeout_s: float,
    note: Callable[[str], None],
  ):
    """Registers nothing but the buffer.

    Args:
      buffer: closed first, and as soon as a thread has failed.
      timeout_s: within which all threads together have to end.
      note: is told what went wrong while closing after another error.
    """
    self.supervisor = supervisor_lib.Supervisor(on_failure=buffer.close)
    self._buffer = buffer
    self._timeout_s = timeout_s
    self._note = note
    self._stopping = contextlib.ExitStack()
    self._closing = contextlib.ExitStack()

  def stops(self, stop: Callable[..., Any], *arguments: Any) -> None:
    """Has something called before the threads are joined."""
    self._stopping.callback(stop, *arguments)

  def closes(self, close: Callable[..., Any], *arguments: Any) -> None:
    """Has something called after the threads were joined."""
    self._closing.callback(close, *arguments)

  def spawn(
    self, name: str, run: Callable[[], None], *, stop: Callable[[], None]
  ) -> None:
    """Runs a function in a thread of that name; `stop` makes it return."""
    self.stops(stop)
    self.supervisor.spawn(name, run)

  def __enter__(self) -> "Shutdown":
    return self

  def __exit__(
    self, kind: Any, error: BaseException | None, where: Any
  ) -> None:
    """Ends everything; raises only if nothing was raised before."""
    del kind, where
    self._buffer.close(error)
    self._stopping.close()
    late = self.supervisor.join(self._timeout_s)
    try:
      self._closing.close()  # all of them, whatever one raises
      if late:
        raise TimeoutError(
          f"{', '.join(late)} did not end in {self._timeout_s} s"
        )
    except (OSError, weight_transfer.WeightTransferError) as closing:
      if error is None:
        raise
      if closing is not error:
        self._note(f"while closing: {closing}")
