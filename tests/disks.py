"""A disk that is full, without being root: files may not grow past a size."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(num_bytes):
  """Writing past it fails in this process, as on a full disk."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
