"""Qwen3-30B-A3B, a mixture of experts, on 64 TPU chips: estimated only.

    uv run launch/train.py --dry_run --topology=v5p:4x4x4 \
      --config=configs/tpu_30b_a3b.py:8k@v5p:4x4x4

Variants are those of tpu_1p5b.py, for the slice v5p:4x4x4. Each chip of a
replica generates with a quarter of the experts, whole ones.
"""

import pathlib
import runpy

from jaxrl_async.config import sections

# By path, because a config file may be loaded from any working directory.
_BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("tpu_1p5b.py")))
_RULES = sections.ShardingRules(
  batch=("data",), embed=(), tokens=(), mlp=(), experts=("tensor",)
)
SLICES = {
  "v5p:4x4x4": sections.MeshSection(
    train_fsdp=32, rollout_data=8, rollout_tensor=4, rollout_rules=_RULES
  ),
}


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are described above."""
  return _BASE["make"](
    "qwen3-30b-a3b",
    SLICES,
    variant,
    slots_per_replica=16,
    state_dtype="bfloat16",
  )
