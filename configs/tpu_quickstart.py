"""The quickstart on four TPU chips: compiled for TPUs, never run on one.

    uv run --extra tpu launch/train.py --config=configs/tpu_quickstart.py \
      --workdir=/tmp/quickstart

Two chips train and two generate, in bfloat16. This is the smallest run to try a
TPU with. A test compiles it for v5e:2x2:

    uv run --extra tpu-aot launch/train.py --config=configs/tpu_quickstart.py \
      --dry_run --topology=v5e:2x2
"""

import pathlib
import runpy

from jaxrl_async.config import sections

# By path, because a config file may be loaded from any working directory.
_QUICKSTART = runpy.run_path(
  str(pathlib.Path(__file__).with_name("quickstart.py"))
)


def get_config(variant: str = "") -> sections.Config:
  """Return the run of this file; variants are those of the quickstart."""
  run: sections.Config = _QUICKSTART["get_config"](variant)
  run.model.compute_dtype = run.rollout.dtype = "bfloat16"
  run.mesh = sections.MeshSection(train_fsdp=2, rollout_data=2)
  return run
