"""The first process in a sandbox: runs programs and judges what they do.

It is started with this file's text as `python -I -c`, reads one job from stdin
as JSON and writes one verdict to stdout. It is process 1 of the sandbox's
process namespace, so that whatever a program leaves behind ends with it. It
cannot be traced, holds no secret, and the programs are processes of their own
that do not inherit its pipes: the worst that they can do is to fail.
"""

import builtins
from collections.abc import Callable
import contextlib
import ctypes
import json
import os
import resource
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

# From linux/prctl.h and linux/capability.h.
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_CAPABILITY_VERSION_3, _MAX_CAPABILITIES = 0x20080522, 64


class Failed(Exception):
  """A program did not do what it should; the message says what happened."""


def _confine(job: dict[str, Any]) -> None:
  """Give up every privilege, and hide this process from the programs."""
  libc = ctypes.CDLL(None, use_errno=True)
  # Out of the bounding set, so that no program gets them back as user 0 of the
  # namespace. It fails where there is none to drop, or none of that number.
  for capability in range(_MAX_CAPABILITIES):
    libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
  if job["uid"] is not None:
    os.setgroups([])
    os.setresgid(job["uid"], job["uid"], job["uid"])
    os.setresuid(job["uid"], job["uid"], job["uid"])
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
  none = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
  if libc.capset(header, none):
    raise OSError(ctypes.get_errno(), "capset")
  if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl no_new_privs")
  if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl dumpable")


def _limit(limits: dict[str, Any]) -> None:
  """Set a program's own limits. Runs in its process, before it starts."""
  cpu = max(1, round(limits["cpu_s"]))
  for what, most in (
    (resource.RLIMIT_CPU, cpu),
    (resource.RLIMIT_AS, limits["memory_bytes"]),
    (resource.RLIMIT_FSIZE, limits["file_bytes"]),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
  ):
    # A program that has used its processor time gets a signal that says so.
    hard = most + 1 if what == resource.RLIMIT_CPU else most
    resource.setrlimit(what, (most, hard))
  if os.getppid() == 1:  # else all processes of the user would count
    most = limits["num_processes"] + 1  # the supervisor is one of them
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def _sweep(home: str) -> None:
  """End every other process of the sandbox, and remove what they wrote."""
  started, _started[:] = list(_started), []
  for process in started:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
  if os.getpid() == 1:
    with contextlib.suppress(ProcessLookupError):
      os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
      while True:
        os.waitpid(-1, 0)
  shutil.rmtree(home, ignore_errors=True)
  os.makedirs(home, exist_ok=True)


