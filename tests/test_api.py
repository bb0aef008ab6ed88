"""The interface for scripts, and the program of docs/reference/python.md."""

import json
import os
import pathlib
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import stored_run
import tiny

import jaxrl_async
from jaxrl_async.config import sections
from jaxrl_async.devices import xla_flags
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import importable
from jaxrl_async.run import train as train_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.types import FinishReason

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs/reference/python.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  workdir = stored_run.write(tmp_path_factory.mktemp("api") / "run")
  return jaxrl_async.load(workdir, num_slots=8)


def test_the_readme_has_the_same_program():
  readme = (ROOT / "README.md").read_text()
  assert re.findall(r"```python\n(.*?)```", readme, re.DOTALL) == [PROGRAM]


def test_the_program_is_short():
  lines = [line for line in PROGRAM.splitlines() if line.strip()]
  assert len(lines) <= 10


@pytest.mark.slow
@pytest.mark.nightly  # test_extending.py runs a program of a page
@pytest.mark.timeout(600)
def test_the_program_runs_as_it_is_printed(tmp_path):
  path = tmp_path / "my_sums.py"
  path.write_text(PROGRAM.replace("/tmp/sums", str(tmp_path / "sums")))
  (line,) = re.findall(r"^    export (.*)$", PAGE, re.MULTILINE)
  on_a_cpu = dict(setting.split("=") for setting in line.split())
  ran = subprocess.run(
    [sys.executable, str(path)],
    env={**os.environ, **on_a_cpu, "PYTHONPATH": str(ROOT)},
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert ran.returncode == 0, ran.stderr[-4000:]
  texts = eval(ran.stdout.splitlines()[-1])
  assert len(texts) == 2 and all(type(text) is str for text in texts)
  ledger = (tmp_path / "sums" / "ledger.jsonl").read_text().splitlines()
  assert "dataset/train/" in ledger[0]


def test_importing_the_package_does_not_import_jax():
  code = "import sys, jaxrl_async; print('jax' in sys.modules)"
  ran = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
  )
  assert ran.stdout == "False\n"
  with pytest.raises(AttributeError, match="no attribute 'lod'"):
    jaxrl_async.lod  # noqa: B018


SETS_FLAGS = """
import os

import jaxrl_async
from jaxrl_async.devices import xla_flags

jaxrl_async.train
import jax

flag = xla_flags.OWN_PRODUCTS
early = xla_flags.use(""), xla_flags.use(flag), xla_flags.use(flag)
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=3"
flags = xla_flags.current()
assert len(jax.devices()) == 3  # XLA has read them only now
os.environ["XLA_FLAGS"] = ""
print(early, xla_flags.use(""), xla_flags.use(flag), flags.split())
"""


def test_the_flag_of_exact_runs_is_set_while_xla_has_not_read_them():
  ran = subprocess.run(
    [sys.executable, "-c", SETS_FLAGS],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
  )
  flags = [
    "--xla_cpu_experimental_ynn_fusion_type=",
    "--xla_force_host_platform_device_count=3",
  ]
  assert ran.stdout == f"(True, True, True) True False {flags}\n", ran.stderr


@pytest.mark.parametrize(
  ("processor", "flag", "has_bfloat16"),
  [
    ("flags : fpu avx2 avx512f avx512bw", xla_flags.OWN_PRODUCTS, False),
    ("flags : avx512f avx512_bf16", xla_flags.OWN_PRODUCTS, True),
    ("flags : fpu avx avx2 fma", "", False),
    (None, "", False),
  ],
)
def test_what_depends_on_the_processor(
  tmp_path, monkeypatch, processor, flag, has_bfloat16
):
  path = tmp_path / "cpuinfo"
  if processor is not None:
    path.write_text(processor)
  monkeypatch.setattr(xla_flags, "_PROCESSOR", path)
  assert xla_flags.of_same_bits() == flag
  assert xla_flags.has_bfloat16() == has_bfloat16


@pytest.mark.parametrize(
  ("platforms", "has_driver", "has_gpus"),
  [
    ("", True, True),
    ("", False, False),
    ("cpu", True, False),
    ("cuda,cpu", False, True),
    ("tpu", True, False),
  ],
)
def test_the_flag_for_gpus_is_set_where_jax_will_use_them(
  tmp_path, monkeypatch, platforms, has_driver, has_gpus
):
  driver = tmp_path / "version"
  if has_driver:
    driver.touch()
  monkeypatch.setattr(xla_flags, "_GPU_DRIVER", driver)
  monkeypatch.setenv("JAX_PLATFORMS", platforms)
  monkeypatch.setenv("XLA_FLAGS", "")
  flag = "--xla_gpu_enable_pipelined_all_reduce"
  assert xla_flags.of_gpus() == (f"{flag}=true" if has_gpus else "")
  monkeypatch.setenv("XLA_FLAGS", f"{flag}=false")
  assert xla_flags.of_gpus() == ""


