"""The workload of benchmarks/async_vs_sync.py: lengths with a long tail.

    python benchmarks/async_vs_sync.py

The policy of the quickstart on sums of two to ten terms, whose worked solutions
have 6 to 86 tokens, and 36 on average. Generation is otherwise much cheaper
here than training. With two slots it takes about as long.

The benchmark starts this run on two CPU devices, with a warm start that both
variants share. `sync`, after a colon, is the same run with max_staleness=0.
"""

import pathlib
import runpy

from ml_collections import config_dict

from jaxrl_async.config import sections

# By path, because a config file may be loaded from any working directory.
_QUICKSTART = runpy.run_path(
  str(pathlib.Path(__file__).with_name("quickstart.py"))
)


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are "" and "sync"."""
  run: sections.Config = _QUICKSTART["get_config"](variant)
  run.task.params = config_dict.ConfigDict(
    {"min_terms": 2, "max_terms": 10, "min_digits": 1, "max_digits": 1}
  )
  run.warm_start.num_steps = 600
  run.warm_start.corrupted_frac = 0.05
  run.rollout = sections.RolloutSection(
    num_slots=2,
    max_prompt_tokens=40,
    max_completion_tokens=120,
    cache_tokens=160,
    decode_steps_per_call=8,
    prefill_rows=4,
    prefill_buckets=(40, 160),
    window_buckets=(80, 160),
  )
  run.algorithm.groups_per_step = 32
  run.algorithm.num_minibatches = 1
  run.train.num_steps = 30
  # With a constant rate the program is the same for any number of steps.
  run.train.decay = 1.0
  run.train.optimizer.learning_rate = 1e-4
  run.train.tokens_per_row = 160
  run.train.rows_per_microbatch = 8
  # Only training and generation run between the first step and the last.
  run.eval.every = 0
  run.run.checkpoint_every = 1_000
  return run
