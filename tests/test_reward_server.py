"""Reward servers: a real one over HTTP, and the ways in which it may fail."""

import contextlib
from http import server as http_server
import json
import pathlib
import re
import socket
import threading
import time

import jax
from ml_collections import config_dict
import numpy as np
import pytest
import reward_groups

from jaxrl_async import types
from jaxrl_async.assembly import checks
from jaxrl_async.config import sections
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rewards import term as term_lib

COMPLETION = types.Completion(
  text="1=2",
  turns=(types.Turn(prompt="Q", completion="1=2", num_tokens=3),),
  tokens=np.arange(3, dtype=np.int32),
  finish_reason=types.FinishReason.EOS,
)


class Handler(http_server.BaseHTTPRequestHandler):
  """Answers as the path of the request says."""

  asked = []
  may_answer = threading.Event()

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
    self.asked.append(body)
    path = self.path.partition("?")[0].strip("/")
    getattr(self, path)(body)

  def answer(self, value, status=200):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    self.send_response(status)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)

  def lengths(self, body):
    self.answer([len(x["answer"]) for x in body["completions"]])

  def whole(self, body):
    answer = {
      "score": 1,
      "parts": {"a": 2},
      "token_scores": {"2": 0.5},
      "answer": "two",
    }
    self.answer([answer for _ in body["completions"]])

  def says(self, body):
    """Whatever the item holds, as it is."""
    self.answer(body["item"].get("answer", "[]").encode())

  def one_is_nan(self, body):
    texts = [each["text"] for each in body["completions"]]
    self.answer([float("nan") if text == "nan" else 1.0 for text in texts])

  def fails(self, body):
    self.answer({"detail": "the model is\nnot loaded"}, status=500)

  def hangs(self, body):
    self.may_answer.wait(20.0)
    self.answer([1.0 for _ in body["completions"]])

  def drips(self, body):
    """Sends a byte now and then, so that no single read takes long."""
    self.send_response(200)
    self.send_header("Content-Length", "1000")
    self.end_headers()
    with contextlib.suppress(OSError):
      for _ in range(400):
        self.wfile.write(b" ")
        time.sleep(0.05)

  def dies(self, body):
    self.send_response(200)
    self.send_header("Content-Length", "1000")
    self.end_headers()
    self.wfile.write(b"[1.0,")
    self.connection.shutdown(socket.SHUT_RDWR)

  def fails_first(self, body):
    is_first = len(self.asked) == 1
    self.answer([1.0], status=503 if is_first else 200)

  def log_message(self, *arguments):
    pass


@pytest.fixture(scope="module")
def address():
  with http_server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.may_answer.set()
    server.shutdown()
    thread.join(10)


@pytest.fixture(scope="module")
def score(address):
  """Scores completions on a path of the server, in one reward process."""
  services = {}

  def submit(path, item, texts=("1=2",), num_retries=0):
    Handler.asked.clear()
    key = path, num_retries
    if key not in services:
      term = term_lib.Term(
        scorer=server_lib.at(f"{address}/{path}"),
        timeout_s=0.6 if path in ("hangs", "drips") else 60.0,
        num_retries=num_retries,
      )
      services[key] = reward_groups.service(term)
      services[key].warm_up()
    start_s = time.monotonic()
    outcome = reward_groups.submit(services[key], item, texts).result()
    submit.took_s = time.monotonic() - start_s
    return outcome

  submit.services = services
  yield submit
  for service in services.values():
    service.close()


def test_a_group_is_one_request_with_everything_a_function_would_see(score):
  item = {"question": "1+1", "metadata": {"at": (1, 2), "kind": complex(1, 2)}}
  rewards = score("lengths?a=b", item, ["1=2"] * 3)
  assert [reward.score for reward in rewards] == [1.0, 1.0, 1.0]
  (asked,) = Handler.asked
  assert asked["item"] == {
    "question": "1+1",
    "metadata": {"at": [1, 2], "kind": "(1+2j)"},
  }
  assert asked["completions"] == 3 * [
    {
      "text": "1=2",
      "answer": "2",
      "turns": [
        {"prompt": "Q", "completion": "1=2", "num_tokens": 3, "reward": 0.0}
      ],
      "tokens": reward_groups.TOKENIZER.encode("1=2").tolist(),
      "finish_reason": "eos",
    }
  ]


def test_a_server_may_answer_all_that_a_reward_has(score):
  assert score("whole", {}) == [
    types.Reward(
      score=1.0, parts={"a": 2.0}, token_scores={2: 0.5}, answer="two"
    )
  ]


