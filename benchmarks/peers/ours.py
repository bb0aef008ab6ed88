"""The work of head_to_head.py by this project, on a CPU.

    python benchmarks/peers/ours.py WORK.json [--sync]

The settings are in `_config`. Generation runs beside training, at most
`_MAX_STALENESS` versions behind; with --sync it takes turns with training.
"""

import shared_work  # isort: skip, first: it starts the clock

import contextlib
import importlib.metadata
import json
import math
import os
import pathlib
import signal
import sys
import threading
from typing import Any

if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  # The slices have devices of their own, and do not wait for each other. Two
  # train, because elementwise work uses one core of its device.
  os.environ.setdefault("JAX_NUM_CPU_DEVICES", "3")
  os.environ.setdefault("JAX_CPU_ENABLE_ASYNC_DISPATCH", "false")

import compilations
from ml_collections import config_dict

import jaxrl_async
from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib

_TRAIN_DEVICES = 2
_MAX_STALENESS = 2
_POLL_S = 0.02


def _engine(shape: shared_work.Case) -> sections.RolloutSection:
  prompt, completion = shape.max_prompt_tokens, shape.max_completion_tokens
  whole = prompt + completion
  windows = [size for size in (160, 288) if size < whole]
  return sections.RolloutSection(
    num_slots=32,
    max_prompt_tokens=prompt,
    max_completion_tokens=completion,
    cache_tokens=whole,
    decode_steps_per_call=8,
    prefill_rows=8,
    prefill_buckets=(prompt, *windows[:1], whole),
    window_buckets=(*windows, whole),
  )


def _config(work: shared_work.Work, *, is_sync: bool) -> sections.Config:
  """Return the run; the settings of the algorithm are the same for all."""
  shape = work.shape
  row = shape.max_prompt_tokens + shape.max_completion_tokens
  return sections.Config(
    seed=work.seed,
    model=sections.ModelSection(name=work.policy, remat=sections.Remat.DOTS),
    task=sections.TaskSection(
      params=config_dict.ConfigDict(), template="{question}", answer_prefix=""
    ),
    mesh=sections.MeshSection(train_data=_TRAIN_DEVICES),
    rollout=_engine(shape),
    algorithm=sections.AlgorithmSection(
      max_staleness=0 if is_sync else _MAX_STALENESS,
      group_size=shape.group_size,
      groups_per_step=shape.prompts_per_step,
      num_minibatches=1,
      # One update a step makes the proximal logprobs those of the update.
      proximal=sections.ProximalMode.REUSE,
    ),
    train=sections.TrainSection(
      num_steps=work.num_steps,
      tokens_per_row=row,
      # About a thousand tokens; a power of two divides the completions.
      rows_per_microbatch=max(_TRAIN_DEVICES, 2 ** int(math.log2(1_024 / row))),
      optimizer=sections.OptimizerSection(
        learning_rate=shape.learning_rate,
        warmup_steps=shape.warmup_steps,
        b1=0.9,
        b2=0.99,
        max_grad_norm=1.0,
      ),
    ),
    transfer=sections.TransferSection(channel=sections.Channel.DIRECT),
    eval=sections.EvalSection(
      num_items=max(1, len(work.held_out)), every=work.eval_every
    ),
    run=sections.RunSection(checkpoint_every=100_000, sample_groups=0),
  )


class Follower:
  """Records the lines that a run adds to its metrics.jsonl.

  At the target it ends the run, as a user would: by a signal.
  """

  def __init__(self, work: shared_work.Work, path: pathlib.Path):
    self._recorder = shared_work.Recorder(work)
    self._work = work
    self._path = path
    self._num_read = 0
    self._is_reached = False
    self._is_ending = threading.Event()
    self._thread = threading.Thread(target=self._follow)

  def __enter__(self) -> shared_work.Recorder:
    self._thread.start()
    return self._recorder

  def __exit__(self, *_: object) -> None:
    self._is_ending.set()
    self._thread.join()

  def _follow(self) -> None:
    while not self._is_ending.wait(_POLL_S):
      self._read()
    self._read()

  def _read(self) -> None:
    if not self._path.exists():
      return
    *lines, _ = self._path.read_text().split("\n")  # the last one is not whole
    for line in lines[self._num_read :]:
      self._record(json.loads(line))
    self._num_read = len(lines)

  def _record(self, line: dict[str, Any]) -> None:
    if "time/step_s" in line:
      step_s = line["time/step_s"]
      self._recorder.step(
        tokens=round(line["train/tokens_per_s"] * step_s),
        longest_tokens=line["completion/tokens_max"],
        num_completions=sum(line["completion/tokens_histogram"]["counts"]),
        reward=line["reward/mean"],
        step_s=step_s,
        train_s=line["train/busy_frac"] * step_s,
        rollout_s=line["rollout/busy_frac"] * step_s,
      )
    if "eval/held_out/avg@1" in line:
      accuracy = line["eval/held_out/avg@1"]
      self._recorder.evaluation(accuracy, 0.0)
      is_last = line["step"] == self._work.num_steps
      if self._work.shape.target and not self._is_reached and not is_last:
        self._is_reached = accuracy >= self._work.shape.target
        if self._is_reached:
          os.kill(os.getpid(), signal.SIGTERM)


def _rows(
  questions: list[shared_work.Question], reward_ms: float
) -> list[dict[str, Any]]:
  return [
    {"question": q.prompt, "answer": q.answer, "reward_ms": reward_ms}
    for q in questions
  ]


def main(path: str, *options: str) -> None:
  """Train."""
  work = shared_work.read(path)
  is_sync = "--sync" in options
  config = _config(work, is_sync=is_sync)
  workdir = pathlib.Path(work.directory) / "run"
  held_out = work.held_out or shared_work.questions(work.case, 1, -1)
  counted = compilations.Compilations()
  with (
    Follower(work, workdir / "metrics.jsonl") as recorder,
    contextlib.suppress(supervisor_lib.Interrupted),
  ):
    jaxrl_async.train(
      config,
      workdir,
      reward=shared_work.score_item,
      dataset=_rows(work.questions, work.reward_ms),
      eval_dataset=_rows(held_out, 0.0),
    )
  staleness = "sync" if is_sync else f"max_staleness {_MAX_STALENESS}"
  recorder.end(
    settings=(
      f"{staleness}, {config.rollout.num_slots} slots, packed rows, one update"
      " a step, proximal=reuse, weights in memory, remat=dots, two CPU devices"
      " that train"
    ),
    versions=", ".join(
      f"{n} {importlib.metadata.version(n)}" for n in ("jaxrl_async", "jax")
    ),
    num_compilations=counted.count,
  )


if __name__ == "__main__":
  main(*sys.argv[1:])
