"""A trained reward model as a reward server, and as the reward of a run."""

from concurrent import futures
import contextlib
import copy
import functools
import http.client
import json
import pathlib
import queue
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow.parquet
import pytest
import test_prefer
import test_reward_model
import test_run

from jaxrl_async import types
from jaxrl_async.algorithms import step_rewards
from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.run import train as train_lib
from jaxrl_async.supervised import reward_model
from jaxrl_async.supervised import reward_server

start = test_prefer.start  # a fixture
ROOT = pathlib.Path(__file__).parents[1]
CONFIG = """
import pathlib
from jaxrl_async.storage import config_json

def get_config():
  return config_json.read(pathlib.Path({workdir!r}))
"""


def script(tmp_path, workdir, *flags, **fields):
  path = tmp_path / "served.py"
  path.write_text(CONFIG.format(workdir=str(workdir)))
  return [
    sys.executable,
    str(ROOT / "launch" / "reward_model.py"),
    f"--config={path}",
    *(f"--config.{name}={value}" for name, value in fields.items()),
    f"--workdir={workdir}",
    *flags,
  ]


def completion(text, num_turns=1, tokens=None):
  turn = types.Turn(prompt="", completion=text, num_tokens=len(text))
  return types.Completion(
    text=text,
    turns=(turn,) * num_turns,
    tokens=np.zeros(len(text), np.int32) if tokens is None else tokens,
    finish_reason=types.FinishReason.EOS,
  )


def item(question):
  return {"index": 3, "source": "any", "question": question, "answer": ""}


def direct(config, workdir, path, rows):
  """The model's scores of these prompts and completions, without a server."""
  named = [{"prompt": p, "completion": c} for p, c in rows]
  path.write_text("".join(json.dumps(row) + "\n" for row in named))
  found = reward_model.scores(config, workdir, f"jsonl:{path}")
  return [line["score"] for line in found]


def check_refusals(address):
  server = server_lib.at(address)
  for given, words in (
    ((item("1+1"), [completion("yes " * 40)]), "422.*train.tokens_per_row"),
    ((item("1+1"), [completion("yes", 2)]), "422.*several turns"),
    ((item("1+1"), [completion("ö")]), "422.*alphabet"),
    (({}, [completion("yes")]), "422.*no .*index"),
  ):
    with pytest.raises(server_lib.ServerError, match=words):
      server.score(*given, timeout_s=60.0)
  host = address.removeprefix("http://").rstrip("/")
  for body, status in (("[1]", 400), ("{", 400), ('{"item": {}}', 400)):
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", "/", body)
    assert connection.getresponse().status == status
    connection.close()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_run_learns_from_the_scores_of_a_served_model(tmp_path, start):
  config = test_reward_model.make_config(tmp_path, start, num_steps=6)
  workdir = tmp_path / "model"
  reward_model.train(config, workdir)
  rows = [(f"{a}+{b}", f"yes {a}") for a in range(9) for b in range(4)]
  expected = direct(config, workdir, tmp_path / "rows.jsonl", rows)
  assert len(set(expected)) > 20
  process = subprocess.Popen(
    script(tmp_path, workdir, "--port=0"),
    stdout=subprocess.PIPE,
    text=True,
    cwd=tmp_path,
  )
  assert process.stdout is not None
  try:
    address = process.stdout.readline().split()[-1]
    server = server_lib.at(address)
    server.check(60.0)
    # Groups of many threads at once, each with its own scores.
    with futures.ThreadPoolExecutor(9) as pool:
      found = pool.map(
        lambda i: server.score(
          item(rows[i][0]), [completion(rows[i][1])] * 2, timeout_s=120.0
        ),
        range(len(rows)),
      )
    for rewards, score in zip(found, expected, strict=True):
      assert [x.score for x in rewards] == pytest.approx([score] * 2, abs=1e-5)
    check_refusals(address)

    run = test_run.make_config(num_steps=3, eval={"num_items": 2})
    run.model.name = config.model.name
    run.task = copy.deepcopy(config.task)
    run.task.reward = address
    summary = json.loads(train_lib.run(run, tmp_path / "run"))
    assert summary["train_steps"] == 3
    (line, *_) = test_run.lines(tmp_path / "run", "metrics")[1:]
    assert line["reward_service/errors"] == 0
  finally:
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()
  samples = [
    row
    for path in sorted((tmp_path / "run" / "samples").glob("*.parquet"))
    for row in pyarrow.parquet.read_table(path).to_pylist()
  ]
  scored = [row for row in samples if row["fate"] == "trained"]
  assert len(scored) > 10
  rows = [(x["prompt"].removesuffix("\n"), x["completion"]) for x in scored]
  expected = direct(config, workdir, tmp_path / "rows.jsonl", rows)
  assert [x["reward"] for x in scored] == pytest.approx(expected, abs=1e-4)
  assert len(set(expected)) > 5


