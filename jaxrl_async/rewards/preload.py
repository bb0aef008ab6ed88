"""Set-up of the fork server from which reward processes are forked.

Only the fork server imports this module. It does three things once, so that
each reward process starts within milliseconds. That includes a process which
replaces one that hung.

- It imports reasoning-gym and math-verify, and what turns tokens into text, so
  that no score waits for them.
- It ignores Ctrl-C and hangups, which a terminal sends to all processes of a
  run. Only the main process handles them; the others end when it ends.
- It keeps `multiprocessing` from running the parent's main script again in each
  child. A launch file imports jax, which starts threads and takes seconds and
  memory, and scoring needs nothing of it.
"""

from multiprocessing import spawn
import signal
from typing import Any

from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import scoring  # noqa: F401, for its children

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)

reasoning.library()
mathematics.are_equal("1", "2")  # which also makes the tables of the parser

_prepare = spawn.prepare


def _prepare_without_main(data: dict[str, Any]) -> None:
  _prepare({k: v for k, v in data.items() if not k.startswith("init_main")})


spawn.prepare = _prepare_without_main
