"""Start a trainer of several processes on this machine.

uv run launch/trainer_world.py --num_processes=2 -- \
  --config=configs/my_run.py --config.cluster.trainer_processes=2 ...

What follows the two dashes are the flags of launch/train.py. Process 0 has this
terminal; the others print to files in --logs, if that is given. When a process
dies or hangs, all of them are started again from the newest checkpoint. A
signal asks process 0 to stop, and a second one ends it at once.

Several hosts start launch/train.py themselves, each with its own --process_id.
"""

import command_line  # isort: skip, first: it sets XLA's environment

from collections.abc import Callable, Mapping
import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from typing import IO

from absl import flags

from jaxrl_async.config import sections
from jaxrl_async.processes import world as world_lib
from jaxrl_async.storage import directories

_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", 2, "Number of processes (cluster.trainer_processes).", 1
)
_MAX_RESTARTS = flags.DEFINE_integer(
  "max_restarts", 3, "How often all processes are started again.", 0
)
_DEVICES = flags.DEFINE_integer(
  "devices_per_process",
  0,
  "GPUs of each process, in order; 0 shows all of them to all.",
  0,
)
_LOGS = flags.DEFINE_string(
  "logs", "", "Directory for what processes other than 0 print."
)


# From rank and address to a command line and its environment.
Command = Callable[[int, str], tuple[list[str], Mapping[str, str]]]

_LOOK_S = 0.1
# What the processes have to end by themselves once one of them has ended.
_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def run(
  command: Command,
  size: int,
  *,
  max_restarts: int,
  note: Callable[[str], None],
  logs: pathlib.Path | None = None,
) -> int:
  """Run all processes until they have ended for good.

  They belong to each other: none can go on without the rest. So all of them are
  ended when one dies, and started again. An error that would come again, such
  as a wrong setting, ends all of this at once.

  Args:
    command: of each process. Each start has a free address of its own.
    size: number of processes.
    max_restarts: how often all of them are started again.
    note: is called with lines for the user.
    logs: directory for what processes other than 0 print; None drops it.

  Returns:
    The exit code of process 0, or of another one if process 0 had none.
  """
  processes: list[subprocess.Popen] = []
  received: list[int] = []

  def pass_on(number: int, frame: object) -> None:
    del frame
    received.append(number)
    if processes:
      processes[0].send_signal(number)

  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, pass_on)
  codes: dict[int, int] = {}
  for start in range(1, max_restarts + 2):
    codes = _run_once(command, size, logs, processes, received)
    # If another process dies, process 0 ends with `LOST`. If it could not, the
    # others tell.
    known = [codes[0]] if 0 in codes else codes.values()
    if received or not any(c < 0 or c == world_lib.LOST for c in known):
      break
    what = "a process was lost or hung"
    for rank, code in codes.items():
      if code < 0:
        what = f"process {rank} was ended by {signal.Signals(-code).name}"
    if start <= max_restarts:
      note(f"{what}; starting all {size} processes again ({start})")
    else:
      note(f"error: {what}, after {max_restarts} restarts (max_restarts)")
  code = codes.get(0, next(iter(codes.values())))
  return 128 - code if code < 0 else code


def _run_once(
  command: Command,
  size: int,
  logs: pathlib.Path | None,
  processes: list[subprocess.Popen],
  received: list[int],
) -> dict[int, int]:
  """Start all processes, and wait for their ends.

  Args:
    command: of each process.
    size: number of processes.
    logs: directory for what processes other than 0 print.
    processes: becomes a list of those that run.
    received: signals that have come.

  Returns:
    The exit codes by rank, of those that ended by themselves.
  """
  address = _free_address()
  with contextlib.ExitStack() as files:
    try:
      for rank in range(size):
        output = files.enter_context(_output(logs, rank)) if rank else None
        line, environment = command(rank, address)
        processes.append(
          subprocess.Popen(
            line,
            env=environment,
            stdin=subprocess.DEVNULL if rank else None,
            stdout=output,
            stderr=output,
            # The terminal's signals come to this process alone.
            start_new_session=True,
            preexec_fn=_end_with_parent,
          )
        )
      if received:  # before there was anybody to pass it on to
        processes[0].terminate()
      while all(process.poll() is None for process in processes):
        time.sleep(_LOOK_S)
      deadline = time.monotonic() + _GRACE_S
      while time.monotonic() < deadline and any(
        process.poll() is None for process in processes
      ):
        time.sleep(_LOOK_S)
      return {
        rank: process.returncode
        for rank, process in enumerate(processes)
        if process.returncode is not None
      }
    finally:
      for process in processes:
        process.kill()
        process.wait()
      processes.clear()


def _output(logs: pathlib.Path | None, rank: int) -> IO[bytes]:
  if logs is None:
    return open(os.devnull, "wb")
  logs.mkdir(parents=True, exist_ok=True)
  return open(logs / f"process-{rank}.log", "ab")


def _end_with_parent() -> None:
  """Ask the kernel to end this process when its parent has ended."""
  if _LIBC is not None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _check() -> None:
  if _LOGS.value:
    directories.check_can_write("logs", _LOGS.value)


def _command(arguments: list[str]) -> Command:
  script = str(pathlib.Path(__file__).with_name("train.py"))

  def command(rank: int, address: str) -> tuple[list[str], dict[str, str]]:
    per = _DEVICES.value
    own = range(rank * per, (rank + 1) * per)
    more = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))} if per else {}
    line = [sys.executable, script, *arguments]
    if _NUM_PROCESSES.value > 1:
      line += [
        f"--num_processes={_NUM_PROCESSES.value}",
        f"--process_id={rank}",
        f"--coordinator_address={address}",
      ]
    return line, dict(os.environ) | more

  return command


def _free_address() -> str:
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return f"localhost:{free.getsockname()[1]}"


def main(arguments: list[str]) -> None:
  """Start the processes and stay until they have ended."""
  if not arguments:
    raise sections.ConfigError(
      "the flags of launch/train.py are missing; they follow after --"
    )
  code = run(
    _command(arguments),
    _NUM_PROCESSES.value,
    max_restarts=_MAX_RESTARTS.value,
    logs=pathlib.Path(_LOGS.value) if _LOGS.value else None,
    note=lambda line: print(line, file=sys.stderr, flush=True),
  )
  sys.exit(code)


if __name__ == "__main__":
  split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
  rest, sys.argv = sys.argv[split + 1 :], sys.argv[:split]
  command_line.start_without_config(lambda: main(rest), _check, needs_jax=False)
