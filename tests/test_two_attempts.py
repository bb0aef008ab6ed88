"""The environment of docs/how-to/environments.md, as it is printed there."""

import asyncio
import importlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import printed_page
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

ROOT = pathlib.Path(__file__).parents[1]
TOKENIZER = tokenizer_lib.character_level()
PROGRAM = printed_page.programs("how-to/environments.md")["my_environment"]


@pytest.fixture
def program(tmp_path, monkeypatch):
  """The program of the page as a module."""
  (tmp_path / "my_environment.py").write_text(PROGRAM)
  monkeypatch.syspath_prepend(tmp_path)
  sys.modules.pop("my_environment", None)
  yield importlib.import_module("my_environment")
  del sys.modules["my_environment"]


def played(program, turns, most=2):
  """What was shown after the prompt, and the rewards of turns."""

  async def play():
    context = episode_lib.Context(limit=100, tokenizer=TOKENIZER)
    prompt = types.Prompt(
      prompt_id="p", tokens=TOKENIZER.encode("ask\n"), item={"answer": "8"}
    )
    episode = program.attempts(prompt, context, most=most)
    shown = [await anext(episode)]
    for turn in turns:
      written = tiny.turn(TOKENIZER.encode(turn))
      context.wrote(written)
      try:
        shown.append(await episode.asend(written.tokens))
      except StopAsyncIteration:
        break
    rewards = [(event.turn, json.loads(event.text)) for event in context.events]
    return [TOKENIZER.decode(tokens) for tokens in shown[1:]], rewards

  return asyncio.run(play())


def test_the_page_prints_the_config_under_another_name():
  config = (ROOT / "configs" / "two_attempts.py").read_text()
  config = config.replace('"configs.two_attempts"', '"my_environment"')
  code = PROGRAM.partition('"""\n')[2]
  assert code and code == config.partition('"""\n')[2]


def test_a_wrong_answer_is_told_how_the_right_one_ends(program):
  assert played(program, ["=8\n"]) == ([], [(0, 1.0)])
  assert played(program, ["=6\n", "=8\n"]) == (["ends in 8\n"], [(1, 1.0)])
  assert played(program, ["=11\n", "=9\n"]) == (["ends in 8\n"], [])
  assert played(program, ["=6\n"], most=1) == ([], [])
  assert played(program, ["=--\n", "=8\n"]) == ([], [])


def test_the_worked_solutions_have_the_form_of_what_is_played(program):
  rng = np.random.default_rng(0)
  seconds = set()
  for _ in range(50):
    first, *rest = program.tries({"answer": "8"}, rng).splitlines(True)
    shown, rewards = played(program, [first, *rest[1:]])
    assert shown == rest[:1]
    seconds.add((len(rest), bool(rewards)))
  assert seconds == {(0, True), (2, True), (2, False)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  "variant", ["", pytest.param(":one", marks=pytest.mark.nightly)]
)
def test_the_program_trains_as_it_is_printed(tmp_path, variant):
  (tmp_path / "my_environment.py").write_text(PROGRAM)
  ran = subprocess.run(
    [
      sys.executable,
      str(ROOT / "launch" / "train.py"),
      f"--config=my_environment.py{variant}",
      "--workdir=run",
      "--config.warm_start.num_steps=20",
      "--config.train.num_steps=2",
      "--config.algorithm.groups_per_step=8",
      "--config.eval.num_items=16",
    ],
    cwd=tmp_path,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert ran.returncode == 0, ran.stderr[-4000:]
  assert json.loads(ran.stdout.splitlines()[-1])["train_steps"] == 2
  assert len(metrics_lib.by_step(tmp_path / "run")) == 3
  ledger = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
  assert {json.loads(line)["fate"] for line in ledger} <= {
    "trained",
    "filtered",
  }