LAUNCHED = """
import os, sys

sys.path.append("launch")
import command_line

assert "jax" not in sys.modules
print(os.environ["XLA_FLAGS"])
os.environ["JAX_PLATFORMS"] = "cpu"
import jax

jax.devices()
"""


def test_a_launch_script_sets_a_flag_for_gpus_that_this_xla_knows():
  ran = subprocess.run(
    [sys.executable, "-c", LAUNCHED],
    capture_output=True,
    text=True,
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cuda", "XLA_FLAGS": ""},
  )
  # XLA ends a process whose flags it does not know.
  assert ran.returncode == 0, ran.stderr
  assert "--xla_gpu_enable_pipelined_all_reduce=true" in ran.stdout


@pytest.mark.slow
def test_a_policy_generates_what_it_says_and_stops_where_it_should(policy):
  assert policy.version == 5
  found = policy.generate(["1+2\n", "45\n"], max_tokens=12, n=3, seed=4)
  assert len(found) == 6
  assert len({c.text for c in found}) > 4
  for completion in found:
    assert len(completion.tokens) == len(completion.logprobs) <= 12
    assert policy.tokenizer.decode(completion.tokens) == completion.text
  again = policy.generate(["1+2\n", "45\n"], max_tokens=12, n=3, seed=4)
  assert [c.text for c in again] == [c.text for c in found]
  other = policy.generate(["1+2\n", "45\n"], max_tokens=12, n=3, seed=5)
  assert [c.text for c in other] != [c.text for c in found]
  whole = next(c for c in found if len(c.text) == 12)
  i = found.index(whole)
  stop = whole.text[4:6]
  stopped = policy.generate(
    ["1+2\n", "45\n"], max_tokens=12, n=3, seed=4, stop=stop
  )[i]
  assert stopped.text == whole.text[: whole.text.index(stop)]
  assert stopped.finish_reason is FinishReason.STOP
  assert stopped.tokens.tolist() == whole.tokens[: len(stopped.tokens)].tolist()
  # Without a template a chat is its only message and a newline.
  chat = [{"role": "user", "content": "1+2"}]
  (from_chat,) = policy.generate(chat, max_tokens=12, seed=4)
  assert from_chat.text == found[0].text
  # Longer than the run's sequences: another engine.
  (long,) = policy.generate("1+2\n", max_tokens=60, seed=4)
  assert long.text.startswith(found[0].text)
  with pytest.raises(ValueError, match="max_tokens: 0 is out of range"):
    policy.generate("1", max_tokens=0)
  with pytest.raises(ValueError, match="stop: one of"):
    policy.generate("1", stop="")


@pytest.mark.slow
def test_logprobs_are_those_of_the_trainers_forward_pass(policy):
  tokenizer = tokenizer_lib.character_level()
  texts = ["1+2=3", "99", "a longer text than the others"]
  found = policy.logprobs(texts)
  tokens = [tokenizer.encode_prompt(text) for text in texts]
  expected = tiny.trainer_logprobs(
    stored_run.params(5), tokens, model=stored_run.MODEL
  )
  for values, whole in zip(found, expected, strict=True):
    np.testing.assert_allclose(values, whole[1:], atol=1e-5)
  (of_pair,) = policy.logprobs([("1+2", "=3")])
  np.testing.assert_allclose(of_pair, found[0][2:], atol=1e-6)
  (written,) = policy.generate("1+2\n", max_tokens=12, seed=1)
  (again,) = policy.logprobs([("1+2\n", written)])
  np.testing.assert_allclose(again, written.logprobs, atol=1e-5)
  assert policy.logprobs([]) == []
  with pytest.raises(ValueError, match="has no token that follows"):
    policy.logprobs(["1"])


# -- train ------------------------------------------------------------------


class Reached(Exception):
  """The run would begin now."""


@pytest.fixture
def begun(monkeypatch):
  """What `train` hands to the run, instead of a run."""
  seen = {}

  def run(config, workdir, **parts):
    seen.update(config=config, workdir=workdir, **parts)
    return json.dumps({"train_steps": 0})

  monkeypatch.setattr(train_lib, "run", run)
  return seen


def scored(item, completion):
  return 1.0


