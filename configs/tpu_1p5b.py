"""Qwen2's 1.5B on one TPU host: compiled for TPUs, never run on one.

    uv run --extra tpu-aot launch/train.py --dry_run --topology=v5e:2x4 \
      --config=configs/tpu_1p5b.py:8k@v5e:2x4

A variant, after the colon, is the tokens of the longest trajectory (1k, 8k or
32k), and after an @ the slice whose mesh it takes: v5e:2x4, v6e:2x4 or
v5p:2x2x1. Half of the chips train, half of them generate; at 32k tokens four
times as many share a row, except on v5p. docs/scaling.md says what fits and how
long it takes at least. To recompute the caches takes 1.4 to 2 times the tokens
that are needed where completions run to the limit (docs/performance.md, prefill
buckets). The weights are random unless `--config.model.name` is a pretrained
model's directory.
"""

import dataclasses

from ml_collections import config_dict

from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips

TOKENS = {"1k": 1_024, "8k": 8_192, "32k": 32_768}
SLICES = {
  "v5e:2x4": sections.MeshSection(train_fsdp=4, rollout_data=4),
  "v6e:2x4": sections.MeshSection(train_fsdp=4, rollout_data=4),
  "v5p:2x2x1": sections.MeshSection(train_fsdp=2, rollout_data=2),
}
# How many times as many devices share a row of 32k tokens as one of 8k.
LONG_CONTEXT = {"v5e": 4, "v6e": 4, "v5p": 1}


def make(
  model: str,
  slices: dict[str, sections.MeshSection],
  variant: str,
  *,
  slots_per_replica: int,
  state_dtype: str = "float32",
) -> sections.Config:
  """A run of a model at the shapes of a variant.

  Args:
    model: by its name.
    slices: a mesh for each; the first is taken when the variant names none.
    variant: tokens, and a slice after an @.
    slots_per_replica: at 8k tokens; others have the same number of tokens.
    state_dtype: of the optimizer's first moment.
  """
  length, _, name = variant.partition("@")
  length, name = length or "8k", name or next(iter(slices))
  sections.require(
    length in TOKENS and name in slices,
    "variant",
    f"{sections.shown(variant)}; use {', '.join(TOKENS)}, and @ with"
    f" {', '.join(slices)}",
  )
  tokens, mesh = TOKENS[length], slices[name]
  if length == "32k":
    context = LONG_CONTEXT[tpu_chips.parse(name)[1]]
    mesh = dataclasses.replace(
      mesh,
      train_fsdp=mesh.train_fsdp // context,
      train_context=mesh.train_context * context,
    )
  slots = max(1, slots_per_replica * TOKENS["8k"] // tokens)
  prompt = tokens // 8
  return sections.Config(
    model=sections.ModelSection(name=model, compute_dtype="bfloat16"),
    mesh=mesh,
    task=sections.TaskSection(
      params=config_dict.ConfigDict(
        {"min_terms": 3, "max_terms": 9, "min_digits": 1, "max_digits": 3}
      ),
    ),
    rollout=sections.RolloutSection(
      num_slots=mesh.rollout_data * min(slots, 64),
      max_prompt_tokens=prompt,
      max_completion_tokens=tokens - prompt,
      cache_tokens=tokens,
      # One row a replica as long as it has tokens enough to be bound by
      # products. More rows would stay empty: those of a call share a bucket.
      prefill_rows=mesh.rollout_data * max(1, 512 // prompt),
      prefill_buckets=(prompt, 2 * prompt, 4 * prompt, tokens),
      window_buckets=(tokens,),
      dtype="bfloat16",
    ),
    algorithm=sections.AlgorithmSection(
      group_size=16, groups_per_step=32, num_minibatches=4
    ),
    train=sections.TrainSection(
      tokens_per_row=tokens,
      rows_per_microbatch=mesh.train_data * mesh.train_fsdp,
      optimizer=sections.OptimizerSection(
        learning_rate=1e-6, state_dtype=state_dtype
      ),
    ),
  )


def get_config(variant: str = "") -> sections.Config:
  """The run of this file; variants are described above."""
  return make("qwen2-1.5b", SLICES, variant, slots_per_replica=8)
