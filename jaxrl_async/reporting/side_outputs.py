"""Files that a run writes but does not need.

These are TensorBoard's events, the picture of the summary and a copy of the
tokenizer. All of them can be made again from other files. If one of them cannot
be written, the user is told once, the failure is counted, and the run
continues.
"""

from collections.abc import Callable, Iterator
import contextlib
import threading


class SideOutputs:
  """Counts failed writes of files that the run does not need.

  Threads: any; the lock guards the count and the names already reported.

  Attributes:
    num_failures: failed attempts since the start of the process.
  """

  def __init__(self, note: Callable[[str], None]):
    self._note = note
    self._lock = threading.Lock()
    self._said: set[str] = set()
    self.num_failures = 0

  @contextlib.contextmanager
  def attempt(self, what: str) -> Iterator[None]:
    """Suppress and count disk errors inside the block.

    Args:
      what: name of the output; only the first failure of each is reported.
    """
    try:
      yield
    except OSError as error:
      with self._lock:
        self.num_failures += 1
        is_first = what not in self._said
        self._said.add(what)
      if is_first:
        self._note(
          f"WARNING: {what} could not be written, and the run continues without"
          f" it ({error.__cause__ or error}); further failures are only counted"
          " (run/failed_side_outputs)"
        )
