"""Disks that refuse: full ones, without being root, and one that is silent."""

import contextlib
import errno
import os
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


def does_not_answer(path, file):
  """In place of `check_in_place`: a file system over a network, cut off."""
  del path, file
  raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
