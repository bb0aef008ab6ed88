"""Trains a policy: warm start, then asynchronous reinforcement learning.

python launch/train.py --config=configs/quickstart.py --workdir=/tmp/quickstart

The last line on stdout is the summary. The same command on the same workdir
continues from its newest checkpoint.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import os

from absl import flags
import jax

from jaxrl_async import assembly
from jaxrl_async import run
from jaxrl_async import serve

_DRY_RUN = flags.DEFINE_bool(
  "dry_run", False, "Print sizes, memory and devices, and exit."
)

_SERVE_PORT = flags.DEFINE_integer(
  "serve_port",
  0,
  "Serve the policy meanwhile, on this port of the loopback address; 0 does"
  " not. JAXRL_API_KEY may hold a key.",
  0,
  65535,
)


def _serving() -> serve.ServeSettings | None:
  if not _SERVE_PORT.value:
    return None
  key = os.environ.get("JAXRL_API_KEY", "").strip() or None
  return serve.ServeSettings(port=_SERVE_PORT.value, api_key=key)


def main(config):
  if _DRY_RUN.value:
    print(assembly.describe(config, jax.devices()))
  else:
    print(run.run(config, command_line.workdir(), serving=_serving()))


if __name__ == "__main__":
  command_line.start(main)
