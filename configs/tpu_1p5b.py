"""Qwen2's 1.5B on one TPU host: compiled for TPUs, never run on one.

    uv run --extra tpu-aot launch/train.py --dry_run --topology=v5e:2x4 \
      --config=configs/tpu_1p5b.py:8k@v5e:2x4

A variant follows after the colon. It has the tokens of the longest trajectory
(1k, 8k or 32k) and, after an @, the slice that the mesh is for: v5e:2x4,
v6e:2x4 or v5p:2x2x1. Half of the chips train and half generate. At 32k tokens
four times as many chips share a row as at 8k, except on v5p.

docs/project/scaling.md says what fits, and how long it takes at least.
Recomputing the caches for new weights takes 1.4 to 2 times the tokens that are
needed if all completions run to the limit (docs/project/notebook.md, prefill
buckets). The weights are random unless `--config.model.name` is the directory
of a pretrained model.
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
# How many times more devices share a row of 32k tokens than a row of 8k.
LONG_CONTEXT = {"v5e": 4, "v6e": 4, "v5p": 1}


def make(
  model: str,
  slices: dict[str, sections.MeshSection],
  variant: str,
  *,
  slots_per_replica: int,
  state_dtype: str = "float32",
) -> sections.Config:
  """Return a run of a model at the sizes of a variant.

  Args:
    model: name of the model.
    slices: a mesh for each TPU slice; without one, the first is taken.
    variant: number of tokens, and a slice after an @.
    slots_per_replica: slots at 8k tokens. At other lengths the slots of a
      replica hold the same number of tokens in all.
    state_dtype: type of the optimizer's first moment.
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
    # A directory of a base such as Qwen2.5-Math was made for 4,096 tokens. The
    # run teaches it to go on.
    model=sections.ModelSection(
      name=model, compute_dtype="bfloat16", max_positions=tokens
    ),
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
      # One row for each replica if it has enough tokens to be limited by
      # products. The rows of a call share a bucket, so more rows would often
      # be empty.
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
  """Return the run of this file; variants are described above."""
  return make("qwen2-1.5b", SLICES, variant, slots_per_replica=8)
