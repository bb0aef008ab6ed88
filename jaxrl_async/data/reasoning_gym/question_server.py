"""The processes that make questions. Nothing here runs in the main process.

A server imports reasoning-gym once. For each request it forks a process that
makes items first, first + step, first + 2 step, ... and writes a line of JSON
for each into a pipe. The process waits while the pipe is full, so that the
size of the pipe limits how far it works ahead. A process ends as soon as its
pipe has no reader. The server ends when its control connection closes, which
the kernel does even if the run is killed. Both ignore the signals that ask a
run to end, because the run still needs questions for the step that it finishes.
"""

from collections.abc import Iterator
import itertools
import json
from multiprocessing import connection
from multiprocessing import reduction
import os
import select
import signal
import threading
import traceback
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import questions
from jaxrl_async.rewards import reasoning
from jaxrl_async.storage import item_json


def serve(descriptor: int) -> None:
  """Fork a process for each request until the connection closes.

  Args:
    descriptor: file descriptor of the control connection. A request is a JSON
      object with the arguments of `_lines`, followed by the handle of the pipe
      to write to.
  """
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
  control = connection.Connection(descriptor)
  reasoning.library()
  while True:
    try:
      request = json.loads(control.recv_bytes())
      pipe = reduction.recv_handle(control)
    except (EOFError, ConnectionResetError):
      return
    if os.fork() == 0:
      try:
        control.close()
        _write_questions(request, pipe)
      finally:
        os._exit(1)  # never back into the server's loop
    os.close(pipe)


def _write_questions(request: dict[str, Any], pipe: int) -> None:
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  threading.Thread(target=_end_with_reader, args=(pipe,), daemon=True).start()
  with open(pipe, "wb") as file:
    for line in _lines(**request):
      file.write(json.dumps(line).encode() + b"\n")
      file.flush()


def _end_with_reader(pipe: int) -> None:
  """End the process when its pipe has no reader, even within an item."""
  poll = select.poll()
  poll.register(pipe, 0)  # only POLLERR, which is always reported
  poll.poll()
  os._exit(0)


def _lines(
  dataset: str,
  params: dict[str, Any],
  seed: int,
  split: str,
  first: int,
  step: int,
) -> Iterator[dict[str, Any]]:
  """Yield one line per index, as a dict to be written as JSON.

  A line holds the item, or nothing if the item belongs to another split. After
  an error there is one last line that describes it.
  """
  index = first
  try:
    source = questions.QuestionSource(
      dataset,
      item_json.decode(params),
      seed=seed,
      split=source_lib.Split(split),
    )
    for index in itertools.count(first, step):
      item = source.stored(index)
      is_ours = questions.split_of(item["question"]) == split
      yield {"item": item} if is_ours else {}
  except sections.ConfigError as error:
    yield {"refused": str(error)}
  # The dataset's code may raise anything. The reader of the pipe raises it.
  except Exception as error:
    yield {
      "failed": f"item {index}: {type(error).__name__}: {error}",
      "traceback": traceback.format_exc(),
    }
