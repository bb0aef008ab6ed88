"""Products of three-digit numbers, which the policy learns to ask a tool for.

uv run launch/train.py --config=configs/tools.py --workdir=/tmp/tools

It runs on two CPU cores; docs/how-to/tools.md says what was measured.
The warm start guesses most answers, and some of its calls have a wrong digit.
`alone`, after a colon, has no tool and a warm start on right answers.
"""

from ml_collections import config_dict

from jaxrl_async.config import sections


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are "" and "alone"."""
  if variant not in ("", "alone"):
    raise sections.ConfigError(
      f"variant: {sections.shown(variant)}; use alone or none"
    )
  has_tools = not variant
  solver = "seldom_called" if has_tools else "known"
  return sections.Config(
    model=sections.ModelSection(name="quickstart", remat=sections.Remat.DOTS),
    task=sections.TaskSection(
      dataset="products",
      params=config_dict.ConfigDict(
        {"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3}
      ),
      template="{expression}\n",
      answer_prefix="=",
      episode="tools" if has_tools else "",
      episode_params=config_dict.ConfigDict(
        {"tools": ["jaxrl_async.tools.calculator:multiply"], "max_calls": 1}
        if has_tools
        else {}
      ),
    ),
    warm_start=sections.WarmStartSection(
      num_steps=500,
      rows_per_batch=8,
      num_examples=20_000,
      solver=f"jaxrl_async.tools.calculator:{solver}",
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=3e-3,
        warmup_steps=20,
      ),
    ),
    rollout=sections.RolloutSection(
      num_slots=48,
      max_prompt_tokens=16,
      max_completion_tokens=144,
      cache_tokens=160,
      # A turn ends with its call, and the result follows.
      stop=("</tool_call>",),
      decode_steps_per_call=8,
      prefill_rows=16,
      prefill_buckets=(16, 160),
      window_buckets=(160,),
    ),
    algorithm=sections.AlgorithmSection(
      max_staleness=4,
      group_size=8,
      groups_per_step=16,
      num_minibatches=2,
      proximal=sections.ProximalMode.LOGLINEAR,
    ),
    train=sections.TrainSection(
      num_steps=80,
      tokens_per_row=160,
      rows_per_microbatch=8,
      decay=0.1,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON,
        learning_rate=4e-4,
        warmup_steps=4,
      ),
    ),
    run=sections.RunSection(checkpoint_every=40),
  )
