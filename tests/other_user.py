"""Another user of this machine, whom only root can be."""

import contextlib
import os
import pathlib
import subprocess
import tempfile

NOBODY = 65534


def why_not():
  """Why nobody else can be acted as here; "" if that can be done."""
  return "only root can act as another user" if os.geteuid() else ""


def does(script, *arguments):
  """Whether a shell script of another user succeeds."""
  done = subprocess.run(
    ["sh", "-c", script, "sh", *map(str, arguments)],
    user=NOBODY,
    group=NOBODY,
    extra_groups=[],
    cwd="/",
    capture_output=True,
    timeout=60,
  )
  return not done.returncode


# What another user may try with a directory and what is in it.
ATTEMPTS = {
  "list": 'ls "$1"',
  "read": 'find "$1" -type f -exec cat {} + | grep -q .',
  "write": 'touch "$1/x"',
  "write below": 'touch "$(find "$1" -mindepth 1 -type d | head -n 1)/x"',
  "rename": 'mv "$1" "$1.moved" && mv "$1.moved" "$1"',
  "remove": 'rm -rf "$1" && test ! -e "$1"',
  "replace": 'ln -sfn / "$1" && test -L "$1"',
}


def can(path):
  """What another user can do with a directory."""
  return [name for name, script in ATTEMPTS.items() if does(script, path)]


@contextlib.contextmanager
def shared_directory():
  """A directory like /tmp, which all users can reach and write to."""
  with tempfile.TemporaryDirectory() as name:
    path = pathlib.Path(name)
    path.chmod(0o1777)
    yield path
