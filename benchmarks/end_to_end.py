"""Whole ways from data to an exported policy, on two CPU cores.

    uv run benchmarks/end_to_end.py --task=code --workdir=/tmp/end_to_end
    uv run benchmarks/end_to_end.py --task=gsm8k --data=DIRECTORY \
      --workdir=/tmp/end_to_end

`code` makes a task of small programs, trains a policy on wrong and right
solutions, and improves it by the unit tests in the sandbox
(configs/code_small.py). `gsm8k` fine-tunes a model from nothing on GSM8K,
trains it by reinforcement learning, and evaluates and exports it
(configs/gsm8k_small.py).
DATA holds gsm8k/ and gpt2_tokenizer/.

Each stage is the launch script that a user would start. The last line is JSON:
the seconds of each stage, and what it achieved.
"""

import json
import pathlib
import sys
import time
from typing import Any

from absl import app
from absl import flags
import code_task
import launching

_TASK = flags.DEFINE_enum("task", "code", ["code", "gsm8k"], "Which way to go.")
_DATA = flags.DEFINE_string("data", "../shared/data", "Directory of the data.")
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Directory to write to.", required=True
)
_NUM_STEPS = 5  # train steps at each end that a mean is taken over


def _launch(script: str, *arguments: str) -> tuple[dict[str, Any], float]:
  """Run a launch script; return the JSON of its last line, and its seconds."""
  print(script, *arguments, file=sys.stderr)
  start_s = time.perf_counter()
  found = launching.launch(script, *arguments)
  return found, round(time.perf_counter() - start_s, 1)


def _ends(steps: list[dict[str, Any]], name: str) -> list[float]:
  """Return the mean of a metric over the first and over the last steps."""
  values = [step[name] for step in steps if step.get(name) is not None]
  first, last = values[:_NUM_STEPS], values[-_NUM_STEPS:]
  return [round(sum(x) / len(x), 4) for x in (first, last)]


def _code(workdir: pathlib.Path) -> dict[str, Any]:
  data = workdir / "data"
  counts = code_task.make(data)
  summary, seconds = _launch(
    "train.py",
    f"--config={launching.ROOT / 'configs' / 'code_small.py'}",
    f"--workdir={workdir / 'run'}",
    f"--config.task.dataset=jsonl:{data / 'train.jsonl'}",
    f"--config.task.eval_dataset=jsonl:{data / 'test.jsonl'}",
  )
  steps = launching.metrics(workdir / "run")
  return {
    "questions": counts,
    "pass_rate_before": summary["eval_before"],
    "pass_rate_after": summary["eval_after"],
    "reward_first_last": _ends(steps, "reward/mean"),
    "staleness_max": summary["staleness_max"],
    "train_s": seconds,
  }


def _gsm8k(workdir: pathlib.Path, data: pathlib.Path) -> dict[str, Any]:
  config = f"--config={launching.ROOT / 'configs' / 'gsm8k_small.py'}"
  settings = [
    f"--config.model.tokenizer={data / 'gpt2_tokenizer'}",
    f"--config.task.dataset=jsonl:{data / 'gsm8k' / 'train.jsonl'}",
    f"--config.task.eval_dataset=jsonl:{data / 'gsm8k' / 'test.jsonl'}",
  ]
  sft, sft_s = _launch(
    "sft.py", f"{config}:sft", f"--workdir={workdir / 'sft'}", *settings
  )
  train, train_s = _launch(
    "train.py",
    config,
    f"--workdir={workdir / 'run'}",
    *settings,
    f"--config.warm_start.checkpoint={sft['params']}",
  )
  steps = launching.metrics(workdir / "run")
  found, evaluate_s = _launch(
    "evaluate.py",
    f"--checkpoint={workdir / 'run'}",
    f"--output={workdir / 'evaluation'}",
    f"--dataset=jsonl:{data / 'gsm8k' / 'test.jsonl'}",
    "--num_items=64",
    "--samples=4",
  )
  _, export_s = _launch(
    "export.py",
    f"--checkpoint={workdir / 'run'}",
    f"--output={workdir / 'exported'}",
  )
  return {
    "validation_loss": [sft["validation_loss_before"], sft["validation_loss"]],
    "form_first_last": _ends(steps, "reward/parts/form"),
    "mathematics_first_last": _ends(steps, "reward/parts/mathematics"),
    "accuracy_before_after": [train["eval_before"], train["eval_after"]],
    "pass@4": found["results"]["pass@4"],
    "sft_s": sft_s,
    "train_s": train_s,
    "evaluate_s": evaluate_s,
    "export_s": export_s,
  }


def main(argv: list[str]) -> None:
  """Go the way of the flags."""
  del argv
  workdir = pathlib.Path(_WORKDIR.value).absolute() / _TASK.value
  workdir.mkdir(parents=True, exist_ok=True)
  if _TASK.value == "code":
    result = _code(workdir)
  else:
    result = _gsm8k(workdir, pathlib.Path(_DATA.value).absolute())
  print(json.dumps({"task": _TASK.value, **result}))


if __name__ == "__main__":
  app.run(main)
