"""Qwen2.5's 32B on 32 or 64 TPU chips: compiled for TPUs, never run on one.

    uv run --extra tpu-aot launch/train.py --dry_run --topology=v5p:4x4x4 \
      --config=configs/tpu_32b.py:8k@v5p:4x4x4

Variants are those of tpu_1p5b.py, for the slices v5p:4x4x4, v5p:2x4x4 and
v6e:8x8. On v6e four chips share a row of 8k tokens. There is no v5e slice: the
engine holds two versions of the weights while it adopts one, eight kv heads
split over at most eight chips, and an eighth of two versions is more than a
chip holds.
"""

import pathlib
import runpy

from jaxrl_async.config import sections

# By path, because a config file may be loaded from any working directory.
_BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("tpu_1p5b.py")))
SLICES = {
  "v5p:4x4x4": sections.MeshSection(
    train_fsdp=32, rollout_data=4, rollout_tensor=8
  ),
  "v5p:2x4x4": sections.MeshSection(
    train_fsdp=16, rollout_data=2, rollout_tensor=8
  ),
  "v6e:8x8": sections.MeshSection(
    train_fsdp=8, train_context=4, rollout_data=4, rollout_tensor=8
  ),
}


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are described above."""
  return _BASE["make"](
    "qwen2.5-32b",
    SLICES,
    variant,
    slots_per_replica=16,
    state_dtype="bfloat16",
  )
