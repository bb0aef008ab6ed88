"""What staleness costs: held-out accuracy by the bound and by the objective.

    python benchmarks/staleness.py --directory=/tmp/staleness

The tables, one for each value of --table:

    staleness     max_staleness of 0, 1, 2, 4, 8 and 16, with the coupled and
                  the decoupled objective of PPO; this is the ablation of
                  AReaL (arXiv:2505.24298, table 2)
    rates         the same at each learning rate of --rates, and the best rate
                  of each objective at each bound
    interruption  what new weights do to running sequences: recompute, keep and
                  wait of rollout.kv_on_adopt, where generation is slower than
                  training, so that new weights interrupt most completions
    proximal      proximal logprobs that are recomputed or interpolated, by
                  algorithm.proximal, with several updates a step

Every run is configs/staleness.py for the same number of train steps, each of
which takes the same number of trajectories. --task is a variant of that file.
The runs of a seed begin from the same warm start and are evaluated on the same
held-out questions. The mean staleness of the trained tokens is printed beside
the bound, because generation that is no faster than training leaves a bound
unused.

Every run compiles its programs anew. Its first train step takes some seconds
for that, in which generation gets ahead: the bound is used from then on.

Everything is kept in --directory. A command that was stopped goes on there with
the run that it was in. Other settings need another directory. What is still to
be made, and about how long it takes, is said at the start.

Prints a table and, as the last line, one JSON object: `table` has a row for
each setting, with its names, and over the seeds `eval_mean` and `eval_std` (of
the sampled accuracy at the end), `eval_error` (the standard error of
`eval_mean` that comes of the questions alone), `difference_mean` and
`difference_std` (of the same minus that of the first row with the same seed),
`greedy_mean`, `realised_staleness`, `tokens_per_s` and `wall_s`.
`staleness_gap` is the largest difference of realised staleness between runs of
one seed and one bound. `best` has the best rates. `is_interrupted` says of the
table `interruption` whether more than two versions have written the mean
trajectory with recompute, without which it compares nothing. --picture draws
the curves. Hardware: two CPU cores, with nothing else on them.
docs/project/staleness.md has the results.
"""

from collections.abc import Callable, Sequence
import json
import pathlib
import sys
from typing import Any

from absl import app
from absl import flags
import launching
import numpy as np
import staleness_tables as tables

_TABLE = flags.DEFINE_enum(
  "table", "staleness", tables.TABLES, "What is compared."
)
_TASK = flags.DEFINE_enum(
  "task",
  None,
  list(tables.TASKS),
  "Variant of configs/staleness.py. By default `long` for the table"
  " `interruption`, and else the file without one.",
)
_DIRECTORY = flags.DEFINE_string(
  "directory", None, "Where runs and results are kept.", required=True
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, comma-separated.")
_BOUNDS = flags.DEFINE_list(
  "bounds",
  None,
  "Values of max_staleness. By default 0,1,2,4,8,16, and 8 for the tables"
  " `interruption` and `proximal`.",
)
_RATES = flags.DEFINE_list(
  "rates",
  ["5e-5", "1e-4", "2e-4", "4e-4"],
  "Learning rates of the table `rates`.",
)


def _are_different(
  values: list[str] | None, kind: Callable[[str], Any]
) -> bool:
  """Return whether these are different numbers, and at least one."""
  try:
    return values is None or 0 < len(values) == len({*map(kind, values)})
  except ValueError:
    return False


for _name, _kind in (("seeds", int), ("bounds", int), ("rates", float)):
  flags.register_validator(
    _name,
    lambda values, kind=_kind: _are_different(values, kind),
    message="different numbers, separated by commas, as 0,1,2",
  )
_STEPS = flags.DEFINE_integer(
  "steps", 0, "Train steps of each run; 0 takes the config's.", lower_bound=0
)
_SET = flags.DEFINE_multi_string(
  "set",
  [],
  "A further setting of every run and of its warm start, as eval.num_items=64.",
)
_PICTURE = flags.DEFINE_string("picture", "", "File of the curves, if any.")

_MANY = ("0", "1", "2", "4", "8", "16")


def _comparison() -> tables.Comparison:
  """Return what the flags describe."""
  table, task, bounds = _TABLE.value, _TASK.value, _BOUNDS.value
  if task is None:
    task = "long" if table == "interruption" else ""
  if bounds is None:
    bounds = _MANY if table in ("staleness", "rates") else ("8",)
  return tables.Comparison(
    table=table,
    task=task,
    directory=pathlib.Path(_DIRECTORY.value),
    seeds=list(map(int, _SEEDS.value)),
    bounds=list(map(int, bounds)),
    rates=_RATES.value,
    num_steps=_STEPS.value,
    further=_SET.value,
  )


def main(argv: Sequence[str]) -> None:
  """Make the runs that are missing, and print the table."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  comparison = _comparison()
  runs = tables.made(comparison)
  if _PICTURE.value:
    names = [setting.names for setting in comparison.settings]
    curves = np.array([[run.curve for run in own] for own in runs])
    tables.draw(_PICTURE.value, names, curves)
  said = tables.said(comparison, runs)
  print(launching.markdown(said["table"]))
  if "best" in said:
    print(launching.markdown(said["best"]))
  print(json.dumps(said))


if __name__ == "__main__":
  app.run(main)
