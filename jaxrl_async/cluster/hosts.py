"""Checks that two processes on different hosts can work together."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import socket
import time

from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.storage import disk
from jaxrl_async.storage import private_directory

# A file, and what it contains.
Probe = tuple[pathlib.Path, str]

_PACKAGES = (
  "jax",
  "jaxlib",
  "flax",
  "numpy",
  "optax",
  "orbax-checkpoint",
  "qwix",
  "tensorstore",
  "tokenizers",
)
# A shared file system may show a file late.
_SHARED_S = 10.0
_RETRY_S = 0.2
_NOT_SHARED = (
  "transfer.directory: {directory} on {host} is not the directory that the"
  " trainer's host writes to; use one that all hosts see"
)


@functools.cache
def source_digest() -> str:
  """Return a digest of the code of this package."""
  root = pathlib.Path(__file__).parents[1]
  digest = hashlib.sha256()
  for path in sorted(root.rglob("*.py")):
    digest.update(path.relative_to(root).as_posix().encode())
    digest.update(path.read_bytes())
  return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
  """Return the versions of Python, of packages and of the code itself.

  They have to agree wherever processes work together.
  """
  found = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {
    "python": platform.python_version(),
    **found,
    "source of jaxrl_async": source_digest(),
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """What one process says of itself and of its host.

  Attributes:
    probe: content of the probe file; None if it cannot be read.
  """

  host: str
  versions: dict[str, str]
  probe: str | None


def facts(probe: Probe) -> Facts:
  """Return the facts about this process.

  What the other process has written may come to this host some seconds later.
  """
  return Facts(
    host=socket.gethostname(),
    versions=versions(),
    probe=_read(*probe),
  )


def _read(path: pathlib.Path, content: str) -> str | None:
  """Return what a file contains; wait some seconds for a certain content."""
  deadline = supervisor_lib.Deadline(_SHARED_S)
  while True:
    found = None
    try:
      os.listdir(path.parent)  # asks the server of the files
      found = path.read_text()
    except OSError:
      pass
    if found == content or deadline.next_wait_s() == 0:
      return found
    time.sleep(_RETRY_S)


def difference(
  found: Facts, probe: Probe, expected: dict[str, str]
) -> str | None:
  """Return in one line why a process cannot work with this one; None if it can.

  Args:
    found: the facts about the other process.
    probe: the file that this process has written, and what it contains.
    expected: the versions of this process.
  """
  differing = [
    f"{name} {found.versions.get(name)} instead of {version}"
    for name, version in expected.items()
    if found.versions.get(name) != version
  ]
  if differing:
    return (
      f"cluster: {found.host} has {', '.join(differing)}; install the same"
      " versions on all hosts"
    )
  path, content = probe
  if found.probe != content:
    return _NOT_SHARED.format(directory=path.parent, host=found.host)
  return None


def write_probe(probe: Probe) -> None:
  """Write the file by which processes know that they see the same directory.

  A start that was killed may have left one of its own there. Where the file is
  right already, it is left alone, because another process may be reading it.

  Raises:
    StorageError: it could not be written.
  """
  path, content = probe
  with disk.writing(path):
    private_directory.make(path.parent)
  with contextlib.suppress(OSError, UnicodeDecodeError):
    if path.read_text() == content:
      return
  disk.replace_text(path, content)
