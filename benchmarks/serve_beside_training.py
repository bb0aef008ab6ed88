"""Training while serving: ordinary clients against hostile ones.

    python benchmarks/serve_beside_training.py

Runs launch/train.py with --serve_port twice, with the same number of ordinary
clients, who ask for completions. In the second run the clients of
hostile_clients.py are added. Training must end with exit status 0 and take at
most twice as long. The exit status of this program says whether it did.

Times are from the start of the process to its end. The clients share the cores
with the training. The last line is one JSON object.
"""

import asyncio
from collections.abc import Sequence
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import http_exchange

_CONFIG = flags.DEFINE_string(
  "config", "configs/tiny.py", "Config of the training."
)
_STEPS = flags.DEFINE_integer("steps", 60, "Train steps.", 1)
_CLIENTS = flags.DEFINE_integer("clients", 8, "Ordinary clients.", 1)
_EACH = flags.DEFINE_integer("each", 4, "Hostile clients of each kind.", 1)
_ONLY = flags.DEFINE_string(
  "only", "", "Kinds of hostile clients, separated by commas; by default all."
)
_TIMEOUT_S = flags.DEFINE_float(
  "timeout_s", 900.0, "Time limit of one training."
)

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_MOST_RATIO = 2.0


def _free_port() -> int:
  with socket.create_server(("127.0.0.1", 0)) as free:
    return free.getsockname()[1]


@contextlib.contextmanager
def _hostile(address: str):
  """Run hostile clients until the block ends."""
  process = subprocess.Popen(
    [
      sys.executable,
      str(_ROOT / "benchmarks" / "hostile_clients.py"),
      f"--address={address}",
      f"--seconds={_TIMEOUT_S.value}",
      f"--each={_EACH.value}",
      f"--only={_ONLY.value}",
    ],
    stdout=subprocess.DEVNULL,
  )
  try:
    yield
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()


async def _be_a_client(address: str, answers: list[float]) -> None:
  """Ask again after each answer, until cancelled."""
  body = {"model": "policy", "prompt": "3 + 4\n", "max_tokens": 12}
  while True:
    try:
      answers += await http_exchange.ask_repeatedly(
        address, "/v1/completions", body, 1
      )
    except (OSError, EOFError):
      await asyncio.sleep(0.2)  # no server yet, a refusal, or the end


async def _train(is_hostile: bool) -> dict[str, Any]:
  """Train once among clients."""
  address = f"127.0.0.1:{_free_port()}"
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  with contextlib.ExitStack() as stack:
    workdir = stack.enter_context(
      tempfile.TemporaryDirectory(prefix="serve_beside_training_")
    )
    start_s = time.perf_counter()
    training = await asyncio.create_subprocess_exec(
      sys.executable,
      str(_ROOT / "launch" / "train.py"),
      f"--config={_CONFIG.value}",
      f"--workdir={workdir}",
      f"--serve_port={address.rpartition(':')[2]}",
      f"--config.train.num_steps={_STEPS.value}",
      stdout=subprocess.DEVNULL,
      env=environment,
      cwd=_ROOT,
    )
    await http_exchange.wait_for_server(address, training.wait())
    if is_hostile:
      stack.enter_context(_hostile(address))
    answers: list[float] = []
    health: list[float] = []
    tasks = [
      asyncio.ensure_future(_be_a_client(address, answers))
      for _ in range(_CLIENTS.value)
    ]
    tasks.append(
      asyncio.ensure_future(http_exchange.watch_health(address, health))
    )
    try:
      async with asyncio.timeout(_TIMEOUT_S.value):
        exit_status = await training.wait()
    except TimeoutError:
      training.kill()
      exit_status = await training.wait()
    wall_s = time.perf_counter() - start_s
    for task in tasks:
      task.cancel()
    await asyncio.wait(tasks)
  return {
    "exit_status": exit_status,
    "wall_s": wall_s,
    "answers": len(answers),
    "health_max_s": max(health, default=None),
  }


def main(argv: Sequence[str]) -> None:
  """Train twice and compare."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  ordinary = asyncio.run(_train(is_hostile=False))
  print(f"ordinary clients: {ordinary}", file=sys.stderr)
  hostile = asyncio.run(_train(is_hostile=True))
  print(f"hostile clients: {hostile}", file=sys.stderr)
  ratio = hostile["wall_s"] / ordinary["wall_s"]
  print(json.dumps({"ratio": ratio, "ordinary": ordinary, "hostile": hostile}))
  has_ended = not (ordinary["exit_status"] or hostile["exit_status"])
  sys.exit(not (has_ended and ratio <= _MOST_RATIO))


if __name__ == "__main__":
  app.run(main)
