"""The workload of benchmarks/async_vs_sync.py: lengths with a long tail.

    python benchmarks/async_vs_sync.py

A policy of three layers on sums of 2 to 64 terms. There are many short ones
and few long ones, so that the longest completion of a batch has six to nine
times as many tokens as the mean: lengths are nearly lognormal. Generation in
full slots takes about twice as long as training.

The settings are those that were fastest for both ways of training, see
docs/project/notebook.md. The benchmark starts this run on two CPU devices, with
a warm start that all variants share. `sync`, after a colon, is the same run
with max_staleness=0.
"""

import pathlib
import runpy

from ml_collections import config_dict

from jaxrl_async.config import sections

# By path, because a config file may be loaded from any working directory.
_QUICKSTART = runpy.run_path(
  str(pathlib.Path(__file__).with_name("quickstart.py"))
)
# Fewest and most terms, and how many of 16 sums have as many.
_TERMS = {
  "short": (2, 3, 10),
  "middling": (5, 8, 4),
  "long": (12, 20, 1),
  "longest": (48, 64, 1),
}


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are "" and "sync"."""
  run: sections.Config = _QUICKSTART["get_config"](variant)
  run.model.name = "three-layers"
  run.task.dataset, run.task.params = "", config_dict.ConfigDict()
  run.task.sources = config_dict.ConfigDict(
    {
      name: {
        "dataset": "reasoning_gym:chain_sum",
        "params": {
          "min_terms": fewest,
          "max_terms": most,
          "min_digits": 1,
          "max_digits": 1,
        },
        "weight": float(weight),
      }
      for name, (fewest, most, weight) in _TERMS.items()
    }
  )
  run.warm_start.num_steps = 600
  run.warm_start.rows_per_batch = 4
  run.warm_start.corrupted_frac = 0.05
  run.rollout = sections.RolloutSection(
    num_slots=32,
    max_prompt_tokens=256,
    max_completion_tokens=704,
    cache_tokens=960,
    decode_steps_per_call=16,
    prefill_rows=4,
    prefill_buckets=(16, 64, 256, 960),
    # A call covers the window of its longest sequence, so many of them help.
    window_buckets=(64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 960),
    kv_on_adopt=sections.KvOnAdopt.KEEP,
  )
  run.algorithm.groups_per_step = 16
  # With one update a step, the proximal logprobs are those of training.
  run.algorithm.num_minibatches = 1
  run.algorithm.proximal = sections.ProximalMode.REUSE
  run.train.num_steps = 40
  # With a constant rate the program is the same for any number of steps.
  run.train.decay = 1.0
  run.train.optimizer = sections.OptimizerSection(
    name=sections.OptimizerName.ADAMW, learning_rate=1e-5, warmup_steps=4
  )
  run.train.tokens_per_row = 960
  run.train.rows_per_microbatch = 1
  run.train.attention = "blocks"
  # Only training and generation run between the first step and the last.
  run.eval.every = 0
  run.run.checkpoint_every = 1_000
  return run
