"""The models of benchmarks/papers.py in its own process: answers and scores.

Each of these functions loads what it needs from the files of a stage. They use
what the launch scripts do, which would start a process for each.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import pathlib
import threading
from typing import Any

import numpy as np
import paper_sums

from jaxrl_async import types
from jaxrl_async.config import sections

# Slow imports are made where they are used: the processes that score import
# this module too, and need none of them.


def use_compile_cache(directory: pathlib.Path) -> None:
  """Keep XLA's compiled programs in a directory."""
  import jax

  jax.config.update("jax_compilation_cache_dir", str(directory))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def write_answers(
  output: pathlib.Path,
  *,
  checkpoint: str,
  step: int | None,
  questions: str,
  num_questions: int,
  samples: int,
  temperature: float,
  longest: int = 0,
  budgets: Mapping[str, Any] | None = None,
) -> None:
  """Write a policy's answers to `output`, as `launch/evaluate.py` does.

  Args:
    output: directory of the answers.
    checkpoint: of the policy.
    step: of a run's checkpoint.
    questions: file with a question in each line.
    num_questions: how many are asked.
    samples: answers to each.
    temperature: 0 for greedy answers.
    longest: the most tokens of an answer; 0 is as in the policy's config.
    budgets: parameters of `config.budgets`, at which answers are forced too.
  """
  import jax
  from ml_collections import config_dict

  from jaxrl_async.evaluation import evaluation
  from jaxrl_async.policies import stored_policy
  from jaxrl_async.processes import supervisor as supervisor_lib
  from jaxrl_async.reporting import progress as progress_lib

  config = stored_policy.find(checkpoint, step).config
  # Answers are judged alike, whatever a policy was rewarded for.
  config.task.rewards = config_dict.ConfigDict()
  config.task.reward = "exact"
  config.eval.temperature = temperature
  if longest:
    config.rollout.max_completion_tokens = longest
  with progress_lib.Progress(0) as progress:
    evaluation.evaluate(
      checkpoint,
      step,
      config,
      evaluation.Wanted(
        dataset=f"jsonl:{questions}",
        samples=samples,
        num_items=num_questions,
        given=("task.reward",),
        budgets=budgets or {},
      ),
      output,
      jax.devices(),
      progress=progress,
      stop=supervisor_lib.StopRequest(),
    )


def divergence(
  checkpoint: str,
  step: int | None,
  reference: str,
  answers: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  """Estimate KL(policy || reference) of a completion, in nats.

  It is the mean of log pi(y) - log pi_ref(y) over answers that the policy drew
  at temperature 1, summed over their tokens, the end token included.

  Returns:
    `kl`, and `kl_error`, its standard error over the answers.
  """
  import jaxrl_async
  from jaxrl_async.policies import policy as policy_lib

  policies = [
    jaxrl_async.load(checkpoint, step=step),
    jaxrl_async.load(reference),
  ]
  tokenizer = policies[0].tokenizer
  pairs = []
  for answer in answers:
    tokens = tokenizer.encode(answer["completion"])
    if answer["finish_reason"] == "eos":
      tokens = np.append(tokens, np.int32(tokenizer.eos_id))
    # Special tokens are not in the text, and drawn by hardly any policy.
    if len(tokens) == answer["num_tokens"]:
      completion = policy_lib.Completion(
        text=answer["completion"],
        tokens=tokens,
        logprobs=np.zeros(len(tokens), np.float32),
        finish_reason=types.FinishReason(answer["finish_reason"]),
      )
      pairs.append((answer["prompt"], completion))
  if not pairs:
    return {"kl": None, "kl_error": None}
  own, others = (
    [float(x.sum()) for x in policy.logprobs(pairs)] for policy in policies
  )
  ratios = np.subtract(own, others)
  return {
    "kl": float(ratios.mean()),
    "kl_error": float(ratios.std() / np.sqrt(len(ratios))),
  }


def step_scores(
  workdir: pathlib.Path, rows: Sequence[Mapping[str, Any]]
) -> list[np.ndarray]:
  """Return what a model of steps says of each step of some solutions.

  Args:
    workdir: of the model, which gets a file of the rows.
    rows: with the columns question, answer and steps, a list of lines.
  """
  from jaxrl_async.supervised import reward_model

  path = workdir / "to_score.jsonl"
  paper_sums.write_rows(path, [dict(row) for row in rows])
  found = reward_model.scores(_config_of(workdir), workdir, f"jsonl:{path}")
  return [np.array(line["steps"]) for line in found]


def _config_of(workdir: pathlib.Path) -> sections.Config:
  """Return the config of a reward model."""
  from jaxrl_async.storage import config_json

  config = config_json.read(workdir)
  assert config is not None, f"{workdir} has no config"
  return config


@contextlib.contextmanager
def served(workdir: pathlib.Path, port: int) -> Iterator[None]:
  """Serve a reward model on the devices of this process.

  A server in a process of its own would outlive this one, were it killed.
  """
  from jaxrl_async.processes import supervisor as supervisor_lib
  from jaxrl_async.supervised import reward_server

  config = _config_of(workdir)
  stop, ready = supervisor_lib.StopRequest(), threading.Event()
  thread = threading.Thread(
    target=reward_server.serve,
    args=(config, workdir),
    kwargs={"port": port, "stop": stop, "on_ready": lambda _: ready.set()},
  )
  thread.start()
  try:
    while not ready.wait(0.2):
      if not thread.is_alive():
        raise RuntimeError(f"{workdir} is not served on port {port}")
    yield
  finally:
    stop.set()
    thread.join()
