"""Another user of this machine, whom only root can be.

`machine` makes one of its own for a test. What all users share is empty there,
so that what is found there later was left by the test's own programs.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

NOBODY = 65534
SHARED = ("/tmp", "/dev/shm")
HOME = "/mnt"  # of the user who runs programs on a machine of its own

AS_NOBODY = [
  *("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"),
  *("bash", "-c"),
]
# Paths that are below /tmp stay where they are.
_MACHINE = """
set -e
mount --make-rprivate /
mount --rbind /tmp /mnt
mount -t tmpfs -o mode=1777 none /tmp
mount -t tmpfs -o mode=1777 none /dev/shm
for path; do
  case "$path" in
    /tmp/*) mkdir -p "$path"; mount --rbind "/mnt/${path#/tmp/}" "$path" ;;
  esac
done
umount -l /mnt
mount -t tmpfs -o mode=755 none /mnt
ip link set lo up
echo ready
read -r _
"""


def why_not():
  """Why nobody else can be acted as here; "" if that can be done."""
  return "only root can act as another user" if os.geteuid() else ""


def does(script, *arguments, inside=()):
  """Whether a shell script of another user succeeds.

  Args:
    script: of bash.
    *arguments: of the script.
    inside: as `Machine.inside`.
  """
  done = subprocess.run(
    [*inside, *AS_NOBODY, script, "bash", *map(str, arguments)],
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


def can(path, inside=()):
  """What another user can do with a directory."""
  return [
    name
    for name, script in ATTEMPTS.items()
    if does(script, path, inside=inside)
  ]


@contextlib.contextmanager
def shared_directory():
  """A directory like /tmp, which all users can reach and write to."""
  with tempfile.TemporaryDirectory() as name:
    path = pathlib.Path(name)
    path.chmod(0o1777)
    yield path


class Machine:
  """Empty directories that all users share, and a network of its own.

  Attributes:
    inside: begins the command line of a program on this machine.
    home: of its user, as it is seen from outside.
  """

  def __init__(self, pid):
    self.inside = ["nsenter", f"--target={pid}", "--mount", "--net", "--ipc"]
    self.home = pathlib.Path(f"/proc/{pid}/root{HOME}")
    self._net = pathlib.Path(f"/proc/{pid}/net")
    self._id = os.readlink(f"/proc/{pid}/ns/net")

  def made(self):
    """All that lies in the directories that users share."""
    return self._found([], *SHARED, "-xdev")

  def open_to_others(self):
    """What another user can read there, or write there or in the home."""
    nobody = [*AS_NOBODY, '"$@"', "bash"]
    readable = self._found(nobody, *SHARED, "-xdev", "-readable")
    return readable | self._found(nobody, *SHARED, HOME, "-xdev", "-writable")

  def _found(self, who, *where):
    """The paths of what `find` finds."""
    done = subprocess.run(
      [*self.inside, *who, "find", *where],
      capture_output=True,
      text=True,
      timeout=60,
    )
    return {*done.stdout.splitlines()} - {*SHARED}

  def listening(self):
    """The addresses, in hexadecimal, and ports at which somebody listens."""
    lines = [
      line.split()
      for name in ("tcp", "tcp6")
      for line in (self._net / name).read_text().splitlines()[1:]
    ]
    places = [line[1].split(":") for line in lines if line[3] == "0A"]
    return [(address, int(port, 16)) for address, port in places]

  def abstract_sockets(self):
    """Names of sockets that have no permissions, at which somebody listens."""
    lines = [x.split() for x in (self._net / "unix").read_text().splitlines()]
    return [x[7] for x in lines[1:] if len(x) > 7 and x[7][0] == "@"]

  def processes(self):
    """The directories in /proc of the programs on this machine."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
      with contextlib.suppress(OSError):
        if os.readlink(process / "ns" / "net") == self._id:
          yield process


@contextlib.contextmanager
def machine(*paths):
  """A machine on which the given paths below /tmp are there too."""
  kept = [*map(str, paths), sys.prefix, sys.base_prefix]
  with subprocess.Popen(
    ["unshare", "--mount", "--net", "--ipc", "bash", "-c", _MACHINE, "bash"]
    + kept,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdout.readline() == "ready\n"
    yield Machine(process.pid)
    process.stdin.close()
