"""Replay a run: generate and train again what it recorded, bit for bit.

uv run launch/replay.py --workdir=/tmp/quickstart

The run must have had run.record_timing, which is on by default. Every token,
logprob and loss is compared with the record, and the train state at the end
with the checkpoint of that step, if there is one. The first difference ends the
replay with exit status 1. Nothing is written to the workdir.

The last line on stdout is JSON: `bit_exact`, and what was replayed and
compared, or the `difference`. docs/how-to/replay.md has its keys, and says what
can be replayed. Scripts call `jaxrl_async.replay`.
"""

import command_line  # isort: skip, first: it sets XLA's environment

import json
import os
import pathlib
import sys
from typing import Any

from absl import flags

from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.storage import directories

# Slow imports are made where they are used, after all checks.

_UNTIL = flags.DEFINE_integer(
  "until", -1, "Train steps to replay; -1 is all of them.", -1
)
_FROM_STEP = flags.DEFINE_integer(
  "from_step",
  0,
  "Begin with the checkpoint of this train step. The run had"
  " run.exact_resume, or was started or resumed at this step.",
  0,
)


def _check() -> None:
  # A loss or an episode of the user's may lie here.
  sys.path.append(os.getcwd())
  command_line.check_compile_cache()
  workdir = command_line.WORKDIR.value
  sections.require(bool(workdir), "workdir", "missing; use --workdir=DIRECTORY")
  directories.check_can_read("workdir", workdir, "use the workdir of a run")
  try:
    start = recorded_timing.start_of(pathlib.Path(workdir), _FROM_STEP.value)
  except recorded_timing.TimingError as error:
    raise sections.ConfigError(f"workdir: {error}") from error
  flags_then = start.environment.get("xla_flags")
  if flags_then:
    os.environ["XLA_FLAGS"] = flags_then


def main() -> None:
  """Replay, and print what was compared as JSON."""
  import jax

  from jaxrl_async.replay import replay as replay_lib
  from jaxrl_async.reporting import progress as progress_lib

  command_line.use_own_compile_cache()
  workdir = pathlib.Path(command_line.WORKDIR.value).absolute()
  wanted = replay_lib.Wanted(
    until=None if _UNTIL.value < 0 else _UNTIL.value,
    from_step=_FROM_STEP.value,
  )
  stop = supervisor_lib.StopRequest()
  outcome: dict[str, Any] = {"workdir": command_line.WORKDIR.value}
  difference = ""
  with (
    progress_lib.Progress(0) as progress,
    stop.on_signals(
      progress.note, "stopping; once more ends it now", "ended at once"
    ),
  ):
    try:
      result = replay_lib.replay(
        workdir,
        wanted,
        jax.devices(),
        progress=progress,
        stop=stop,
        xla_flags=os.environ["XLA_FLAGS"],
      )
      outcome |= {"bit_exact": True, **result.record()}
    except replay_lib.Difference as error:
      difference = str(error)
      outcome |= {"bit_exact": False, "difference": difference}
  print(json.dumps(outcome))
  if difference:
    sys.exit(1)


if __name__ == "__main__":
  command_line.start_without_config(main, _check)
