"""Imported by the fork server, and there only: what reward processes share.

Three things are done once, so that a reward process starts within milliseconds,
also the one that replaces a process that hung:

- reasoning-gym is imported;
- Ctrl-C and a hangup, which a terminal sends to all processes of a run, are
  left to the one that trains: the others end when it does;
- `multiprocessing` is kept from running the parent's main script again in each
  child, as it otherwise does. A launch file imports jax, which starts threads
  and takes seconds and memory, and nothing of it is needed to score.
"""

from multiprocessing import spawn
import signal
from typing import Any

from jaxrl_async.rewards import reasoning

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)

reasoning.library()

_prepare = spawn.prepare


def _prepare_without_main(data: dict[str, Any]) -> None:
  _prepare({k: v for k, v in data.items() if not k.startswith("init_main")})


spawn.prepare = _prepare_without_main
