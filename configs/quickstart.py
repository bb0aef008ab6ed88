"""The quickstart: sums of one-digit numbers, worked out step by step.

uv run launch/train.py --config=configs/quickstart.py --workdir=/tmp/qs

Variants, after a colon: `sync` is the same run with max_staleness=0.
"""

from ml_collections import config_dict

from jaxrl_async import config


def get_config(variant: str = "") -> config.Config:
  """The run of this file; variants are "" and "sync"."""
  if variant not in ("", "sync"):
    raise config.ConfigError(f"variant: {variant!r}; use sync or none")
  return config.Config(
    model=config.ModelSection(name="quickstart", remat=True),
    task=config.TaskSection(
      dataset="chain_sum",
      params=config_dict.ConfigDict(
        {"min_terms": 3, "max_terms": 6, "min_digits": 1, "max_digits": 1}
      ),
      template="{expression}\n",
      answer_prefix="=",
    ),
    warm_start=config.WarmStartSection(
      num_steps=600,
      rows_per_batch=32,
      num_examples=8_000,
      optimizer=config.OptimizerSection(
        name=config.OptimizerName.MUON,
        learning_rate=2e-3,
        warmup_steps=20,
      ),
    ),
    rollout=config.RolloutSection(
      num_slots=64,
      max_prompt_tokens=24,
      max_completion_tokens=64,
      cache_tokens=96,
      decode_steps_per_call=16,
      prefill_rows=8,
      prefill_buckets=(32, 96),
      window_buckets=(48, 96),
    ),
    algorithm=config.AlgorithmSection(
      max_staleness=0 if variant == "sync" else 4,
      group_size=16,
      groups_per_step=32,
      num_minibatches=4,
    ),
    train=config.TrainSection(
      num_steps=60,
      tokens_per_row=96,
      rows_per_microbatch=8,
      optimizer=config.OptimizerSection(learning_rate=3e-4, warmup_steps=4),
    ),
  )