@pytest.mark.parametrize(
  ("answer", "reason"),
  [
    ("garbage", "error: ServerError: it answered 'garbage', no JSON"),
    ("[1, 2]", "error: ServerError: it answered '[1, 2]', no list of 1 scores"),
    ("1.0", "error: ServerError: it answered '1.0', no list of 1 scores"),
    ("[NaN]", "nan: the scorer returned nan"),
    ("[{}]", "error: ServerError: it answered an object without a score"),
    (
      '[{"score": 1, "part": {}}]',
      "error: ServerError: it answered an object with 'part'",
    ),
    (
      '[{"score": 1, "token_scores": {"x": 1}}]',
      "error: ServerError: it answered token_scores of which one is at no"
      " position: invalid literal for int() with base 10: 'x'",
    ),
    (
      '[{"score": 1, "token_scores": {"3": 1}}]',
      "error: the scorer returned a score at token 3, but the completion has"
      " the tokens 0 to 2",
    ),
    (
      '[{"score": 1, "answer": 3}]',
      "error: the scorer returned 3 as the answer, no text",
    ),
  ],
)
def test_an_answer_that_is_none_is_a_failure(score, answer, reason):
  failure = score("says", {"answer": answer})
  assert isinstance(failure, service_lib.RewardFailure)
  assert failure.reason == reason


@pytest.mark.parametrize("is_zero", [False, True])
def test_a_score_that_is_none_loses_its_completion_alone(address, is_zero):
  term = term_lib.Term(
    scorer=server_lib.at(f"{address}/one_is_nan"),
    timeout_s=60.0,
    num_retries=1,
    fails_as_zero=is_zero,
  )
  service = reward_groups.service(term)
  Handler.asked.clear()
  try:
    rewards = reward_groups.submit(service, {}, ["a", "nan", "b"]).result()
    metrics = service.metrics()
  finally:
    service.close()
  lost = service_lib.RewardFailure("nan: the scorer returned nan")
  assert rewards == [
    types.Reward(score=1.0),
    types.Reward(score=0.0) if is_zero else lost,
    types.Reward(score=1.0),
  ]
  assert metrics["reward_service/lost/nan"] == 1
  # Only that completion was asked for again.
  assert [len(asked["completions"]) for asked in Handler.asked] == [3, 1]


@pytest.mark.parametrize(
  ("path", "words"),
  [
    ("fails", 'error: ServerError: it answered 500: \'{"detail": "the model'),
    ("hangs", "took longer than 0.6 s"),
    ("drips", "took longer than 0.6 s"),
    ("dies", "error: ServerError: it answered '[1.0,', no JSON"),
  ],
)
def test_a_server_that_fails_is_a_failure_in_time(score, path, words):
  failure = score(path, {})
  assert words in failure.reason
  assert score.took_s < 15.0  # before a server that hangs answers
  metrics = score.services[path, 0].metrics()
  is_timeout = failure.reason.startswith("timeout")
  assert metrics["reward_service/timeouts"] == is_timeout
  assert metrics["reward_service/errors"] == (not is_timeout)


def test_the_next_attempt_may_succeed(score):
  (reward,) = score("fails_first", {}, num_retries=1)
  assert reward.score == 1.0
  assert len(Handler.asked) == 2


def test_the_server_of_the_documentation_works():
  page = pathlib.Path(__file__).parents[1] / "docs/how-to/rewards.md"
  (program,) = re.findall(
    r'```python\n("""my_server.py.*?)```', page.read_text(), re.DOTALL
  )
  names = {"__name__": "my_server"}
  exec(program, names)
  with http_server.HTTPServer(("127.0.0.1", 0), names["Handler"]) as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
      mine = server_lib.at(f"http://127.0.0.1:{server.server_port}/")
      mine.check(5.0)
      scores = [reward.score for reward in mine.score({}, [COMPLETION] * 2)]
    finally:
      server.shutdown()
      thread.join(10)
  assert scores == [-0.03, -0.03]


def free_port():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    return taken.getsockname()[1]


def checked(url):
  config = sections.Config()
  config.task.rewards = config_dict.ConfigDict({"mine": {"function": url}})
  checks.checked(config, jax.devices())


def test_a_server_that_is_down_is_one_line_before_anything_compiles(address):
  with pytest.raises(sections.ConfigError) as wrong:
    checked(f"http://127.0.0.1:{free_port()}/score")
  line = str(wrong.value)
  assert line.startswith(
    "task.rewards.mine: the reward server http://127.0.0.1"
  )
  assert "Connection refused" in line and "\n" not in line
  with pytest.raises(sections.ConfigError, match="it answered 500: "):
    checked(f"{address}/fails")
  with pytest.raises(sections.ConfigError, match="no list of 0 scores"):
    checked(f"{address}/fails_first")
