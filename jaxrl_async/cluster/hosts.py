"""Checks that two processes on different hosts can work together."""

import dataclasses
import importlib.metadata
import pathlib
import platform
import socket
import time

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
  """What one process says of itself and of its host.

  Attributes:
    probe: content of the probe file; None if it cannot be read.
    time_s: time of day, in seconds since 1970.
  """

  host: str
  versions: dict[str, str]
  probe: str | None
  time_s: float


def facts(probe: pathlib.Path | None = None) -> Facts:
  """Return the facts about this process.

  Args:
    probe: a file that the other process has written; None if it has not.
  """
  try:
    content = None if probe is None else probe.read_text()
  except OSError:
    content = None
  return Facts(
    host=socket.gethostname(),
    versions=versions(),
    probe=content,
    time_s=time.time(),
  )


def difference(
  found: Facts,
  probe: tuple[pathlib.Path, str],
  expected: dict[str, str],
  asked_s: float,
) -> str | None:
  """Return in one line why a process cannot work with this one.

  Args:
    found: the facts about the other process.
    probe: the file that this process has written, and what it contains.
    expected: the versions of this process.
    asked_s: time of day when the facts were asked for. They may have been
      established at any time since then.

  Returns:
    None if it can.
  """
  if (differing := version_difference(found, expected)) is not None:
    return differing
  ahead_s = max(0.0, found.time_s - time.time())
  behind_s = max(0.0, asked_s - found.time_s)
  if max(ahead_s, behind_s) > MAX_CLOCK_S:
    return (
      f"cluster: the clock of {found.host} is {ahead_s - behind_s:+.0f} s off"
      " that of the trainer's host; synchronise the clocks"
    )
  path, content = probe
  if found.probe != content:
    return _NOT_SHARED.format(directory=path.parent, host=found.host)
  return None


def version_difference(found: Facts, expected: dict[str, str]) -> str | None:
  """Return in one line which versions differ, or None if none does."""
  differing = [
    f"{name} {found.versions.get(name)} instead of {version}"
    for name, version in expected.items()
    if found.versions.get(name) != version
  ]
  if not differing:
    return None
  return (
    f"cluster: {found.host} has {', '.join(differing)}; install the same"
    " versions on all hosts"
  )
