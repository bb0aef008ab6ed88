"""Write a policy as a directory that transformers and vLLM load.

uv run launch/export.py --checkpoint=/tmp/quickstart --output=/tmp/exported

This takes the newest checkpoint of a run, or the one of --step. Neither an
accelerator nor a running run is disturbed: the parameters are read on the host.
The last line on stdout is JSON.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import json
import os
import pathlib

from absl import flags
import checkpoint_config

from jaxrl_async.config import sections
from jaxrl_async.config import setting as setting_lib
from jaxrl_async.storage import directories

# Slow imports are made where they are used, after all checks.

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint",
  "",
  "A run's workdir, WORKDIR/params of launch/sft.py, a model in Hugging Face's"
  " format, or hf:ORG/NAME of its hub.",
)
_STEP = flags.DEFINE_integer(
  "step", -1, "Train step of a run's checkpoint; -1 is the newest.", -1
)
_OUTPUT = flags.DEFINE_string(
  "output", "", "Directory to write, which must not exist or be empty."
)
_ADAPTER = flags.DEFINE_bool(
  "adapter",
  False,
  "Of a run with LoRA, write the adapter alone in PEFT's format. Without this"
  " flag it is merged into its base.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype", "bfloat16", setting_lib.DTYPES, "Dtype of the weights."
)
_MAX_SHARD_BYTES = flags.DEFINE_integer(
  "max_shard_bytes",
  5_000_000_000,
  "Largest file of weights; larger models get several.",
  1_000_000,
)


def _check() -> None:
  if command_line.WORKDIR.value:
    raise sections.ConfigError("workdir: not used here; use --checkpoint")
  checkpoint_config.check(_CHECKPOINT.value)
  sections.require(
    bool(_OUTPUT.value), "output", "missing; use --output=DIRECTORY"
  )
  directories.check_can_write("output", _OUTPUT.value)


def main() -> None:
  """Write the directory."""
  from jaxrl_async.policies import export
  from jaxrl_async.policies import stored_policy

  output = pathlib.Path(_OUTPUT.value).absolute()
  export.check_output(output)
  stored = stored_policy.find(
    _CHECKPOINT.value, None if _STEP.value < 0 else _STEP.value
  )
  if _ADAPTER.value:
    written = {**export.export_adapter(stored, output), "dtype": "float32"}
  else:
    written = {
      **export.export(
        stored,
        output,
        dtype=_DTYPE.value,
        max_shard_bytes=_MAX_SHARD_BYTES.value,
      ),
      "dtype": _DTYPE.value,
    }
  print(json.dumps({**written, "output": str(output)}))


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  command_line.start_without_config(main, _check)
