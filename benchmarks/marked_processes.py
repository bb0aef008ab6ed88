"""Processes of one run, whoever started them, found by their environment.

Those that Ray starts have process groups of their own, and outlive the process
that asked for them.
"""

import contextlib
import os
import pathlib
import secrets

_NAME = "JAXRL_MARKED_RUN"


def new_mark() -> str:
  """Return a variable that no other run has, as NAME=VALUE."""
  return f"{_NAME}={secrets.token_hex(8)}"


def environment(mark: str) -> dict[str, str]:
  """Return the present environment with this variable."""
  name, _, value = mark.partition("=")
  return os.environ | {name: value}


def find(mark: str) -> dict[int, str]:
  """Return the names of the processes that have this variable, by number."""
  found = {}
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
      # Empty for a process that has ended and was not waited for.
      if mark.encode() in (path / "environ").read_bytes():
        found[int(path.name)] = (path / "comm").read_text().strip()
  return found
