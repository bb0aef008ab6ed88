"""What a run writes beside its books, and can do without.

TensorBoard's events, the picture of the summary and a copy of the tokenizer
are made from what is kept elsewhere. If one cannot be written, that is said
once and counted, and the run goes on.
"""

from collections.abc import Callable, Iterator
import contextlib
import threading


class SideOutputs:
  """Counts what could not be written.

  Threads: any; the lock guards the count and what was said.

  Attributes:
    num_failures: attempts that failed since the run was started.
  """

  def __init__(self, note: Callable[[str], None]):
    """Args: note: tells the user."""
    self._note = note
    self._lock = threading.Lock()
    self._said: set[str] = set()
    self.num_failures = 0

  @contextlib.contextmanager
  def attempt(self, what: str) -> Iterator[None]:
    """Lets what the disk refuses inside of the block pass.

    Args:
      what: a name; of each one only the first failure is said.
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
          f"WARNING: {what} could not be written, and the run goes on without"
          f" it ({error.__cause__ or error}); further failures are only counted"
          " (run/failed_side_outputs)"
        )
