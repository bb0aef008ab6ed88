"""The quickstart: sums of one-digit numbers, worked out step by step.

uv run launch/train.py --config=configs/quickstart.py --workdir=/tmp/quickstart

It runs on two CPU cores; docs/project/results.md has the measured times and
accuracies. `sync`, after a colon, is the same run with max_staleness=0, and
`control` one with a bound that moves between 0 and 8. In `agent` the sums are
asked and judged by an agent that uses OpenAI's client (docs/how-to/agents.md).
"""

from ml_collections import config_dict

from jaxrl_async.config import sections


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are "", sync, control, agent."""
  bounds = {"": 4, "sync": 0, "control": 8, "agent": 4}
  has_agent = variant == "agent"
  if variant not in bounds:
    raise sections.ConfigError(
      f"variant: {sections.shown(variant)}; use sync, control, agent or none"
    )
  return sections.Config(
    model=sections.ModelSection(name="quickstart", remat=sections.Remat.DOTS),
    task=sections.TaskSection(
      dataset="chain_sum",
      params=config_dict.ConfigDict(
        {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
      ),
      template="{expression}\n",
      answer_prefix="=",
      episode="agent" if has_agent else "",
      episode_params=config_dict.ConfigDict(
        {"agent": "jaxrl_async.sessions.adder:solve"} if has_agent else {}
      ),
      reward="episode" if has_agent else "reasoning_gym",
    ),
    warm_start=sections.WarmStartSection(
      num_steps=1_300,
      rows_per_batch=16,
      num_examples=20_000,
      corrupted_frac=0.19,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=3e-3,
        warmup_steps=20,
      ),
    ),
    rollout=sections.RolloutSection(
      # Enough slots that generation takes little of the processor time, and
      # training hardly waits. It waits for admission instead.
      num_slots=48,
      max_prompt_tokens=16,
      max_completion_tokens=48,
      cache_tokens=64,
      decode_steps_per_call=8,
      prefill_rows=16,
      prefill_buckets=(16, 64),
      window_buckets=(64,),
    ),
    algorithm=sections.AlgorithmSection(
      max_staleness=bounds[variant],
      group_size=4,
      groups_per_step=32 if has_agent else 128,
      num_minibatches=4,
      # Saves a forward pass, with the same accuracy
      # (docs/project/staleness.md).
      proximal=sections.ProximalMode.LOGLINEAR,
    ),
    staleness_control=sections.StalenessControlSection(
      maximum=8 if variant == "control" else 0
    ),
    train=sections.TrainSection(
      num_steps=80,
      tokens_per_row=64,
      rows_per_microbatch=16,
      decay=0.1,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=4e-4,
        warmup_steps=4,
      ),
    ),
  )
