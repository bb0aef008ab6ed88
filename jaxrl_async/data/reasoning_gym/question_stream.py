"""Items of a dataset in order, made ahead of time by other processes.

All streams of a process share one `question_server`. It takes seconds to start,
because it imports the library, and then milliseconds for each stream. Its hash
seed is always the same; see `questions` for the reason.
"""

import collections
from collections.abc import Iterable, Mapping
import functools
import json
import multiprocessing
from multiprocessing import reduction
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any
import weakref

from jaxrl_async.config import sections
from jaxrl_async.data import source as source_lib
from jaxrl_async.storage import item_json

_START_LOCK = threading.Lock()
_OTHER_SPLIT = b"{}"  # what the server writes for a question of another split


class _Server:
  """The server's process, which ends when this process ends in any way."""

  def __init__(self):
    self._lock = threading.Lock()
    self._control, theirs = multiprocessing.Pipe()
    command = (
      # These variables are set for the server alone.
      "env",
      "PYTHONHASHSEED=0",
      "OPENBLAS_NUM_THREADS=1",  # no threads in a process that forks
      f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}",
      sys.executable,
      "-P",  # does not import from the working directory
      "-c",
      "from jaxrl_async.data.reasoning_gym import question_server;"
      f" question_server.serve({theirs.fileno()})",
    )
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,  # a run's stdout is its summary
      pass_fds=[theirs.fileno()],
    )
    theirs.close()
    weakref.finalize(self, _end, self._control, self._process)

  def open(self, request: dict[str, Any]) -> int:
    """Start a process that makes questions; return the pipe it writes to."""
    read, write = os.pipe()
    try:
      with self._lock:
        self._control.send_bytes(json.dumps(request).encode())
        reduction.send_handle(self._control, write, self._process.pid)
    except OSError as error:
      os.close(read)
      raise source_lib.SourceError(
        "the server of questions ended with exit code"
        f" {self._process.wait(timeout=10)}"
      ) from error
    finally:
      os.close(write)
    return read


def _end(control: Any, process: subprocess.Popen) -> None:
  control.close()
  process.kill()  # it holds nothing that could be lost
  process.wait()


@functools.cache
def _server() -> _Server:
  return _Server()


def start_server() -> None:
  """Start the server if there is none yet, without waiting for it."""
  with _START_LOCK:
    _server()


class _Pipe:
  """The lines that one process writes."""

  def __init__(self, descriptor: int):
    self.descriptor = descriptor
    self.lines: collections.deque[bytes] = collections.deque()
    self._rest = b""
    self._poll = select.poll()
    self._poll.register(descriptor, select.POLLIN)

  def receive(self, timeout_s: float) -> bool:
    """Return whether there is a whole line, after waiting up to `timeout_s`.

    Raises:
      SourceError: the process has ended.
    """
    deadline = time.monotonic() + timeout_s
    while not self.lines:
      left_s = max(0.0, deadline - time.monotonic())
      if not self._poll.poll(left_s * 1e3):
        return False
      received = os.read(self.descriptor, 2**16)
      if not received:
        raise source_lib.SourceError("a process that made questions was killed")
      *lines, self._rest = (self._rest + received).split(b"\n")
      self.lines.extend(lines)
    return True


class QuestionStream:
  """The items of one dataset in order, from an index on.

  Threads: only one thread at a time may use it.
  """

  def __init__(
    self,
    dataset: str,
    params: Mapping[str, Any],
    *,
    seed: int,
    split: source_lib.Split,
    first_index: int,
    num_processes: int,
    step: int = 1,
  ):
    """Start the processes that make the items; see `questions`.

    Args:
      dataset: name of a dataset of reasoning-gym.
      params: parameters of the dataset.
      seed: seed of the run.
      split: the split to make. Questions of other splits become None.
      first_index: index of the first item.
      num_processes: number of processes. Of n processes, each makes every n-th
        item.
      step: only every `step`-th item is made.
    """
    start_server()
    self._dataset = dataset
    self._turn = 0
    self._pipes = [
      _Pipe(
        _server().open(
          {
            "dataset": dataset,
            "params": item_json.encode(dict(params)),
            "seed": seed,
            "split": split,
            "first": first_index + i * step,
            "step": num_processes * step,
          }
        )
      )
      for i in range(num_processes)
    ]
    descriptors = [pipe.descriptor for pipe in self._pipes]
    self.close = weakref.finalize(self, _close, descriptors)

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether the next item is ready, after waiting up to `timeout_s`.

    Raises:
      SourceError: a process that makes items has ended.
    """
    return self._pipes[self._turn].receive(timeout_s)

  def next(self) -> dict[str, Any] | None:
    """Return the next item, or None if it belongs to another split.

    Raises:
      sections.ConfigError: the dataset or its parameters cannot be used.
      SourceError: the dataset failed.
    """
    pipe = self._pipes[self._turn]
    while not self.is_ready(timeout_s=60.0):
      pass
    self._turn = (self._turn + 1) % len(self._pipes)
    text = pipe.lines.popleft()
    if text == _OTHER_SPLIT:
      return None
    line = json.loads(text)
    if "refused" in line:
      raise sections.ConfigError(line["refused"])
    if "failed" in line:
      error = source_lib.SourceError(
        f"task.dataset: {self._dataset} failed to make {line['failed']}"
      )
      error.add_note(line["traceback"])
      raise error
    return item_json.decode(line["item"])


def _close(descriptors: Iterable[int]) -> None:
  """Close the pipes, which ends their processes."""
  for descriptor in descriptors:
    os.close(descriptor)
