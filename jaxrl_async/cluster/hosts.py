"""Checks that two processes on different hosts can work together."""

import importlib.metadata
import pathlib
import platform
import socket

_PACKAGES = (
  "jax",
  "jaxlib",
  "flax",
  "numpy",
  "orbax-checkpoint",
  "tokenizers",
  "jaxrl_async",
)
MAX_CLOCK_S = 30.0
_NOT_SHARED = (
  "transfer.directory: {directory} on {host} is not the directory that the"
  " trainer's host writes to; use one that all hosts see"
)


def versions() -> dict[str, str]:
  """Return the versions of Python and of the packages that have to agree."""
  found = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {"python": platform.python_version()} | found


def difference(
  expected: dict[str, str], probe: tuple[pathlib.Path, str], clock_s: float
) -> str | None:
  """Return in one line why this process cannot work with another one.

  Args:
    expected: the versions of the other process.
    probe: a file that the other process has written, and what it contains.
    clock_s: how far the clock of this host is ahead, in seconds.

  Returns:
    None if it can.
  """
  host = socket.gethostname()
  found = versions()
  differing = [
    f"{name} {found.get(name)} instead of {version}"
    for name, version in expected.items()
    if found.get(name) != version
  ]
  if differing:
    return (
      f"cluster: {host} has {', '.join(differing)}; install the same versions"
      " on all hosts"
    )
  if abs(clock_s) > MAX_CLOCK_S:
    return (
      f"cluster: the clock of {host} is {clock_s:+.0f} s off that of the"
      " trainer's host; synchronise the clocks"
    )
  path, content = probe
  try:
    is_shared = path.read_text() == content
  except OSError:
    is_shared = False
  if not is_shared:
    return _NOT_SHARED.format(directory=path.parent, host=host)
  return None
