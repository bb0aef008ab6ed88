"""A process that answers requests, which are lines of JSON.

The environments of another package run in it, so that they neither hold
Python's lock against the engine nor import what the run does not need. It ends
when its standard input does.
"""

import asyncio
from collections.abc import Mapping
import contextlib
import itertools
import json
import signal
import subprocess
import sys
from typing import Any
import weakref

# Lines of answers may hold a dataset.
_MAX_LINE = 2**30
# A request that was cancelled has to answer within so many seconds. A process
# that does not is ended: something holds its event loop.
_CANCEL_S = 10.0
_CLOSE_S = 5.0


class WorkerError(RuntimeError):
  """A request has failed; the message is the reason in one line."""


def _command(module: str) -> list[str]:
  return [sys.executable, "-m", module, json.dumps(sys.path)]


def ask_once(module: str, request: Mapping[str, Any]) -> dict[str, Any]:
  """Start a process for one request, and return the answer.

  Raises:
    WorkerError: the process ended without an answer, or the request failed.
  """
  with subprocess.Popen(
    _command(module),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
      process.stdin.write(json.dumps({"id": 0, **request}) + "\n")
      process.stdin.flush()
    line = process.stdout.readline()
  if not line:
    raise WorkerError(f"its process ended with {process.returncode}")
  return _checked(json.loads(line))


def of_loop(module: str) -> "Worker":
  """Return the process of the running event loop; it starts when needed."""
  loop = asyncio.get_running_loop()
  workers = _WORKERS.setdefault(loop, {})
  return workers.setdefault(module, Worker(module))


class Worker:
  """A process that all requests of an event loop share.

  It is started by the first request, and again by the next one after it died.
  It ends when the tasks of the loop are cancelled.

  Threads: all methods belong to the event loop.
  """

  def __init__(self, module: str):
    """Start nothing yet; `module` is what the process runs."""
    self._module = module
    self._ids = itertools.count()
    self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
    self._starting = asyncio.Lock()
    self._process: asyncio.subprocess.Process | None = None
    self._reading: asyncio.Task[None] | None = None

  @property
  def process_id(self) -> int:
    """Of the process, 0 before the first request."""
    return self._process.pid if self._process else 0

  async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request, and return the answer.

    A request whose task is cancelled is cancelled in the process too.

    Raises:
      WorkerError: the request failed, or the process died.
    """
    process = await self._started()
    number = next(self._ids)
    answer = asyncio.get_running_loop().create_future()
    self._waiting[number] = answer
    try:
      self._write(process, {"id": number, **request})
      return _checked(await answer)
    except asyncio.CancelledError:
      if number in self._waiting:
        self._cancel(process, number)
      raise

  async def _started(self) -> asyncio.subprocess.Process:
    async with self._starting:
      if self._reading is None or self._reading.done():
        self._process = await asyncio.create_subprocess_exec(
          *_command(self._module),
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          limit=_MAX_LINE,
        )
        self._reading = asyncio.create_task(self._read(self._process))
      assert self._process is not None
      return self._process

  def _write(
    self, process: asyncio.subprocess.Process, request: Mapping[str, Any]
  ) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(request).encode() + b"\n")

  def _cancel(self, process: asyncio.subprocess.Process, number: int) -> None:
    # The answer is awaited by nobody. It says that the process listens.
    self._write(process, {"id": -1, "what": "cancel", "of": number})
    asyncio.get_running_loop().call_later(
      _CANCEL_S, self._kill_unless_answered, process, number
    )

  def _kill_unless_answered(
    self, process: asyncio.subprocess.Process, number: int
  ) -> None:
    if number in self._waiting and process.returncode is None:
      process.send_signal(signal.SIGKILL)

  async def _read(self, process: asyncio.subprocess.Process) -> None:
    """Hand out the answers until the process ends, and then fail the rest."""
    assert process.stdout is not None and process.stdin is not None
    try:
      while line := await process.stdout.readline():
        answer = json.loads(line)
        waiting = self._waiting.pop(answer["id"], None)
        if waiting is not None and not waiting.done():
          waiting.set_result(answer)
    finally:
      process.stdin.close()
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
          await process.wait()
      if process.returncode is None:
        process.kill()
        await process.wait()
      # Last, so that no request is sent to this process after it.
      died = {"error": "died: the process of the environments ended"}
      for waiting in self._waiting.values():
        if not waiting.done():
          waiting.set_result(died)
      self._waiting.clear()


_WORKERS: weakref.WeakKeyDictionary[
  asyncio.AbstractEventLoop, dict[str, Worker]
] = weakref.WeakKeyDictionary()


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
  if "error" in answer:
    raise WorkerError(answer["error"])
  return answer
