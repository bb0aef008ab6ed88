"""A trained reward model as a reward server, on the devices of this process.

It speaks the protocol of `rewards.server`: a group is one POST request. Threads
of the HTTP server turn texts into tokens and wait. The main thread, which alone
uses the devices, scores all groups that wait at a time.
"""

from collections.abc import Callable
from concurrent import futures
from http import server as http_server
import json
import pathlib
import queue
import threading
from typing import Any

import numpy as np

from jaxrl_async.assembly import assembly
from jaxrl_async.config import sections
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.supervised import reward_model
from jaxrl_async.training import reward_objectives

# There is no password in the protocol, so only this machine is answered.
HOST = "127.0.0.1"
_MAX_BYTES = 64 * 2**20  # of a request
_MAX_EXAMPLES = 4096  # of one pass over the devices
_LOOK_S = 0.2
_SILENT_S = 60.0  # for each operation of a connection

_Examples = list[worked_examples_lib.WorkedExample]


class _Refusal(ValueError):
  """A request that cannot be scored, with its status and one line."""

  def __init__(self, status: int, text: str):
    super().__init__(text)
    self.status = status


class _Server(http_server.ThreadingHTTPServer):
  """The HTTP server, and the groups that wait for the devices.

  Threads: one for each connection puts its group into `waiting` and waits for
  the scores; the main thread takes groups out. If that thread ends, `close`
  fails every group that still waits.
  """

  daemon_threads = True

  def __init__(self, port: int, scorer: reward_model.Scorer):
    super().__init__((HOST, port), _Handler)
    self._config = scorer.setup.config
    self._prompts = assembly.prompt_source(scorer.setup)
    self.waiting: queue.SimpleQueue[tuple[_Examples, futures.Future]] = (
      queue.SimpleQueue()
    )

  def scores(self, body: bytes) -> list[float]:
    """Return the score of each completion of a request."""
    examples = self._examples(body)
    if not examples:
      return []
    future: futures.Future[list[float]] = futures.Future()
    self.waiting.put((examples, future))
    return future.result()

  def _examples(self, body: bytes) -> _Examples:
    try:
      request = json.loads(body)
      item, completions = request["item"], request["completions"]
      texts = [str(x["text"]) for x in completions]
      num_turns = max((len(x["turns"]) for x in completions), default=1)
    except (ValueError, LookupError, TypeError) as error:
      raise _Refusal(400, f"no group to score: {error!r}") from error
    if num_turns != 1:
      raise _Refusal(422, "episodes of several turns are not scored")
    if not texts:
      return []
    try:
      prompt = self._prompts.prompt("score", item)
      found = [
        reward_objectives.scored_at_end(
          worked_examples_lib.answered(prompt, text, self._prompts)
        )
        for text in texts
      ]
      for example in found:
        reward_model.check_length(example, prompt.prompt_id, self._config)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
      raise _Refusal(422, str(error)) from error
    return found

  def cancel(self) -> None:
    """Fail the groups that wait."""
    while not self.waiting.empty():
      _, future = self.waiting.get()
      future.cancel()


class _Handler(http_server.BaseHTTPRequestHandler):
  timeout = _SILENT_S
  server: _Server

  def do_POST(self) -> None:  # noqa: N802
    try:
      answer, status = self.server.scores(self._body()), 200
    except _Refusal as error:
      answer, status = {"error": str(error)}, error.status
    except futures.CancelledError:
      answer, status = {"error": "the server ends"}, 503
    data = json.dumps(answer).encode()
    self.send_response(status)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def _body(self) -> bytes:
    length = self.headers.get("Content-Length", "")
    if not length.isdecimal() or int(length) > _MAX_BYTES:
      raise _Refusal(413, f"Content-Length has to be at most {_MAX_BYTES}")
    return self.rfile.read(int(length))

  def log_message(self, format: str, *args: Any) -> None:
    """Write nothing: there is a line for each request otherwise."""


def serve(
  config: sections.Config,
  workdir: pathlib.Path,
  *,
  port: int,
  stop: supervisor_lib.StopRequest,
  on_ready: Callable[[str], None],
) -> None:
  """Answer with the scores of a trained reward model until a stop request.

  A completion is encoded anew, after the prompt that this config makes of its
  item, and scored after the end token, also if it was cut off.
  """
  sections.require(
    config.preference.reward_loss is sections.RewardLoss.BRADLEY_TERRY,
    "preference.reward_loss",
    "a model of steps has no score of a completion; serve one of bradley_terry",
  )
  scorer = reward_model.Scorer(config, workdir)
  scorer.values([_nothing(scorer.setup.tokenizer.eos_id)])  # compiles
  with _Server(port, scorer) as server:
    thread = threading.Thread(
      target=server.serve_forever, args=(_LOOK_S,), daemon=True
    )
    thread.start()
    on_ready(f"http://{HOST}:{server.server_port}/")
    try:
      while not stop.is_set:
        _score_waiting(server, scorer)
    finally:
      server.shutdown()
      server.cancel()
      thread.join()


def _nothing(eos_id: int) -> worked_examples_lib.WorkedExample:
  """Return an empty completion of a prompt that has nothing else either."""
  end = np.array([eos_id], np.int32)
  return worked_examples_lib.joined([(end, False), (end, True)])


def _score_waiting(server: _Server, scorer: reward_model.Scorer) -> None:
  """Score the groups that wait, or return after a moment without any."""
  try:
    groups = [server.waiting.get(timeout=_LOOK_S)]
  except queue.Empty:
    return
  examples = list(groups[0][0])
  while not server.waiting.empty() and len(examples) < _MAX_EXAMPLES:
    groups.append(server.waiting.get())
    examples += groups[-1][0]
  values = iter(scorer.values(examples))
  for of_group, future in groups:
    future.set_result([float(next(values)[0]) for _ in of_group])
