"""A trained reward model as a reward server, on the devices of this process.

It speaks the protocol of `rewards.server`: a group is one POST request. Threads
of the HTTP server turn texts into tokens and wait. The main thread, which alone
uses the devices, scores all groups that wait at a time.

The query of the address says what a model of steps returns:

    ?reward=clip_delta&threshold=0.6    rewards of steps, at their last tokens;
                                        see `algorithms.step_rewards`
    ?reward=outcome                     the score after the last step
"""

from collections.abc import Callable
from concurrent import futures
from http import server as http_server
import json
import math
import pathlib
import queue
import threading
from typing import Any
from urllib import parse

from jaxtyping import Float
import numpy as np

from jaxrl_async import types
from jaxrl_async.algorithms import step_rewards
from jaxrl_async.assembly import assembly
from jaxrl_async.config import sections
from jaxrl_async.data import labelled_steps
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

_OUTCOME = "outcome"

_Examples = list[worked_examples_lib.WorkedExample]
# Makes an entry of the answer of what the scalar head says of an example.
_Answer = Callable[[Float[np.ndarray, "_"]], Any]


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
    self._version = scorer.version
    self._prompts = assembly.prompt_source(scorer.setup)
    self.waiting: queue.SimpleQueue[tuple[_Examples, futures.Future]] = (
      queue.SimpleQueue()
    )

  def answer(self, query: str, body: bytes) -> list[Any]:
    """Return the reward of each completion of a request."""
    wanted = self._wanted(query)
    try:
      request = json.loads(body)
      item, completions = request["item"], request["completions"]
      texts = [str(x["text"]) for x in completions]
      tokens = [np.array(x["tokens"], np.int32) for x in completions]
      num_turns = max((len(x["turns"]) for x in completions), default=1)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
      raise _Refusal(400, f"no group to score: {error!r}") from error
    if num_turns != 1:
      raise _Refusal(422, "episodes of several turns are not scored")
    if not texts:
      return []
    try:
      prompt = self._prompts.prompt("score", item)
      made = [
        self._example(prompt, text, of_one, wanted)
        for text, of_one in zip(texts, tokens, strict=True)
      ]
      for example, _ in made:
        reward_model.check_length(example, prompt.prompt_id, self._config)
    except (
      ValueError,
      LookupError,
      TypeError,
      AttributeError,
      OverflowError,  # a token id that no tokenizer has
    ) as error:
      raise _Refusal(422, str(error)) from error
    future: futures.Future[list[Float[np.ndarray, _]]] = futures.Future()
    self.waiting.put(([example for example, _ in made], future))
    return [
      make(values)
      for (_, make), values in zip(made, future.result(), strict=True)
    ]

  def _wanted(self, query: str) -> tuple[str, float]:
    """Return the shape and the threshold of a query, ("", 0) without one."""
    given = dict(parse.parse_qsl(query, keep_blank_values=True))
    shape, threshold = given.pop("reward", ""), given.pop("threshold", "")
    shapes = (_OUTCOME, *step_rewards.SHAPES)
    is_of_steps = _is_of_steps(self._config)
    number = 0.0
    if given:
      problem = f"{next(iter(given))!r:.80} is not known in the address"
    elif not is_of_steps and (shape or threshold):
      problem = "a model of bradley_terry has one score and takes no query"
    elif is_of_steps and shape not in shapes:
      problem = f"?reward={shape:.80}: use one of {', '.join(shapes)}"
    elif bool(threshold) != (shape in step_rewards.CLIPPED):
      clipped = " and ".join(step_rewards.CLIPPED)
      problem = f"{clipped} take a threshold, and reward={shape} has"
      problem += f" {threshold!r:.80}"
    else:
      try:
        number = float(threshold or 0)
        problem = "" if math.isfinite(number) else "it is not finite"
      except ValueError as error:
        problem = str(error)
      problem = problem and f"threshold: {problem}"
    if problem:
      raise _Refusal(400, problem)
    return shape, number

  def _example(
    self,
    prompt: types.Prompt,
    text: str,
    tokens: np.ndarray,
    wanted: tuple[str, float],
  ) -> tuple[worked_examples_lib.WorkedExample, _Answer]:
    """Return what is scored of a completion, and what makes its entry."""
    shape, threshold = wanted
    if not shape:
      example = reward_objectives.scored_at_end(
        worked_examples_lib.answered(prompt, text, self._prompts)
      )
      return example, lambda values: float(values[0])
    tokenizer = self._prompts.tokenizer
    if tokenizer.decode(tokens) != text:
      raise ValueError(
        "the tokens of a completion are not its text to this model's tokenizer;"
        " a model of steps scores policies that have its own"
      )
    example, ends = labelled_steps.completed(prompt, tokens, tokenizer)

    def of_steps(values: Float[np.ndarray, "_"]) -> dict[str, Any]:
      scores = 1 / (1 + np.exp(-values.astype(np.float64)))
      parts = {"steps": float(len(ends)), "sum": float(scores.sum())}
      parts["updates"] = float(self._version)
      if shape == _OUTCOME:
        return {"score": float(scores[-1]) if ends else 0.0, "parts": parts}
      found = step_rewards.shaped(scores, shape=shape, threshold=threshold)
      of_tokens = {str(at): float(x) for at, x in zip(ends, found, strict=True)}
      return {"score": 0.0, "parts": parts, "token_scores": of_tokens}

    return example, of_steps

  def cancel(self) -> None:
    """Fail the groups that wait."""
    while not self.waiting.empty():
      _, future = self.waiting.get()
      future.cancel()


class _Handler(http_server.BaseHTTPRequestHandler):
  timeout = _SILENT_S
  server: _Server

  def do_POST(self) -> None:  # noqa: N802
    query = parse.urlsplit(self.path).query
    try:
      answer, status = self.server.answer(query, self._body()), 200
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

  The prompt is the one that this config makes of the item. For a model of
  bradley_terry the completion is encoded anew, and scored after the end token,
  also if it was cut off. A model of steps scores the policy's own tokens.
  """
  scorer = reward_model.Scorer(config, workdir)
  scorer.values([_nothing(scorer.setup.tokenizer.eos_id)])  # compiles
  with _Server(port, scorer) as server:
    thread = threading.Thread(
      target=server.serve_forever, args=(_LOOK_S,), daemon=True
    )
    thread.start()
    query = f"?reward={_OUTCOME}" if _is_of_steps(config) else ""
    on_ready(f"http://{HOST}:{server.server_port}/{query}")
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
    future.set_result([next(values) for _ in of_group])


def _is_of_steps(config: sections.Config) -> bool:
  return config.preference.reward_loss is sections.RewardLoss.STEPS
