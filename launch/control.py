"""Train a policy of observations in one of Gymnasium's environments.

uv run launch/control.py --config=configs/cartpole.py --workdir=/tmp/cartpole

It needs the extra gym. WORKDIR/metrics.jsonl gets a line for each train step.
The same command on the same workdir continues from its newest checkpoint. The
last line on stdout is JSON: the metrics of the last step.
docs/how-to/control.md says more.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import json

from jaxrl_async.control import settings as settings_lib

# Slow imports are made in main(), after all checks.


def main(config: settings_lib.ControlConfig) -> None:
  """Train, and print the summary."""
  from jaxrl_async.control import train

  print(json.dumps(train.train(config, command_line.workdir())))


if __name__ == "__main__":
  command_line.start(
    main,
    command_line.check_workdir,
    check_config=settings_lib.check,
    kind=settings_lib.ControlConfig,
  )
