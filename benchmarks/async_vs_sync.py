"""Asynchronous against synchronous training: wall-clock time and accuracy.

    python benchmarks/async_vs_sync.py

For each seed a warm start is made once, and all runs begin from it. Each run
does the workload of configs/async_vs_sync.py for the same number of train steps
on the same devices: `sync` with max_staleness=0, `async` with max_staleness=4,
and `recompute` like `async` with caches that are recomputed at each adoption
instead of kept. Each is a process of its own. A short run before them fills
XLA's persistent cache, so that they find their programs there;
`num_compilations` counts the programs that they did not find. Odd seeds run in
the reverse order, so that a machine that becomes slower favours no side.

Two CPU devices of one host share its cores. Training alone uses both, so
overlapping it with generation gains less than it would on two accelerators.

The speedup is that of the steps after the third, evaluation and start left out.
That of the RL stage and of the whole run are reported beside it.

Prints a table and, as the last line, one JSON object. Hardware: two CPU cores.
Time: 20 to 40 minutes. Result: docs/project/results.md has the table.
"""

from collections.abc import Sequence
import json
import pathlib
import statistics
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import launching

_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, comma-separated.")
flags.register_validator(
  _SEEDS,
  lambda seeds: (
    all(map(str.isdecimal, seeds)) and 0 < len(seeds) == len({*seeds})
  ),
  message="different integers, separated by commas, as 0,1,2",
)
_TRAIN_STEPS = flags.DEFINE_integer(
  "train_steps", 0, "Steps of each run; 0 takes the config's.", lower_bound=0
)
_WARM_START_STEPS = flags.DEFINE_integer(
  "warm_start_steps",
  0,
  "Steps of each warm start; 0 takes the config's.",
  lower_bound=0,
)

_CONFIG = "configs/async_vs_sync.py"
# The variant of the config, and further flags.
_VARIANTS = {
  "async": ("", ()),
  "recompute": ("", ("--config.rollout.kv_on_adopt=recompute",)),
  "sync": (":sync", ()),
}
# Enough steps for adoptions in the middle of sequences of any length, which use
# more programs.
_CACHE_STEPS = 8
_FIRST_STEPS = 3  # that are not timed
# Means over the steps that are timed, of the run's metrics.
_METRICS = {
  "step_s": "time/step_s",
  "update_s": "time/update_s",
  "adopt_s": "time/adopt_s",
  "slot_occupancy": "rollout/slot_occupancy",
  "tokens_mean": "completion/tokens_mean",
  "tokens_max": "completion/tokens_max",
}
# Fields of the summary in the order of the table, and how they are shown.
_COLUMNS = {
  "step_s": ".3f",
  "update_s": ".3f",
  "adopt_s": ".3f",
  "slot_occupancy": ".2f",
  "tokens_mean": ".0f",
  "tokens_max": ".0f",
  "rl_s": ".1f",
  "wall_s": ".1f",
  "eval_before": ".3f",
  "eval_after": ".3f",
  "rollout_busy_frac": ".2f",
  "train_busy_frac": ".2f",
  "versions_per_trajectory_mean": ".2f",
  "staleness_max": "d",
  "num_compilations": "d",
}


def _measure(seed: int, directory: pathlib.Path) -> dict[str, Any]:
  """Return the summaries of one seed, by the names of `_VARIANTS`."""

  def arguments(name: str, variant: str) -> list[str]:
    return [
      f"--config={launching.ROOT / _CONFIG}{variant}",
      f"--config.seed={seed}",
      f"--workdir={directory / f'{name}_{seed}'}",
      f"--compile_cache={directory / 'compile_cache'}",
    ]

  def train(name: str, variant: str, *overrides: str) -> dict[str, Any]:
    print(f"seed {seed}: {name}", file=sys.stderr)
    summary = launching.launch(
      "train.py",
      *arguments(name, variant),
      f"--config.warm_start.checkpoint={params}",
      *overrides,
    )
    steps = launching.metrics(directory / f"{name}_{seed}")
    steps = [row for row in steps if row["step"] > _FIRST_STEPS]
    for column, key in _METRICS.items():
      summary[column] = statistics.fmean(x[key] for x in steps if key in x)
    return summary

  print(f"seed {seed}: warm start", file=sys.stderr)
  steps = _WARM_START_STEPS.value
  params = launching.launch(
    "sft.py",
    *arguments("warm_start", ""),
    *([f"--config.warm_start.num_steps={steps}"] if steps else []),
  )["params"]
  for name in ("async", "recompute"):
    variant, flags_of_variant = _VARIANTS[name]
    train(
      f"filling_the_cache_{name}",
      variant,
      *flags_of_variant,
      f"--config.train.num_steps={_CACHE_STEPS}",
    )
  steps = _TRAIN_STEPS.value
  overrides = [f"--config.train.num_steps={steps}"] if steps else []
  return {
    name: train(name, _VARIANTS[name][0], *_VARIANTS[name][1], *overrides)
    for name in (reversed(_VARIANTS) if seed % 2 else _VARIANTS)
  }


def _table(rows: Sequence[dict[str, Any]]) -> str:
  """Return a Markdown table with a line for each run."""
  cells = [["seed", "run", *_COLUMNS]]
  cells.append(["---"] * len(cells[0]))
  for row in rows:
    for name in _VARIANTS:
      values = [f"{row[name][n]:{form}}" for n, form in _COLUMNS.items()]
      cells.append([str(row["seed"]), name, *values])
  return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _row(seed: int, summaries: dict[str, Any]) -> dict[str, Any]:
  """Return what the result keeps of a seed."""
  row: dict[str, Any] = {"seed": seed}
  for name, summary in summaries.items():
    row[name] = {column: summary[column] for column in _COLUMNS}
  for speedup, name, time in (
    ("speedup", "async", "step_s"),
    ("recompute_speedup", "recompute", "step_s"),
    ("rl_speedup", "async", "rl_s"),
    ("wall_speedup", "async", "wall_s"),
  ):
    row[speedup] = summaries["sync"][time] / summaries[name][time]
  return row


def main(argv: Sequence[str]) -> None:
  """Measure every seed and print the results."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  rows = []
  with tempfile.TemporaryDirectory(prefix="async_vs_sync_") as directory:
    for seed in map(int, _SEEDS.value):
      rows.append(_row(seed, _measure(seed, pathlib.Path(directory))))
  print(_table(rows))

  def eval_after(name: str) -> float:
    return statistics.median(row[name]["eval_after"] for row in rows)

  speedups = [row["speedup"] for row in rows]
  result: dict[str, Any] = {
    "speedup_median": statistics.median(speedups),
    "speedup_min": min(speedups),
    "speedup_max": max(speedups),
    **{f"eval_{name}": eval_after(name) for name in _VARIANTS},
    "seeds": rows,
  }
  print(
    f"speedup of a step: median {result['speedup_median']:.2f},"
    f" {result['speedup_min']:.2f} to {result['speedup_max']:.2f}"
    f" over {len(rows)} seeds; of the RL stage"
    f" {statistics.median(row['rl_speedup'] for row in rows):.2f}, of the whole"
    f" run {statistics.median(row['wall_speedup'] for row in rows):.2f}"
  )
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
