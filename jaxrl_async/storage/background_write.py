"""The rest of a write, for another thread, and how far that is."""

from collections.abc import Callable
import itertools
import os
import pathlib


class Write:
  """A function that writes a directory to its end, and counts what it does.

  Threads: one calls it. Any other may call `progress` meanwhile.
  """

  def __init__(
    self, path: pathlib.Path, finish: Callable[[Callable[[], None]], None]
  ):
    """Prepare to write.

    Args:
      path: of the directory, under the name that it has while it is written.
      finish: writes it. It calls its argument after each part of what it does
        with files that are complete.
    """
    self._path = path
    self._finish = finish
    self._count = itertools.count()
    self._num_parts = 0

  def __call__(self) -> None:
    """Write the directory."""
    self._finish(self._on_part)

  def _on_part(self) -> None:
    self._num_parts = next(self._count)

  def progress(self) -> object:
    """Return a value that changes while something is written.

    A disk that does not respond may hold this call up for ever.
    """
    num_bytes = 0
    for place, _, names in os.walk(self._path):
      for name in names:
        try:
          num_bytes += os.stat(os.path.join(place, name)).st_size
        except FileNotFoundError:
          pass  # it has got another name
    return self._num_parts, num_bytes