class _Pipe:
  """A program's output, read up to a deadline and a number of bytes."""

  def __init__(self, fd: int, most: int):
    self.fd, self._most, self.data = fd, most, b""

  def more(self, deadline: float) -> bool:
    """Read once; False at the end.

    Raises:
      Failed: the time is up, or the program wrote too much.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not select.select([self.fd], [], [], left_s)[0]:
      raise Failed("timeout")
    read = os.read(self.fd, 1 << 16)
    self.data += read
    if len(self.data) > self._most:
      raise Failed("output limit")
    return bool(read)

  def line(self, deadline: float) -> bytes:
    """Return the next line.

    Raises:
      Failed: the output ended before it.
    """
    while b"\n" not in self.data:
      if not self.more(deadline):
        raise Failed("the program ended")
    line, _, self.data = self.data.partition(b"\n")
    return line


_started: list[subprocess.Popen] = []


def _start(
  job: dict[str, Any], arguments: list[str], **pipes: Any
) -> subprocess.Popen:
  home = job["home"]
  process = subprocess.Popen(
    [sys.executable, "-I", "-S", *arguments],
    cwd=home,
    env={"HOME": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
    preexec_fn=lambda: _limit(job["limits"]),
    start_new_session=True,
    **pipes,
  )
  _started.append(process)
  return process


# -- programs that read stdin and write stdout --------------------------------


def _run_case(job: dict[str, Any], case: dict[str, str]) -> None:
  """Run the program on one input.

  Raises:
    Failed: it ended with an error, too late, or with another output.
  """
  home, limits = job["home"], job["limits"]
  with open(f"{home}/program.py", "w", encoding="utf-8") as file:
    file.write(job["program"])
  deadline = time.monotonic() + limits["wall_s"]
  with tempfile.TemporaryFile(dir=home) as given:
    given.write(case["stdin"].encode("utf-8", "surrogatepass"))
    given.seek(0)
    process = _start(
      job,
      ["program.py"],
      stdin=given,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
    )
  assert process.stdout is not None
  pipe = _Pipe(process.stdout.fileno(), limits["output_bytes"])
  while pipe.more(deadline):
    pass
  try:
    code = process.wait(max(0.0, deadline - time.monotonic()))
  except subprocess.TimeoutExpired:
    raise Failed("timeout") from None
  if code == -signal.SIGXCPU:
    raise Failed("timeout")
  if code != 0:
    raise Failed(f"exit code {code}")
  written = pipe.data.decode("utf-8", "replace")
  if not _is_same_text(written, case["stdout"]):
    raise Failed(f"wrote {written[:200]!r}")


def _is_same_text(written: str, expected: str) -> bool:
  """Compare line by line, without spaces at the ends of lines and of the text.

  This is how most judges of programming contests compare.
  """

  def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]

  return lines(written) == lines(expected)


# -- programs whose functions are tested --------------------------------------


class _Candidate:
  """The process that holds the program, and its functions as seen from here.

  The tests run in this process and call the program's functions through pipes.
  So a program cannot forge a verdict, change the tests, or return an object
  that claims to be equal to everything: only plain data comes back.
  """

  def __init__(self, job: dict[str, Any]):
    limits, text = job["limits"], job["candidate"]
    self._codec: dict[str, Any] = {"__name__": "codec"}
    exec(text, self._codec)
    self._deadline = time.monotonic() + limits["wall_s"]
    requests, self._requests = os.pipe()
    answers, theirs = os.pipe()
    _start(
      job,
      ["-c", text, str(requests), str(theirs)],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      pass_fds=(requests, theirs),
    )
    os.close(requests)
    os.close(theirs)
    os.set_blocking(self._requests, False)
    self._answers = _Pipe(answers, limits["output_bytes"])
    self._ask({"program": job["program"]})

  def _send(self, request: Any) -> None:
    data = (json.dumps(request) + "\n").encode()
    while data:
      left_s = self._deadline - time.monotonic()
      if left_s <= 0 or not select.select([], [self._requests], [], left_s)[1]:
        raise Failed("timeout")
      try:
        data = data[os.write(self._requests, data) :]
      except BrokenPipeError:
        raise Failed("the program ended") from None

  def _ask(self, request: dict[str, Any]) -> Any:
    # Whoever writes answers has at least to have read what was asked.
    number = secrets.randbits(64)
    self._send({"number": number, **request})
    line = self._answers.line(self._deadline)
    try:
      answer = json.loads(line)
      if answer["number"] != number:
        raise Failed("the program answered what was not asked")
      error = answer.get("error")
      if error is None:
        return self._codec["decode"](answer["value"])
    except (ValueError, TypeError, LookupError, AttributeError) as wrong:
      raise Failed("the program's answer cannot be read") from wrong
    except RecursionError as wrong:
      raise Failed("the program's answer is nested too deeply") from wrong
    raise _exception(str(error), str(answer.get("message", "")))

  def function(self, name: str) -> Any:
    """Return a function that calls the program's function of that name."""
    encode = self._codec["encode"]

    def call(*args: Any, **kwargs: Any) -> Any:
      return self._ask({"function": name, "args": encode((args, kwargs))})

    call.__name__ = name
    return call


def _exception(name: str, message: str) -> BaseException:
  """Return what the program raised, if tests could be waiting for it."""
  kind = getattr(builtins, name, None)
  if isinstance(kind, type) and issubclass(kind, Exception):
    try:
      return kind(message)
    except TypeError:  # UnicodeDecodeError, say, wants more
      pass
  return Failed(f"{name}: {message}")


def _run_tests(job: dict[str, Any]) -> None:
  """Run the tests of a job on its program's functions.

  Raises:
    Exception: a test failed, with whatever it raised.
  """
  candidate = _Candidate(job)
  names: dict[str, Any] = {"__name__": "tests"}
  exec(compile(job["setup"], "setup.py", "exec"), names)
  for name in job["functions"]:
    names[name] = candidate.function(name)
  signal.signal(signal.SIGALRM, _out_of_time)
  signal.setitimer(signal.ITIMER_REAL, job["limits"]["wall_s"])
  try:
    exec(compile(job["tests"], "tests.py", "exec"), names)
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def _out_of_time(signum: int, frame: Any) -> None:
  raise Failed("timeout")


# -- the job ------------------------------------------------------------------


_OUT_OF_TIME = "Failed: timeout"


def _attempt(run: Callable[..., None], job: dict[str, Any], *args: Any) -> str:
  """Run one test or case; return what went wrong, or nothing."""
  try:
    run(job, *args)
  except AssertionError as error:
    return f"assertion failed {error}".strip()[:300]
  except Exception as error:
    return f"{type(error).__name__}: {error}"[:300]
  finally:
    _sweep(job["home"])
  return ""


def main() -> None:
  """Read the job, run its tests or cases, write what became of each."""
  job = json.loads(sys.stdin.read())
  verdict_fd = os.dup(1)
  quiet = os.open(os.devnull, os.O_WRONLY)
  os.dup2(quiet, 1)  # tests may print
  os.dup2(quiet, 2)
  _confine(job)
  _sweep(job["home"])
  if job["kind"] == "tests":
    failures = [_attempt(_run_tests, job)]
  else:
    failures = []
    for case in job["cases"]:
      failures.append(_attempt(_run_case, job, case))
      if failures[-1] and job["stop_early"]:
        break
      if failures[-1] == _OUT_OF_TIME:  # the others would take as long
        failures += [_OUT_OF_TIME] * (len(job["cases"]) - len(failures))
        break
  os.write(verdict_fd, json.dumps({"failures": failures}).encode())


if __name__ == "__main__":
  main()
