"""The processes that make questions; nothing here runs in the run's own.

A server imports reasoning-gym once. For each request it forks a process that
makes items first, first + step, first + 2 step, ... and writes a line of JSON
for each into a pipe. A full pipe makes it wait, so that the pipe is all there
is to prefetching. A process ends as soon as nobody can read its pipe any more,
and the server when its control connection closes, which the kernel sees to
even if the run is killed. Both ignore the signals that ask a run to end: it
still needs questions for the step it finishes.
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
    descriptor: of the control connection. A request is a JSON object (see
      `_lines`), then the handle of the pipe to write to.
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
  """Wait until nobody can read the pipe; also in the middle of an item."""
  poll = select.poll()
  poll.register(pipe, 0)  # only for what is always reported: POLLERR
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
  """Yield an item each, empty for another split's; an error is the last."""
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
  except Exception as error:  # the dataset's code; raised where it is read
    yield {
      "failed": f"item {index}: {type(error).__name__}: {error}",
      "traceback": traceback.format_exc(),
    }
