"""Start a trainer of several processes on this machine.

python launch/trainer_world.py --num_processes=2 -- \
  --config=configs/my_run.py --config.cluster.trainer_processes=2 ...

What follows the two dashes are the flags of launch/train.py. Process 0 has this
terminal; the others print to files in --logs, if that is given. When a process
dies or hangs, all of them are started again from the newest checkpoint. A
signal asks process 0 to stop, and a second one ends it at once.

Several hosts start launch/train.py themselves, each with its own --process_id.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import os
import pathlib
import socket
import sys

from absl import flags

from jaxrl_async.config import sections
from jaxrl_async.coordination import local_world
from jaxrl_async.storage import directories

_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", 2, "Number of processes (cluster.trainer_processes).", 1
)
_MAX_RESTARTS = flags.DEFINE_integer(
  "max_restarts", 3, "How often all processes are started again.", 0
)
_DEVICES = flags.DEFINE_integer(
  "devices_per_process",
  0,
  "GPUs of each process, in order; 0 shows all of them to all.",
  0,
)
_LOGS = flags.DEFINE_string(
  "logs", "", "Directory for what processes other than 0 print."
)


def _check() -> None:
  if _LOGS.value:
    directories.check_can_write("logs", _LOGS.value)


def _command(arguments: list[str]) -> local_world.Command:
  script = str(pathlib.Path(__file__).with_name("train.py"))

  def command(rank: int, address: str) -> tuple[list[str], dict[str, str]]:
    per = _DEVICES.value
    own = range(rank * per, (rank + 1) * per)
    more = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))} if per else {}
    line = [sys.executable, script, *arguments]
    if _NUM_PROCESSES.value > 1:
      line += [
        f"--num_processes={_NUM_PROCESSES.value}",
        f"--process_id={rank}",
        f"--coordinator_address={address}",
      ]
    return line, dict(os.environ) | more

  return command


def _free_address() -> str:
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return f"localhost:{free.getsockname()[1]}"


def main(arguments: list[str]) -> None:
  """Start the processes and stay until they have ended."""
  if not arguments:
    raise sections.ConfigError(
      "the flags of launch/train.py are missing; they follow after --"
    )
  code = local_world.run(
    _command(arguments),
    _NUM_PROCESSES.value,
    address=_free_address,
    max_restarts=_MAX_RESTARTS.value,
    logs=pathlib.Path(_LOGS.value) if _LOGS.value else None,
    note=lambda line: print(line, file=sys.stderr, flush=True),
  )
  sys.exit(code)


if __name__ == "__main__":
  split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
  rest, sys.argv = sys.argv[split + 1 :], sys.argv[:split]
  command_line.start_without_config(lambda: main(rest), _check, needs_jax=False)
