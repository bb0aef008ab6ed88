"""A run of half a minute, which the tests of the whole system use.

    uv run launch/train.py --config=configs/tiny.py --workdir=/tmp/tiny

It takes half a minute on two CPU devices, most of it for compiling. It learns
almost nothing: sums of two one-digit numbers, a model of 20 thousand
parameters, four train steps. `sync`, after a colon, is the same run with
max_staleness=0.
"""

from ml_collections import config_dict

from jaxrl_async.config import sections


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are "" and "sync"."""
  if variant not in ("", "sync"):
    raise sections.ConfigError(
      f"variant: {sections.shown(variant)}; use sync or none"
    )
  return sections.Config(
    model=sections.ModelSection(name="tiny", remat=sections.Remat.NONE),
    task=sections.TaskSection(
      dataset="chain_sum",
      params=config_dict.ConfigDict(
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
      ),
      template="{expression}\n",
      answer_prefix="=",
    ),
    warm_start=sections.WarmStartSection(
      num_steps=300,
      rows_per_batch=4,
      num_examples=60,
      corrupted_frac=0.0,
      optimizer=sections.OptimizerSection(learning_rate=1e-2),
    ),
    rollout=sections.RolloutSection(
      num_slots=8,
      max_prompt_tokens=8,
      max_completion_tokens=16,
      cache_tokens=24,
      decode_steps_per_call=4,
      prefill_rows=4,
      prefill_buckets=(8, 24),
      window_buckets=(24,),
    ),
    algorithm=sections.AlgorithmSection(
      max_staleness=0 if variant == "sync" else 2,
      group_size=4,
      groups_per_step=4,
      num_minibatches=2,
    ),
    train=sections.TrainSection(
      num_steps=4,
      tokens_per_row=48,
      rows_per_microbatch=4,
      optimizer=sections.OptimizerSection(learning_rate=1e-3),
    ),
    eval=sections.EvalSection(num_items=8, every=0),
    run=sections.RunSection(
      checkpoint_every=2, stall_timeout_s=60.0, join_timeout_s=20.0
    ),
  )
