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
    The exit code of process 0, or one that says that a process was lost.
  """
  with _Signals() as signals:
    for start in range(max_restarts + 1):
      codes = _run_once(command, size, address(), logs, signals)
      if not _is_lost(codes) or signals.received:
        break
      dead = [
        f"process {rank} was ended by {signal.Signals(-code).name}"
        for rank, code in enumerate(codes)
        if code < 0
      ]
      what = dead[0] if dead else "a process was lost"
      if start < max_restarts:
        note(f"{what}; starting all {size} processes again ({start + 1})")
      else:
        note(f"error: {what}, after {max_restarts} restarts (max_restarts)")
  if codes[0] < 0:
    return 128 - codes[0]
  return codes[0] or next((code for code in codes if code), 0)


def _is_lost(codes: list[int]) -> bool:
  """Whether a process died, as opposed to ending with an error of its own."""
  return codes[0] not in (0, 1, 130) or (
    codes[0] == 0 and any(code < 0 for code in codes)
  )


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
) -> list[int]:
  """Start all processes, wait for their ends, and return their exit codes."""
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
      for process in processes:
        if process.poll() is None:
          process.kill()
        process.wait()
  return [process.returncode for process in processes]


def _output(logs: pathlib.Path | None, rank: int) -> IO[bytes]:
  if logs is None:
    return open("/dev/null", "wb")
  logs.mkdir(parents=True, exist_ok=True)
  return open(logs / f"process-{rank}.log", "ab")


def _end_with_parent() -> None:
  """Ask the kernel to end this process when its parent has ended."""
  if _LIBC is not None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
