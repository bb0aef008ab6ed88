"""The runs of benchmarks/staleness.py: a policy that has much left to discover.

The warm start writes two of three partial sums wrong, so that the first policy
gives every right line a probability of about a third. Training has to raise it
several times over, and stale data is then from a policy that is far away.
Completions are short and slots many, so that generation is faster than
training, and trajectories become as old as max_staleness allows.
"""

import pathlib
import runpy

from ml_collections import config_dict

from jaxrl_async.config import sections

# By path, because a config file may be loaded from any working directory.
_QUICKSTART = runpy.run_path(
  str(pathlib.Path(__file__).with_name("quickstart.py"))
)


def get_config() -> sections.Config:
  """Return the run with the default bound and the decoupled objective."""
  run: sections.Config = _QUICKSTART["get_config"]()
  run.task.params = config_dict.ConfigDict(
    {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}
  )
  run.warm_start.num_steps = 500
  run.warm_start.corrupted_frac = 0.65
  run.rollout = sections.RolloutSection(
    num_slots=32,
    max_prompt_tokens=16,
    max_completion_tokens=24,
    cache_tokens=40,
    decode_steps_per_call=8,
    prefill_rows=4,
    prefill_buckets=(16, 40),
    window_buckets=(40,),
  )
  run.algorithm.group_size = 8
  run.algorithm.groups_per_step = 16
  run.algorithm.num_minibatches = 4
  run.train.num_steps = 80
  # With a constant rate the program is the same for any number of steps.
  run.train.decay = 1.0
  run.train.optimizer.learning_rate = 8e-4
  run.train.tokens_per_row = 48
  run.train.rows_per_microbatch = 16
  run.eval.every = 10
  run.run.checkpoint_every = 40
  return run
