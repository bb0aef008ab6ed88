"""Each published method on one task: what it reaches, compared with GRPO.

    python benchmarks/algorithms.py --directory=/tmp/algorithms

Every run is configs/staleness.py with the fields in which a function of
`config.algorithms` differs from the defaults, for the same number of train
steps of the same size. The runs of a seed begin from the same warm start and
are evaluated on the same held-out questions. The learning rate, the minibatches
and the group size are those of that file. They were not tuned for any method,
so that the comparison says how the methods train with the same settings, and
not which one is best.

Everything is kept in --directory. A command that was stopped goes on there with
the run that it was in. Other settings need another directory.

Prints a table and, as the last line, one JSON object. `table` has a row for
each method, with means over the seeds: the accuracies, `difference` from the
sampled accuracy of GRPO with the same seed, and what the metrics say of the
updates. `noise` is the standard error of a difference, from the deviations of
all methods between seeds. `is_within_noise` says that a difference is at most
twice that. Hardware: two CPU cores.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import inspect
import json
import math
import pathlib
import statistics
import sys
from typing import Any

from absl import app
from absl import flags
import launching

from jaxrl_async.config import algorithms
from jaxrl_async.config import sections

_METHODS = {
  name: function
  for name, function in inspect.getmembers(algorithms, inspect.isfunction)
  if not name.startswith("_")
}
# The method that the others are compared with.
_REFERENCE = "grpo"

_DIRECTORY = flags.DEFINE_string(
  "directory", None, "Where runs and results are kept.", required=True
)
_NAMES = flags.DEFINE_list("methods", [*_METHODS], "Functions of algorithms.")
flags.register_validator(
  _NAMES,
  lambda names: {_REFERENCE} <= set(names) <= _METHODS.keys(),
  message=f"{_REFERENCE} and others of {', '.join(_METHODS)}",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "Seeds, comma-separated.")
flags.register_validator(
  _SEEDS,
  lambda seeds: (
    all(map(str.isdecimal, seeds)) and 1 < len(seeds) == len({*seeds})
  ),
  message="two or more different integers, separated by commas, as 0,1,2",
)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of each run.", lower_bound=2)
_SET = flags.DEFINE_multi_string(
  "set",
  [],
  "A further setting of every run and of its warm start, as eval.num_items=64.",
)

# Metrics whose mean over the steps is printed.
_METRICS = (
  "policy/clip_frac",
  "policy/entropy",
  "offpolicy/ess",
  "offpolicy/left_out_frac",
  "staleness/mean",
  "time/update_s",
)


def _overrides(section: sections.AlgorithmSection) -> dict[str, Any]:
  """Return the fields that differ from the defaults."""
  usual = sections.AlgorithmSection()
  names = [field.name for field in dataclasses.fields(section)]
  values = {name: getattr(section, name) for name in names}
  return {
    name: getattr(value, "value", value)
    for name, value in values.items()
    if value != getattr(usual, name)
  }


def _run(method: str, seed: int) -> dict[str, float]:
  """Return the numbers of one run, which may have been made before."""
  directory = pathlib.Path(_DIRECTORY.value)
  usual = (
    f"--compile_cache={directory / 'compile_cache'}",
    f"--config={launching.ROOT / 'configs' / 'staleness.py'}",
    f"--config.seed={seed}",
    *(f"--config.{setting}" for setting in _SET.value),
  )
  params = launching.launch_once(
    "sft.py", directory, f"warm_start_{seed}", *usual
  )["params"]
  name = f"{method}_{seed}"
  launching.launch_once(
    "train.py",
    directory,
    name,
    *usual,
    f"--config.warm_start.checkpoint={params}",
    f"--config.train.num_steps={_STEPS.value}",
    "--config.eval.every=0",
    *(
      f"--config.algorithm.{field}={value}"
      for field, value in _overrides(_METHODS[method]()).items()
    ),
  )
  summary = json.loads((directory / name / "summary.json").read_text())
  steps = launching.metrics(directory / name)[1:]
  return {
    "eval_before": summary["eval_before"],
    "eval_after": summary["eval_after"],
    "greedy_after": summary["eval_after_greedy"],
    **{x: statistics.mean(line[x] for line in steps) for x in _METRICS},
    "rl_s": summary["rl_s"],
  }


def _table(
  runs: Mapping[str, Sequence[Mapping[str, float]]],
) -> tuple[list[dict[str, Any]], float]:
  """Return a row for each method, and the standard error of a difference."""
  differences = {
    name: [
      mine["eval_after"] - reference["eval_after"]
      for mine, reference in zip(found, runs[_REFERENCE], strict=True)
    ]
    for name, found in runs.items()
  }
  variances = [
    statistics.variance(x) for k, x in differences.items() if k != _REFERENCE
  ]
  count = len(runs[_REFERENCE])
  noise = math.sqrt(statistics.mean(variances or [0.0]) / count)
  rows = []
  for name, found in runs.items():
    difference = statistics.mean(differences[name])
    rows.append(
      {
        "method": name,
        "difference": difference,
        "is_within_noise": abs(difference) <= 2 * noise,
        **{x: statistics.mean(run[x] for run in found) for x in found[0]},
        "seeds": [run["eval_after"] for run in found],
      }
    )
  return rows, noise


def main(argv: Sequence[str]) -> None:
  """Make the runs that are missing, and print the table."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  runs: dict[str, list[dict[str, float]]] = {x: [] for x in _NAMES.value}
  for seed in map(int, _SEEDS.value):
    for name, found in runs.items():
      found.append(_run(name, seed))
  rows, noise = _table(runs)
  print(launching.markdown(rows))
  print(json.dumps({"table": rows, "noise": noise}))


if __name__ == "__main__":
  app.run(main)
