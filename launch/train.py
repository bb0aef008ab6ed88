"""Trains a policy: warm start, then asynchronous reinforcement learning.

    python launch/train.py --config=configs/quickstart.py --workdir=/tmp/run
"""

import os
import pathlib
import sys

if "--xla_force_host_platform_device_count" not in os.environ.get(
  "XLA_FLAGS", ""
):
  # Two slices on a CPU are two virtual devices; other platforms ignore it.
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=2"
  )

from absl import app
from absl import flags
import jax
from ml_collections import config_flags

from jaxrl_async import config as config_lib
from jaxrl_async import run

_CONFIG = config_flags.DEFINE_config_file("config", None, "The run's file.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run writes.")
_COMPILE_CACHE = flags.DEFINE_string(
  "compile_cache", None, "Persistent XLA cache; default: in the workdir."
)


def main(argv):
  del argv
  workdir = pathlib.Path(_WORKDIR.value).absolute()
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  cache = _COMPILE_CACHE.value or str(workdir / "compile_cache")
  jax.config.update("jax_compilation_cache_dir", cache)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  config = _CONFIG.value
  config_lib.validate(config, len(jax.devices()))
  print(run.run(config, workdir))


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  app.run(main)
