"""launch/train.py, which marks on a board what it is doing.

    python benchmarks/staged_train.py BOARD --config=... --workdir=...

The flags after the board are those of launch/train.py. Only the functions that
are named below are wrapped, and they do what they did.
"""

from collections.abc import Callable
import pathlib
import runpy
import sys
from typing import Any

import stage_board

from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.run import first_stage
from jaxrl_async.run import run_evaluations
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import trainer as trainer_lib
from jaxrl_async.weights import weight_transfer

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / "launch"
# The stage, and the function that is inside it from its call to its return.
_FUNCTIONS = (
  ("warm start", first_stage, "warm_start"),
  ("restore", first_stage, "restore"),
  ("publish", weight_transfer.OrbaxChannel, "_announce"),
  ("adopt", weight_transfer.OrbaxChannel, "adopt"),
  ("adopt", scheduler_lib.Scheduler, "adopt"),
  ("evaluation", run_evaluations.RunEvaluations, "_score"),
  ("train step", trainer_lib.Trainer, "step"),
)


def mark(board: stage_board.Board) -> None:
  """Have the functions of a run mark their stages."""
  for stage, owner, name in _FUNCTIONS:
    setattr(owner, name, board.marking(stage, getattr(owner, name)))
  score = pool_lib.Pool.score

  def marked(self: pool_lib.Pool, attempt: Any) -> Any:
    board.enter("reward")
    running = score(self, attempt)
    running.future.add_done_callback(lambda _: board.leave("reward"))
    return running

  pool_lib.Pool.score = marked
  begin = checkpoint.begin

  def begun(*arguments: Any, **options: Any) -> Callable[[], None]:
    # A thread finishes it.
    write = board.marking("checkpoint", begin)(*arguments, **options)
    return board.marking("checkpoint", write)

  checkpoint.begin = begun


def run(arguments: list[str]) -> None:
  """Run launch/train.py in this process, as if it had been started."""
  script = str(LAUNCH / "train.py")
  sys.argv = [script, *arguments]
  sys.path[0] = str(LAUNCH)
  runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
  mark(stage_board.Board(pathlib.Path(sys.argv[1])))
  run(sys.argv[2:])