def test_what_a_script_has_at_hand_becomes_a_run(begun, tmp_path):
  rows = [{"question": "1+1", "answer": "2"}, {"question": "2", "answer": "2"}]
  config = stored_run.get_config()
  summary = jaxrl_async.train(
    config,
    tmp_path / "run",
    reward=scored,
    dataset=rows,
    eval_dataset=rows[:1],
    settings={"train.num_steps": 9, "task.on_bad_row": "skip"},
  )
  assert summary == {"train_steps": 0} and begun["scorer"] is scored
  task = begun["config"].task
  assert task.on_bad_row is sections.OnBadRow.SKIP
  assert begun["xla_flags"] == os.environ["XLA_FLAGS"]
  assert begun["config"].train.num_steps == 9 != config.train.num_steps
  path = pathlib.Path(task.dataset.removeprefix("jsonl:"))
  lines = path.read_text().splitlines()
  assert [json.loads(line) for line in lines] == rows
  assert task.eval_dataset == f"jsonl:{tmp_path / 'run'}/eval_dataset.jsonl"
  # The same rows go on, others do not.
  jaxrl_async.train(config, tmp_path / "run", dataset=rows)
  assert begun["config"].task.eval_dataset == ""
  with pytest.raises(sections.ConfigError, match="dataset: .*other rows"):
    jaxrl_async.train(config, tmp_path / "run", dataset=rows[1:])
  with pytest.raises(sections.ConfigError, match="dataset: row 0 is no dict"):
    jaxrl_async.train(config, tmp_path / "b", dataset=[{"question": object()}])
  with pytest.raises(
    sections.ConfigError,
    match="mean train.num_steps",
  ):
    jaxrl_async.train(config, tmp_path, settings={"train.steps": 1})
  with pytest.raises(sections.ConfigError, match="config: .*No such file"):
    jaxrl_async.train(tmp_path / "none.py", tmp_path)
  jaxrl_async.train(
    f"{ROOT}/configs/tiny.py:sync", tmp_path, dataset="leg_counting"
  )
  assert begun["config"].algorithm.max_staleness == 0
  assert begun["config"].task.dataset == "leg_counting"


def test_a_reward_that_no_other_process_can_import_is_refused(begun, tmp_path):
  for reward in (lambda item, completion: 0.0, [].append, Reached):
    with pytest.raises(sections.ConfigError, match="reward: .*define it with"):
      jaxrl_async.train(stored_run.get_config(), tmp_path, reward=reward)


SCRIPT = """
from jaxrl_async.rewards import importable

def reward(item, completion):
  return 1.0
"""


@pytest.mark.parametrize(
  ("name", "end", "printed"),
  [
    ("my_script.py", "if __name__ == '__main__':\n  ", "my_script"),
    ("my-script.py", "", "is that of a module"),
    ("pathlib.py", "", "is that of another module"),
    ("bare.py", "importable.check_main_script()\n", '__name__ == "__main__":'),
  ],
)
def test_a_reward_of_the_main_script_is_imported_from_it(
  tmp_path, name, end, printed
):
  found = "print(importable.function(reward).__module__)\n"
  (tmp_path / name).write_text(SCRIPT + end + found)
  ran = subprocess.run(
    [sys.executable, "-P", str(tmp_path / name)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert printed in (ran.stdout + ran.stderr).splitlines()[-1]


# Cells of a notebook: a program without a file, in an event loop.
CELLS = """
import asyncio, pickle, sys, threading
from jaxrl_async import types
from jaxrl_async.rewards import importable

BONUS = 0.5
LOCK = threading.Lock()

def helper(text):
  return len(text)

def reward(item, completion):
  return types.Reward(score=BONUS * helper(completion))

def locked(item, completion):
  return LOCK.locked()
"""
SENT = """
made = importable.function(reward)
BONUS = 1.0
sys.stdout.buffer.write(pickle.dumps(made))
"""
REFUSED = "importable.function(locked)\n"
TRAINS = """
async def cell():
  import jaxrl_async

  return jaxrl_async.train(
    "{config}", "{workdir}", reward=scored, settings={settings}
  )

def scored(item, completion):
  return types.Reward(score=BONUS / 2, parts={{"of_cell": BONUS}})

print(asyncio.run(cell())["train_steps"])
"""


def run_cells(code, **options):
  return subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    **options,
  )


def test_a_reward_of_a_notebook_takes_its_variables_with_it():
  ran = run_cells(CELLS + SENT)
  assert ran.returncode == 0, ran.stderr
  function = pickle.loads(ran.stdout)
  assert function({}, "four").score == 2.0
  assert not isinstance(function, importable.OfNotebook)


def test_a_reward_of_a_notebook_that_cannot_be_sent_is_refused():
  ran = run_cells(CELLS + REFUSED)
  assert (
    b"ValueError: locked reads a variable that cannot be sent" in ran.stderr
  )


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_a_run_takes_a_reward_of_a_notebook(tmp_path):
  settings = {"warm_start.num_steps": 2, "train.num_steps": 1}
  code = TRAINS.format(
    settings=settings, config=ROOT / "configs/tiny.py", workdir=tmp_path / "run"
  )
  ran = run_cells(CELLS + code, timeout=1_800)
  assert ran.returncode == 0, ran.stderr.decode()[-4000:]
  assert ran.stdout.split()[-1] == b"1"
  step = metrics_lib.by_step(tmp_path / "run")[-1]
  assert step["reward/mean"] == 0.25
  assert step["reward/parts/of_cell"] == 0.5


def test_a_script_without_a_guard_is_told_about_it(monkeypatch, tmp_path):
  monkeypatch.setattr(importable, "_importing", {"my_script"})
  with pytest.raises(sections.ConfigError, match='if __name__ == "__main__"'):
    jaxrl_async.train(stored_run.get_config(), tmp_path)
