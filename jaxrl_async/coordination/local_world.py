"""The processes of a trainer on one machine, started and ended together.

They belong to each other: none can go on without the rest. So all of them are
ended when one dies, and started again from the newest checkpoint, a bounded
number of times. An error that would come again, such as a wrong setting, ends
all of this at once.
"""

from collections.abc import Callable, Mapping
import contextlib
import ctypes
import pathlib
import signal
import subprocess
import sys
import time
from typing import IO

from jaxrl_async.coordination import world as world_lib

# From rank and address to a command line and its environment.
Command = Callable[[int, str], tuple[list[str], Mapping[str, str]]]

_LOOK_S = 0.1
# What the processes have to end by themselves once one of them has ended.
_GRACE_S = 15.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
  command: Command,
  size: int,
  *,
  address: Callable[[], str],
  max_restarts: int,
  note: Callable[[str], None],
  logs: pathlib.Path | None = None,
) -> int:
  """Run all processes until they have ended for good.

  Args:
    command: of each process.
    size: number of processes.
    address: returns a free address, for each start a new one.
    max_restarts: how often all of them are started again.
    note: is called with lines for the user.
    logs: directory for what processes other than 0 print; None drops it.

  Returns:
    The exit code of process 0, or of another one if process 0 had none.
  """
  with _Signals() as signals:
    for start in range(max_restarts + 1):
      codes = _run_once(command, size, address(), logs, signals)
      if not _is_lost(codes) or signals.received:
        break
      what = "a process was lost or hung"
      for rank, code in codes.items():
        if code < 0:
          what = f"process {rank} was ended by {signal.Signals(-code).name}"
      if start < max_restarts:
        note(f"{what}; starting all {size} processes again ({start + 1})")
      else:
        note(f"error: {what}, after {max_restarts} restarts (max_restarts)")
  code = codes.get(0, next(iter(codes.values())))
  return 128 - code if code < 0 else code


def _is_lost(codes: Mapping[int, int]) -> bool:
  """Whether a process died, so that starting again may help.

  If another process dies, process 0 ends with `LOST`. If it could not, the
  others tell.
  """
  known = [codes[0]] if 0 in codes else codes.values()
  return any(code < 0 or code == world_lib.LOST for code in known)


class _Signals:
  """Passes signals on to a process; a context manager.

  Attributes:
    received: whether there was one.
  """

  def __init__(self):
    self.received = False
    self._target: subprocess.Popen | None = None
    self._before = {}

  def pass_to(self, target: subprocess.Popen | None) -> None:
    """Pass signals to this process from now on, also one that came before."""
    self._target = target
    if target is not None and self.received:
      target.terminate()

  def __enter__(self) -> "_Signals":
    """Answer signals until the end of the block."""

    def pass_on(number: int, frame: object) -> None:
      del frame
      self.received = True
      if self._target is not None:
        self._target.send_signal(number)

    self._before = {n: signal.signal(n, pass_on) for n in _SIGNALS}
    return self

  def __exit__(self, *_: object) -> None:
    """Answer signals as before."""
    for number, before in self._before.items():
      signal.signal(number, before)


def _run_once(
  command: Command,
  size: int,
  address: str,
  logs: pathlib.Path | None,
  signals: _Signals,
) -> dict[int, int]:
  """Start all processes, and wait for their ends.

  Returns:
    The exit codes by rank, of those that ended by themselves.
  """
  processes: list[subprocess.Popen] = []
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
      signals.pass_to(processes[0])
      while all(process.poll() is None for process in processes):
        time.sleep(_LOOK_S)
      deadline = time.monotonic() + _GRACE_S
      while time.monotonic() < deadline and any(
        process.poll() is None for process in processes
      ):
        time.sleep(_LOOK_S)
    finally:
      signals.pass_to(None)
      ended = {
        rank: process.returncode
        for rank, process in enumerate(processes)
        if process.poll() is not None
      }
      for process in processes:
        process.kill()
        process.wait()
  return ended


def _output(logs: pathlib.Path | None, rank: int) -> IO[bytes]:
  if logs is None:
    return open("/dev/null", "wb")
  logs.mkdir(parents=True, exist_ok=True)
  return open(logs / f"process-{rank}.log", "ab")


def _end_with_parent() -> None:
  """Ask the kernel to end this process when its parent has ended."""
  if _LIBC is not None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