def test_what_cannot_be_served_is_refused_in_one_line(tmp_path, start):
  config = test_reward_model.make_config(tmp_path, start)
  serve = functools.partial(
    reward_server.serve,
    port=0,
    stop=supervisor_lib.StopRequest(),
    on_ready=lambda address: None,
  )
  with pytest.raises(sections.ConfigError, match="^workdir: .*no reward model"):
    serve(config, tmp_path / "new")


@contextlib.contextmanager
def served(config, workdir):
  """The address of a server in a thread."""
  stop, ready = supervisor_lib.StopRequest(), queue.SimpleQueue()
  thread = threading.Thread(
    target=reward_server.serve,
    args=(config, workdir),
    kwargs={"port": 0, "stop": stop, "on_ready": ready.put},
  )
  thread.start()
  try:
    yield ready.get(timeout=120)
  finally:
    stop.set()
    thread.join(60)


@pytest.mark.slow
def test_a_model_of_steps_pays_for_steps_of_the_policys_own_tokens(
  tmp_path, start
):
  config = test_reward_model.make_config(tmp_path, start, num_steps=20)
  config.preference.reward_loss = sections.RewardLoss.STEPS
  rows = test_reward_model.steps()
  path = tmp_path / "steps.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config.task.dataset = f"jsonl:{path}"
  reward_model.train(config, tmp_path / "model")
  # What the model says of the same steps in a file.
  direct_of = {
    line["row"]: line["steps"]
    for line in reward_model.scores(config, tmp_path / "model", f"jsonl:{path}")
  }
  tokenizer = test_reward_model.TOKENIZER
  text = "a\nbb\nccc"
  tokens = np.append(tokenizer.encode(text), np.int32(tokenizer.eos_id))
  given = completion(text, tokens=tokens)
  nothing = completion("", tokens=tokens[-1:])
  with served(config, tmp_path / "model") as address:
    assert address.endswith("?reward=outcome")
    base = address.partition("?")[0]

    def of(query, *completions):
      server = server_lib.at(base + query)
      return server.score(item("7+1"), completions, timeout_s=60.0)

    expected = np.array(direct_of[7])
    assert np.ptp(expected) > 0.3
    process, empty = of("?reward=process", given, nothing)
    found = process.token_scores
    assert [*found] == [1, 4, 8]  # the last is the end of sequence
    assert [*found.values()] == pytest.approx(expected, abs=1e-5)
    assert process.score == 0 and process.parts["steps"] == 3
    assert process.parts["sum"] == pytest.approx(expected.sum(), abs=1e-5)
    assert 0 < process.parts["updates"] <= 20
    assert empty.score == 0 and empty.token_scores == {}
    outcome, empty = of("?reward=outcome", given, nothing)
    assert outcome.score == pytest.approx(expected[-1], abs=1e-5)
    assert outcome.token_scores is None and empty.score == 0
    (clipped,) = of("?reward=clip_delta&threshold=0.5", given)
    wanted = step_rewards.shaped(expected, shape="clip_delta", threshold=0.5)
    assert [*clipped.token_scores.values()] == pytest.approx(wanted, abs=1e-5)
    for query, words in (
      ("", "400.*use one of outcome, process"),
      ("?reward=delta&threshold=0.5", "400.*clip and clip_delta"),
      ("?reward=clip", "400.*clip and clip_delta take a threshold"),
      ("?reward=clip&threshold=nan", "400.*finite"),
      ("?reward=clip&eta=0.5", "400.*eta.*not known"),
    ):
      server = server_lib.at(base + query)
      with pytest.raises(server_lib.ServerError, match=words):
        server.check(60.0)
    with pytest.raises(server_lib.ServerError, match="422.*own"):
      of("?reward=process", completion(text))
