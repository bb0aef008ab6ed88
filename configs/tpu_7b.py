"""Qwen2.5's 7B on 8 to 32 TPU chips: compiled for TPUs, never run on one.

    uv run --extra tpu-aot launch/train.py --dry_run --topology=v5p:2x2x2 \
      --config=configs/tpu_7b.py:8k@v5p:2x2x2

Variants are those of tpu_1p5b.py, for the slices v5p:2x2x2, v6e:4x4 and
2xv5e:4x4. On v5e four chips share a row of 8k tokens.
"""

import pathlib
import runpy

from jaxrl_async.config import sections

# By path, because a config file may be loaded from any working directory.
_BASE = runpy.run_path(str(pathlib.Path(__file__).with_name("tpu_1p5b.py")))
SLICES = {
  "v5p:2x2x2": sections.MeshSection(
    train_fsdp=4, rollout_data=2, rollout_tensor=2
  ),
  "v6e:4x4": sections.MeshSection(
    train_fsdp=8, rollout_data=2, rollout_tensor=4
  ),
  "2xv5e:4x4": sections.MeshSection(
    train_fsdp=4, train_context=4, rollout_data=4, rollout_tensor=4
  ),
}


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are described above."""
  return _BASE["make"](
    "qwen2.5-7b",
    SLICES,
    variant,
    slots_per_replica=16,
    state_dtype="bfloat16",
  )
