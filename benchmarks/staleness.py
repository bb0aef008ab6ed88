"""What staleness costs: held-out accuracy by the bound and by the objective.

    python benchmarks/staleness.py --directory=/tmp/staleness

The tables, one for each value of --table:

    staleness     max_staleness of 0, 1, 2, 4, 8 and 16, with the coupled and
                  the decoupled objective of PPO; this is the ablation of
                  AReaL (arXiv:2505.24298, table 2)
    interruption  what new weights do to running sequences: recompute, keep and
                  wait of rollout.kv_on_adopt, where a completion takes longer
                  than a train step
    proximal      proximal logprobs that are recomputed, interpolated or left
                  out, by algorithm.proximal

Every run is configs/staleness.py for the same number of train steps, each of
which takes the same number of trajectories. The runs of a seed begin from the
same warm start and are evaluated on the same held-out questions. The mean
staleness of the trained tokens is printed beside the bound, because generation
that is no faster than training leaves a bound unused.

Every run compiles its programs anew. Its first train step takes some seconds
for that, in which generation gets ahead: the bound is used from then on.

Everything is kept in --directory. A command that was stopped goes on there with
the run that it was in. Other settings need another directory.

Prints a table and, as the last line, one JSON object: `table` has a row for
each setting, with its names, and over the seeds `eval_mean` and `eval_std` (of
the sampled accuracy at the end), `difference_mean` and `difference_std` (of the
same minus that of the first row with the same seed), `greedy_mean`,
`realised_staleness` and `wall_s`. --picture draws the curves. Hardware: two CPU
cores. docs/staleness.md has the results.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import statistics
import sys
from typing import Any

from absl import app
from absl import flags
import launching
import numpy as np

_TABLE = flags.DEFINE_enum(
  "table",
  "staleness",
  ["staleness", "interruption", "proximal"],
  "What is compared.",
)
_DIRECTORY = flags.DEFINE_string(
  "directory", None, "Where runs and results are kept.", required=True
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, comma-separated.")
_BOUNDS = flags.DEFINE_list(
  "bounds", ["0", "1", "2", "4", "8", "16"], "Values of max_staleness."
)
for _name in ("seeds", "bounds"):
  flags.register_validator(
    _name,
    lambda values: (
      all(map(str.isdecimal, values)) and 0 < len(values) == len({*values})
    ),
    message="different integers, separated by commas, as 0,1,2",
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

_CONFIG = launching.ROOT / "configs" / "staleness.py"

Settings = Mapping[str, Any]
OBJECTIVES: dict[str, Settings] = {
  "decoupled": {},
  "coupled": {
    "algorithm.loss": "coupled_ppo",
    "algorithm.behavior_weight_level": "none",
    "algorithm.proximal": "reuse",
  },
}


def _rows_of_table() -> list[tuple[dict[str, Any], Settings]]:
  """Return the names of each row, and the settings of its runs."""
  bounds = list(map(int, _BOUNDS.value))
  if _TABLE.value == "staleness":
    return [
      (
        {"max_staleness": bound, "objective": name},
        {"algorithm.max_staleness": bound, **settings},
      )
      for bound in bounds
      for name, settings in OBJECTIVES.items()
    ]
  if _TABLE.value == "interruption":
    return [
      (
        {"max_staleness": bound, "kv_on_adopt": name},
        {
          "algorithm.max_staleness": bound,
          "rollout.kv_on_adopt": name,
          # An evaluation interrupts what is running, whatever kv_on_adopt says.
          "eval.every": 0,
        },
      )
      for bound in bounds
      for name in ("recompute", "keep", "wait")
    ]
  return [
    (
      {"max_staleness": bound, "proximal": name},
      {
        "algorithm.max_staleness": bound,
        "algorithm.proximal": name,
        # One update a step is all that `reuse` can do; see docs/algorithms.md.
        "algorithm.num_minibatches": 1,
        "train.optimizer.learning_rate": 8e-4,
      },
    )
    for bound in bounds
    for name in ("recompute", "loglinear", "reuse")
  ]


def _run(names: dict[str, Any], settings: Settings, seed: int) -> dict:
  """Return the result of one run, which may have been made before."""
  directory = pathlib.Path(_DIRECTORY.value)
  long = ":long" if _TABLE.value == "interruption" else ""
  usual = (
    f"--config={_CONFIG}{long}",
    f"--config.seed={seed}",
    *(f"--config.{setting}" for setting in _SET.value),
  )
  # The runs of a seed begin with the same policy.
  first = f"warm_start{long.replace(':', '_')}_{seed}"
  params = launching.launch_once("sft.py", directory, first, *usual)["params"]
  further = dict(settings) | {"warm_start.checkpoint": params}
  if _STEPS.value:
    further["train.num_steps"] = _STEPS.value
  name = "_".join(map(str, [_TABLE.value, *names.values(), seed]))
  launching.launch_once(
    "train.py",
    directory,
    name,
    f"--compile_cache={directory / name}.compiled",
    *usual,
    *(f"--config.{field}={value}" for field, value in further.items()),
  )
  return {
    "summary": json.loads((directory / name / "summary.json").read_text()),
    "curve": [
      (line["step"], value)
      for line in launching.metrics(directory / name)
      for metric, value in line.items()
      if metric.startswith("eval/held_out/avg@")
    ],
  }


def _row(
  names: dict[str, Any],
  runs: Sequence[dict[str, Any]],
  first: Sequence[dict[str, Any]],
) -> dict:
  """Return what the table says of the runs of one setting.

  Args:
    names: the names of the setting.
    runs: its runs, by seed.
    first: those of the first setting of the table, which it is compared with.
  """

  def mean(field: str) -> float:
    return statistics.mean(run["summary"][field] for run in runs)

  def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0

  accuracies, usual = (
    [run["summary"]["eval_after"] for run in of] for of in (runs, first)
  )
  differences = [x - y for x, y in zip(accuracies, usual, strict=True)]
  return {
    **names,
    "eval_before": mean("eval_before"),
    "eval_mean": statistics.mean(accuracies),
    "eval_std": deviation(accuracies),
    "difference_mean": statistics.mean(differences),
    "difference_std": deviation(differences),
    "greedy_mean": mean("eval_after_greedy"),
    "realised_staleness": mean("staleness_mean"),
    "versions_per_trajectory": mean("versions_per_trajectory_mean"),
    "rl_s": mean("rl_s"),
    "wall_s": mean("wall_s"),
    "seeds": accuracies,
  }


def _draw(path: str, rows: Sequence[dict], curves: np.ndarray) -> None:
  """Draw accuracy by train step, a panel for each bound.

  The bands are one standard deviation of the seeds to each side. Some seeds
  begin with a better policy: before the deviation is taken, each seed is moved
  by the same number in all settings, so that the mean of its settings is that
  of all seeds.

  Args:
    path: the file.
    rows: of the table.
    curves: [setting, seed, evaluation, 2] train steps and accuracies.
  """
  from matplotlib.backends import backend_svg
  from matplotlib.figure import Figure

  steps, values = curves[0, 0, :, 0], curves[..., 1]
  values = values - values.mean(axis=0) + values.mean(axis=(0, 1))
  means = values.mean(axis=1)
  spread = values.std(axis=1, ddof=1) if values.shape[1] > 1 else 0 * means
  bounds = list(dict.fromkeys(row["max_staleness"] for row in rows))
  figure = Figure(figsize=(2.2 * len(bounds), 2.8), layout="constrained")
  panels = figure.subplots(1, len(bounds), sharey=True, squeeze=False)[0]
  for panel, bound in zip(panels, bounds, strict=True):
    panel.set_title(f"max_staleness {bound}", fontsize=10)
    panel.set_xlabel("train step")
    for row, middle, half in zip(rows, means, spread, strict=True):
      if row["max_staleness"] == bound:
        name = next(v for k, v in row.items() if k != "max_staleness")
        panel.plot(steps, middle, label=name)
        panel.fill_between(steps, middle - half, middle + half, alpha=0.2)
  panels[0].set_ylabel("held-out accuracy")
  panels[0].legend()
  backend_svg.FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def main(argv: Sequence[str]) -> None:
  """Make the runs that are missing, and print the table."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  settings = _rows_of_table()
  results: list[list[dict]] = [[] for _ in settings]
  for seed in map(int, _SEEDS.value):
    for found, (names, fields) in zip(results, settings, strict=True):
      found.append(_run(names, fields, seed))
  rows = [
    _row(names, runs, results[0])
    for (names, _), runs in zip(settings, results, strict=True)
  ]
  print(launching.markdown(rows))
  if _PICTURE.value:
    curves = [[run["curve"] for run in runs] for runs in results]
    _draw(_PICTURE.value, rows, np.array(curves))
  print(json.dumps({"table": rows}))


if __name__ == "__main__":
  app.run(main)
