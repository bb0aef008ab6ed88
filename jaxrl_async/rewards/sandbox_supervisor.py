"""The first process in a sandbox: confines itself and starts the program.

It is started with the text of this file, and of those that it imports, as
`python -I -c` and reads a job from stdin as JSON. What it reports goes through
a pipe that no program inherits: `STARTED` as soon as it is confined, and then,
as JSON, the exit code of a program that reads and writes, or the verdict of
tests.

It is process 1 of the sandbox's process namespace, so that whatever a program
leaves behind ends with it. It cannot be traced and holds no secret. A program
can still harm it, with signals or limits, and so lose its own verdict.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

from jaxrl_async.rewards import sandbox_tests

STARTED = b"started\n"
# Of every interpreter in a sandbox. Answers may be integers of any length.
OPTIONS = ("-I", "-S", "-X", "int_max_str_digits=0")

# From linux/prctl.h, linux/capability.h and linux/keyctl.h.
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITY_VERSION_3, _MAX_CAPABILITIES = 0x20080522, 64
_KEYCTL = {"x86_64": 250, "aarch64": 219}  # number of the system call
_KEYCTL_JOIN_SESSION_KEYRING = 1


def _confine(uid: int | None) -> None:
  """Give up every privilege, and hide this process from the programs."""
  libc = ctypes.CDLL(None, use_errno=True)
  # Out of the bounding set, so that no program gets them back as user 0 of the
  # namespace. It fails where there is none to drop, or none of that number.
  for capability in range(_MAX_CAPABILITIES):
    libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
  if uid is not None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
  header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
  none = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
  if libc.capset(header, none):
    raise OSError(ctypes.get_errno(), "capset")
  if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl no_new_privs")
  if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl dumpable")
  # The kernel forgets this signal when the user id changes. Without it, the
  # sandbox would outlive the process that made it and is killed.
  if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
    raise OSError(ctypes.get_errno(), "prctl pdeathsig")
  # Keys would be seen by the next program. Some kernels allow none.
  if number := _KEYCTL.get(os.uname().machine):
    libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None)


def _limit(limits: dict[str, Any]) -> None:
  """Set the limits of this process and of all that it starts."""
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
  if os.getpid() == 1:  # else all processes of the user would count
    most = limits["num_processes"] + 1  # this process is one of them
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
  # Whoever made the sandbox ends it at the deadline, unless they have ended.
  signal.signal(signal.SIGALRM, lambda signum, frame: os._exit(1))
  signal.alarm(int(limits["wall_s"]) + 2)
  # Python's own handler would let a program interrupt this process.
  signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start(
  home: str, arguments: list[str], *, stdin: int, stdout: int, keep: Any = ()
) -> int:
  """Start an interpreter with these standard files; return its process id."""
  pid = os.fork()
  if pid:
    return pid
  try:
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    for fd in keep:
      os.set_inheritable(fd, True)
    os.chdir(home)
    python = [sys.executable, *OPTIONS, *arguments]
    environment = {"HOME": home, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    os.execve(sys.executable, python, environment)
  finally:
    os._exit(127)


# -- programs that read stdin and write stdout --------------------------------


def _given(text: str) -> int:
  """Return a file with a text that a program may read."""
  given = os.memfd_create("stdin")
  with open(given, "wb", closefd=False) as file:
    file.write(text.encode("utf-8", "surrogatepass"))
  os.lseek(given, 0, os.SEEK_SET)
  return given


# Runs it as a script, with what `site` has, which OPTIONS leave out.
_SCRIPT = """
import __future__, builtins, sys, types
builtins.exit = builtins.quit = sys.exit
sys.argv = ["program.py"]
module = sys.modules["__main__"] = types.ModuleType("__main__")
module.__file__ = "program.py"
with open("program.py", "rb") as file: text = file.read()
flags = __future__.annotations.compiler_flag  # as for programs with tests
exec(compile(text, "program.py", "exec", flags), vars(module))
"""


def _run_case(job: dict[str, Any], given: int) -> int:
  """Run the program on one input, and return its exit code."""
  with open(f"{job['home']}/program.py", "w", encoding="utf-8") as file:
    file.write(job["program"])
  pid = _start(job["home"], ["-c", _SCRIPT], stdin=given, stdout=1)
  _, status = os.waitpid(pid, 0)
  return os.waitstatus_to_exitcode(status)


# -- programs whose functions are tested --------------------------------------


def _start_program(job: dict[str, Any], given: int) -> sandbox_tests.Program:
  """Start the process that holds the program; return our end of its pipes."""
  requests, ours = os.pipe()
  answers, theirs = os.pipe()
  _start(
    job["home"],
    ["-c", job["candidate"], str(requests), str(theirs)],
    stdin=given,
    stdout=2,
    keep=(requests, theirs),
  )
  os.close(requests)
  os.close(theirs)
  return sandbox_tests.Program(
    os.fdopen(answers, "rb"),
    os.fdopen(ours, "wb"),
    job["limits"]["output_bytes"],
  )


def _run_tests(job: dict[str, Any], given: int) -> dict[str, Any]:
  """Run tests on the program's functions; return the verdict."""
  os.dup2(2, 1)  # tests may print
  return sandbox_tests.judge(job, lambda: _start_program(job, given))


def main(report: int) -> None:
  """Read the job and report what became of it.

  Args:
    report: the pipe to whoever made the sandbox.
  """
  os.set_inheritable(report, False)
  job = json.loads(sys.stdin.read())
  _confine(job["uid"])
  given = _given(job.get("stdin", ""))
  _limit(job["limits"])
  os.write(report, STARTED)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
  run = _run_tests if "tests" in job else _run_case
  os.write(report, json.dumps(run(job, given)).encode())
  os._exit(0)


if __name__ == "__main__":
  main(int(sys.argv[1]))
