"""Fine-tune a policy by supervised training: the warm start, on its own.

uv run launch/sft.py --config=configs/quickstart.py --workdir=/tmp/sft

The section `warm_start` of the config says how long and with which optimizer,
and what the completions are. The result is WORKDIR/params. A run starts from
these parameters with --config.warm_start.checkpoint=WORKDIR/params. The same
command on the same workdir continues from its newest checkpoint. The last line
on stdout is JSON: the number of steps, the wall-clock time, the validation loss
before and after, and the path of the parameters.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import json

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import sections

# Slow imports are made in main(), after all checks.


def main(config: sections.Config) -> None:
  """Fine-tune, and print the summary."""
  import jax

  from jaxrl_async.supervised import fine_tune

  config_checks.validate(config, len(jax.devices()))
  print(json.dumps(fine_tune.fine_tune(config, command_line.workdir())))


if __name__ == "__main__":
  command_line.start(main, command_line.check_workdir)
