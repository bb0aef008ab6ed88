r"""Train a policy on pairs of completions, of which one is better.

uv run launch/prefer.py --config=configs/quickstart.py --workdir=/tmp/prefer \
    --config.warm_start.checkpoint=/tmp/sft/params

The section `preference` of the config says with which loss (DPO or IPO), on
which columns of the data and for how long. The result is WORKDIR/params, and
with LoRA also WORKDIR/adapter. The same command on the same workdir continues
from its newest checkpoint. The last line on stdout is JSON: the number of
steps, the wall-clock time, the validation loss before and after, and the path
of the parameters.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import json

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import sections

# Slow imports are made in main(), after all checks.


def main(config: sections.Config) -> None:
  """Train on preferences, and print the summary."""
  import jax

  from jaxrl_async.supervised import prefer

  config_checks.validate(config, len(jax.devices()))
  print(json.dumps(prefer.prefer(config, command_line.workdir())))


if __name__ == "__main__":
  command_line.start(
    main,
    command_line.check_workdir,
    check_config=config_checks.check_preference,
  )
