"""Trains a policy: warm start, then asynchronous reinforcement learning.

python launch/train.py --config=configs/quickstart.py --workdir=/tmp/quickstart

The last line on stdout is the summary. The same command on the same workdir
continues from its newest checkpoint.
"""

import command_line  # isort: skip, first: it sets XLA's environment

from absl import flags
import jax

from jaxrl_async import assembly
from jaxrl_async import run

_DRY_RUN = flags.DEFINE_bool(
  "dry_run", False, "Print sizes, memory and devices, and exit."
)


def main(config):
  if _DRY_RUN.value:
    print(assembly.describe(config, jax.devices()))
  else:
    print(run.run(config, command_line.workdir()))


if __name__ == "__main__":
  command_line.start(main)
