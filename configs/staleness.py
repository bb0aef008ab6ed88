"""The runs of benchmarks/staleness.py: a policy that has much left to discover.

The warm start writes nearly every second partial sum wrong, so that few of the
first answers are right. Training has to raise the probability of a right line
several times over, and stale data is then from a policy that is far away.
Completions are short and slots many, so that generation is faster than
training, and trajectories become as old as max_staleness allows.

`long`, after a colon, has sums of eight to ten terms and small train steps. A
completion takes longer than a train step, so that new weights interrupt many of
them.
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
  """Return the run of this file; variants are "" and "long"."""
  if variant not in ("", "long"):
    raise sections.ConfigError(
      f"variant: {sections.shown(variant)}; use long or none"
    )
  run: sections.Config = _QUICKSTART["get_config"]()
  is_long = variant == "long"
  min_terms, max_terms = (8, 10) if is_long else (3, 3)
  run.task.params = config_dict.ConfigDict(
    {
      "min_terms": min_terms,
      "max_terms": max_terms,
      "min_digits": 1,
      "max_digits": 1,
    }
  )
  run.warm_start.num_steps = 1_000
  run.warm_start.decay = 0.1
  run.warm_start.corrupted_frac = 0.08 if is_long else 0.45
  longest_prompt, longest = (32, 128) if is_long else (16, 24)
  cache = longest_prompt + longest
  run.rollout = sections.RolloutSection(
    num_slots=64,
    max_prompt_tokens=longest_prompt,
    max_completion_tokens=longest,
    cache_tokens=cache,
    decode_steps_per_call=8 if is_long else 7,
    prefill_rows=8,
    prefill_buckets=(longest_prompt, cache),
    window_buckets=(cache,),
  )
  run.algorithm.group_size = 8
  run.algorithm.groups_per_step = 2 if is_long else 32
  run.algorithm.num_minibatches = 2 if is_long else 8
  run.train.num_steps = 150
  run.train.optimizer.learning_rate = 1e-4 if is_long else 2e-4
  run.train.tokens_per_row = cache if is_long else 48
  run.train.rows_per_microbatch = 2 if is_long else 8
  run.eval.every = 30
  run.eval.samples = 4
  run.run.checkpoint_every = 50
  return run
