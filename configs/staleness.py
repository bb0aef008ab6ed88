"""The runs of benchmarks/staleness.py: a policy that has much left to discover.

The warm start writes nearly every second partial sum wrong, so that few of the
first answers are right. Training has to raise the probability of a right line
several times over, and stale data is then from a policy that is far away.
Completions are short and slots many, so that generation is faster than
training, and trajectories become as old as max_staleness allows.

Variants, after a colon:

    sums       sums of six terms, whose errors add up
    sort       five numbers in order, ascending or descending
    countdown  an expression of three numbers with a given value
    long       sums of 24 terms and small train steps: generation is slower than
               training, and new weights interrupt most completions
"""

import pathlib
import runpy
from typing import Any

from ml_collections import config_dict

from jaxrl_async.config import sections

# By path, because a config file may be loaded from any working directory.
_QUICKSTART = runpy.run_path(
  str(pathlib.Path(__file__).with_name("quickstart.py"))
)
VARIANTS = ("", "sums", "sort", "countdown", "long")


def _sums(fewest: int, most: int, corrupted_frac: float) -> dict[str, Any]:
  """Return a task of sums of one-digit numbers with their partial sums."""
  return {
    "solver": "chain_sum",
    "corrupted_frac": corrupted_frac,
    "template": "{expression}\n",
    "answer_prefix": "=",
    "params": {
      "min_terms": fewest,
      "max_terms": most,
      "min_digits": 1,
      "max_digits": 1,
    },
  }


_SORT = {
  "solver": "number_sorting",
  "corrupted_frac": 0.55,
  # "a 61 33 78 68 18"
  "template": "{direction:.1}"
  + "".join(f" {{original_numbers[{i}]:.2}}" for i in range(5))
  + "\n",
  "answer_prefix": "",
  "params": {
    "min_numbers": 5,
    "max_numbers": 5,
    "min_decimals": 0,
    "max_decimals": 0,
    "min_value": 10,
    "max_value": 99,
  },
}
_COUNTDOWN = {
  "solver": "countdown",
  "corrupted_frac": 0.25,
  # "8 4 7 11"
  "template": "".join(f"{{numbers[{i}]}} " for i in range(3)) + "{target}\n",
  "answer_prefix": "",
  "params": {
    "min_numbers": 3,
    "max_numbers": 3,
    "min_value": 1,
    "max_value": 9,
    "min_target": 1,
    "max_target": 20,
    "operators": ("+", "-"),
  },
}
_TASKS = {
  "": _sums(3, 3, 0.45),
  "sums": _sums(6, 6, 0.25),
  "sort": _SORT,
  "countdown": _COUNTDOWN,
  "long": _sums(24, 24, 0.01),
}
# Most tokens of a prompt, and of a completion.
_LENGTHS = {
  "": (16, 24),
  "sums": (24, 64),
  "sort": (24, 24),
  "countdown": (16, 16),
  "long": (104, 248),
}


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file, or that of one of `VARIANTS`."""
  if variant not in VARIANTS:
    raise sections.ConfigError(
      f"variant: {sections.shown(variant)}; use one of"
      f" {', '.join(VARIANTS[1:])}, or none"
    )
  run: sections.Config = _QUICKSTART["get_config"]()
  run.model.name = "three-layers"
  task = _TASKS[variant]
  run.task.dataset = task["solver"]
  run.task.template = task["template"]
  run.task.answer_prefix = task["answer_prefix"]
  run.task.params = config_dict.ConfigDict(task["params"])
  run.warm_start.solver = task["solver"]
  run.warm_start.num_steps = 1_000
  run.warm_start.decay = 0.1
  run.warm_start.corrupted_frac = task["corrupted_frac"]
  longest_prompt, longest = _LENGTHS[variant]
  cache = longest_prompt + longest
  run.rollout = sections.RolloutSection(
    num_slots=64,
    max_prompt_tokens=longest_prompt,
    max_completion_tokens=longest,
    cache_tokens=cache,
    decode_steps_per_call=7,
    prefill_rows=8,
    prefill_buckets=(longest_prompt, cache),
    window_buckets=(cache,),
  )
  run.algorithm.group_size = 8
  run.algorithm.groups_per_step = 32
  run.algorithm.num_minibatches = 8
  run.train.num_steps = 100 if variant == "sums" else 150
  run.train.optimizer.learning_rate = 2e-4
  run.train.tokens_per_row = max(cache, 48)
  run.train.rows_per_microbatch = 8
  run.eval.every = 30
  run.eval.samples = 4
  run.run.checkpoint_every = 50
  if variant == "long":
    _make_long(run)
  return run


def _make_long(run: sections.Config) -> None:
  """Make train steps shorter than completions, and generation the slower side.

  A step takes 4 trajectories, and 16 are written at a time: while one of them
  is written, training makes about four versions.
  """
  run.warm_start.num_steps = 1_500
  run.warm_start.rows_per_batch = 8
  run.rollout.num_slots = 16
  run.rollout.decode_steps_per_call = 1
  run.algorithm.group_size = 4
  run.algorithm.groups_per_step = 1
  run.algorithm.num_minibatches = 1
  run.train.num_steps = 300
  run.train.rows_per_microbatch = 4
  run.train.optimizer.learning_rate = 1e-4
  # Evaluations of long answers in few slots take long.
  run.eval.num_items = 128
  run.eval.samples = 2
