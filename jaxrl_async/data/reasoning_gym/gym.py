"""reasoning-gym's datasets as a source; other processes make the questions.

All streams of a process share one server (`questions.serve`). It takes seconds
to start, because it imports the library, and then milliseconds for each stream.
Its hash seed is always the same; see `questions` for the reason.
"""

from collections.abc import Mapping
import dataclasses
import functools
from importlib import metadata
import multiprocessing
from multiprocessing import connection
from multiprocessing import reduction
import os
import subprocess
import sys
import threading
from typing import Any
import weakref

from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import questions

_START_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningGym(source_lib.Counted):
  """The questions of one dataset.

  A hash of a question's text decides which split it belongs to, independently
  of the seed. No held-out question is therefore ever trained on; see
  `questions`.
  """

  name: str
  params: Mapping[str, Any]
  seed: int

  @property
  def versions(self) -> dict[str, str]:
    """Version of the library, since another one may make other questions."""
    return {"reasoning_gym": metadata.version("reasoning-gym")}

  @property
  def splits(self) -> tuple[str, ...]:
    """The splits of `source.Split`."""
    return tuple(source_lib.Split)

  def check(self) -> None:
    """Check name and seed, and start the process that imports the library.

    Only the library knows whether the dataset exists and accepts its
    parameters. A mistake there is raised with the first question of a stream.
    """
    questions.check(self.name, self.seed)
    start_server()

  def open(
    self, split: str, first_index: int, *, num_workers: int
  ) -> "QuestionStream":
    """Start `num_workers` processes that make the questions of a split."""
    return QuestionStream(
      self.name,
      self.params,
      seed=self.seed,
      split=source_lib.Split(split),
      first_index=first_index,
      num_processes=num_workers,
    )

  def is_held_out(self, question: str) -> bool:
    """Return False, because it is not known what the dataset may ask.

    The hash that decides on a question's split says nothing about a text that
    is not one of its questions.
    """
    return False

  def items_per_index(self, split: str) -> float:
    """Return the share of questions that belong to a split."""
    return questions.TENTHS[source_lib.Split(split)] / 10


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
      "from jaxrl_async.data.reasoning_gym import questions;"
      f" questions.serve({theirs.fileno()})",
    )
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,  # a run's stdout is its summary
      pass_fds=[theirs.fileno()],
    )
    theirs.close()
    weakref.finalize(self, _end, self._control, self._process)

  def open(self, request: dict[str, Any]) -> connection.Connection:
    """Start a process that makes questions; return the pipe it writes to."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    try:
      with self._lock:
        self._control.send(request)
        reduction.send_handle(
          self._control, writing.fileno(), self._process.pid
        )
    except OSError as error:
      raise source_lib.SourceError(
        "the server of questions ended with exit code"
        f" {self._process.wait(timeout=10)}"
      ) from error
    finally:
      writing.close()
    return reading


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
  ):
    """Start the processes that make the items; see `questions`."""
    start_server()
    self._turn = 0
    self._pipes = [
      _server().open(
        {
          "dataset": dataset,
          "params": dict(params),
          "seed": seed,
          "split": split,
          "first": first_index + i,
          "step": num_processes,
        }
      )
      for i in range(num_processes)
    ]

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether `next` returns at once; wait up to `timeout_s`."""
    return self._pipes[self._turn].poll(timeout_s)

  def next(self) -> dict[str, Any] | None:
    """Return the next item, or None if it belongs to another split."""
    try:
      item = self._pipes[self._turn].recv()
    except (EOFError, OSError) as error:
      raise source_lib.SourceError(
        "a process that made questions was killed"
      ) from error
    if isinstance(item, Exception):
      raise item
    self._turn = (self._turn + 1) % len(self._pipes)
    return item

  def close(self) -> None:
    """Close the pipes, which ends their processes."""
    for pipe in self._pipes:
      pipe.close()
