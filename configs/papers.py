"""The runs of benchmarks/papers.py: sums with one operation a line.

Variants, after a colon:

    preference  arXiv:2404.10719
    rewards     arXiv:2410.15115, with room for long solutions
    scored      the same with a second reward, the scores of a served model

The questions are files that the benchmark writes, and names on the command
line. docs/project/papers.md says what is compared.
"""

from ml_collections import config_dict

from jaxrl_async.config import algorithms
from jaxrl_async.config import sections

VARIANTS = ("preference", "rewards", "scored")
_PROMPT = 16  # tokens
_DEFAULT = sections.TaskSection().reward


def get_config(variant: str = "preference") -> sections.Config:
  """Return the run of one of `VARIANTS`."""
  if variant not in VARIANTS:
    raise sections.ConfigError(
      f"variant: {sections.shown(variant)}; use one of {', '.join(VARIANTS)}"
    )
  # Solutions of the rewards study may become long.
  completion = 48 if variant == "preference" else 112
  cache = _PROMPT + completion
  rewards = {
    "right": {"function": "exact"},
    "steps": {
      "function": "http://127.0.0.1:8900/?reward=process",
      "weight": 0.1,
      "timeout_s": 120.0,
    },
  }
  muon = sections.OptimizerName.MUON
  return sections.Config(
    model=sections.ModelSection(name="half-million", remat=sections.Remat.DOTS),
    task=sections.TaskSection(
      dataset="jsonl:train.jsonl",
      eval_dataset="jsonl:test.jsonl",
      template="{question}\n",
      answer_prefix="#",
      reward=_DEFAULT if variant == "scored" else "exact",
      rewards=config_dict.ConfigDict(rewards if variant == "scored" else {}),
    ),
    warm_start=sections.WarmStartSection(
      num_steps=300,
      solver="field:solution",
      rows_per_batch=16,
      num_examples=16_000,
      optimizer=sections.OptimizerSection(
        name=muon, learning_rate=3e-3, warmup_steps=20
      ),
    ),
    preference=sections.PreferenceSection(
      optimizer=sections.OptimizerSection(learning_rate=1e-4, warmup_steps=5),
    ),
    rollout=sections.RolloutSection(
      num_slots=64,
      max_prompt_tokens=_PROMPT,
      max_completion_tokens=completion,
      cache_tokens=cache,
      decode_steps_per_call=8,
      prefill_rows=16,
      prefill_buckets=(_PROMPT, cache),
      window_buckets=(cache,),
    ),
    algorithm=algorithms.ppo_gae(
      max_staleness=0,
      group_size=2,
      groups_per_step=32,
      num_minibatches=4,
      proximal=sections.ProximalMode.LOGLINEAR,
    ),
    critic=sections.CriticSection(
      optimizer=sections.OptimizerSection(name=muon, learning_rate=4e-4),
    ),
    train=sections.TrainSection(
      num_steps=100,
      tokens_per_row=2 * cache,
      rows_per_microbatch=8,
      optimizer=sections.OptimizerSection(
        name=muon, learning_rate=4e-4, warmup_steps=4
      ),
    ),
    eval=sections.EvalSection(num_items=256, every=0),
    run=sections.RunSection(checkpoint_every=50),
  )
