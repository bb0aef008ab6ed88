"""The settings that benchmarks/staleness.py compares, and what it finds.

A table has a row for each setting. Every setting is run once for each seed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import statistics
import sys
from typing import Any

import launching
import numpy as np

Fields = Mapping[str, Any]
OBJECTIVES: dict[str, Fields] = {
  "decoupled": {},
  "coupled": {
    "algorithm.loss": "coupled_ppo",
    "algorithm.behavior_weight_level": "none",
    "algorithm.proximal": "reuse",
  },
}
TABLES = ("staleness", "rates", "interruption", "proximal")
# The variants of the config, and about how many seconds a run takes on two idle
# cores. What has been run in the directory is a better estimate.
TASKS = {"": 110, "sums": 150, "sort": 110, "countdown": 100, "long": 150}
_CONFIG = launching.ROOT / "configs" / "staleness.py"
_SAMPLED = "eval/held_out/avg@"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """What a row of a table is of.

  Attributes:
    names: the columns that tell it from the other rows.
    fields: of the config, which its runs have.
  """

  names: dict[str, Any]
  fields: Fields


def settings(
  table: str, bounds: Sequence[int], rates: Sequence[str]
) -> list[Setting]:
  """Return the settings of a table, for each of these values of max_staleness.

  Args:
    table: one of `TABLES`.
    bounds: values of max_staleness.
    rates: learning rates of the table `rates`, as they are to be written.
  """
  found = []
  for bound in bounds:
    for names, fields in _compared(table, rates):
      found.append(
        Setting(
          names={"max_staleness": bound, **names},
          fields={"algorithm.max_staleness": bound, **fields},
        )
      )
  return found


def _compared(
  table: str, rates: Sequence[str]
) -> Iterable[tuple[dict[str, Any], Fields]]:
  if table == "staleness":
    return [({"objective": x}, fields) for x, fields in OBJECTIVES.items()]
  if table == "rates":
    return [
      (
        {"objective": name, "learning_rate": rate},
        {**fields, "train.optimizer.learning_rate": rate},
      )
      for name, fields in OBJECTIVES.items()
      for rate in rates
    ]
  if table == "interruption":
    # An evaluation interrupts what is running, whatever kv_on_adopt says.
    fields = {"eval.every": 0}
    return [
      ({"kv_on_adopt": x}, {"rollout.kv_on_adopt": x, **fields})
      for x in ("recompute", "keep", "wait")
    ]
  # `reuse` is exact with one update a step, and refused with more.
  return [
    ({"proximal": x}, {"algorithm.proximal": x})
    for x in ("recompute", "loglinear")
  ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """A table, and the runs that it is made of.

  Attributes:
    table: one of `TABLES`.
    task: one of `TASKS`.
    directory: where runs and results are kept.
    seeds: each setting is run with each of them.
    bounds: values of max_staleness.
    rates: learning rates of the table `rates`, as they are to be written.
    num_steps: of each run; 0 takes the config's.
    further: settings of all runs and of their warm starts, as "a.b=c".
  """

  table: str
  task: str
  directory: pathlib.Path
  seeds: Sequence[int]
  bounds: Sequence[int]
  rates: Sequence[str] = ()
  num_steps: int = 0
  further: Sequence[str] = ()

  @property
  def settings(self) -> list[Setting]:
    """Those of the rows."""
    return settings(self.table, self.bounds, self.rates)

  def name(self, setting: Setting, seed: int) -> str:
    """Return the name of a run."""
    parts = [
      self.table,
      self.task,
      *map(str, setting.names.values()),
      str(seed),
    ]
    return "_".join(filter(None, parts))

  def to_be_made(self) -> str:
    """Return how many runs are missing, and about how long they take."""
    names = [self.name(x, s) for s in self.seeds for x in self.settings]
    return launching.to_be_made(self.directory, names, TASKS[self.task])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """What a run has left in its workdir.

  Attributes:
    summary: of `summary.json`.
    lines: of `metrics.jsonl`.
    num_items: held-out questions.
  """

  summary: Mapping[str, Any]
  lines: Sequence[Mapping[str, Any]]
  num_items: int

  @property
  def curve(self) -> list[tuple[int, float]]:
    """The train steps that were evaluated, and the sampled accuracies."""
    return [
      (line["step"], value)
      for line in self.lines
      for metric, value in line.items()
      if metric.startswith(_SAMPLED)
    ]

  @property
  def error(self) -> float:
    """The standard error of the accuracy at the end, over the questions."""
    last = next(
      line
      for line in reversed(self.lines)
      if any(metric.startswith(_SAMPLED) for metric in line)
    )
    return evaluation_error(last, self.num_items)

  def mean(self, metric: str) -> float:
    """Return the mean of a metric over the train steps."""
    return statistics.mean(x[metric] for x in self.lines if metric in x)

  @property
  def tokens_per_s(self) -> float:
    """Trained tokens a second, after the first step with its compilation."""
    tokens = self.summary["tokens"]["trained"]
    steps = self.summary["train_steps"]
    elapsed_s = self.summary["rl_s"] - self.summary["first_step_s"]
    return tokens * (steps - 1) / steps / elapsed_s


def read(workdir: pathlib.Path) -> Run:
  """Return a run that has ended."""
  config = json.loads((workdir / "config.json").read_text())
  return Run(
    summary=json.loads((workdir / "summary.json").read_text()),
    lines=launching.metrics(workdir),
    num_items=config["eval"]["num_items"],
  )


def made(
  comparison: Comparison,
  launch_once: Callable[..., Any] = launching.launch_once,
) -> list[list[Run]]:
  """Make the runs that are missing; return all, by setting and by seed.

  Args:
    comparison: says which.
    launch_once: as in `launching`.
  """
  print(comparison.to_be_made(), file=sys.stderr)
  found: list[list[Run]] = [[] for _ in comparison.settings]
  for seed in comparison.seeds:
    for runs, setting in zip(found, comparison.settings, strict=True):
      runs.append(_made(comparison, setting, seed, launch_once))
  return found


def _made(
  comparison: Comparison,
  setting: Setting,
  seed: int,
  launch_once: Callable[..., Any],
) -> Run:
  """Return a run of one setting, which may have been made before."""
  fields = dict(setting.fields)
  if comparison.num_steps:
    fields["train.num_steps"] = comparison.num_steps
  workdir = launching.after_warm_start(
    comparison.directory,
    comparison.name(setting, seed),
    config=_CONFIG,
    variant=comparison.task,
    seed=seed,
    further=comparison.further,
    fields=fields,
    launch_once=launch_once,
  )
  return read(workdir)


def said(
  comparison: Comparison, runs: Sequence[Sequence[Run]]
) -> dict[str, Any]:
  """Return what the last line of the program says.

  Args:
    comparison: of the runs.
    runs: by setting and by seed.
  """
  rows = [
    row(setting.names, own, runs[0])
    for setting, own in zip(comparison.settings, runs, strict=True)
  ]
  found = {"table": rows, "staleness_gap": staleness_gap(rows)}
  if comparison.table == "rates":
    found["best"] = best_rates(rows)
  if comparison.table == "interruption":
    found["is_interrupted"] = all(
      x["versions_per_trajectory"] > 2
      for x in rows
      if x["kv_on_adopt"] == "recompute"
    )
  return found


def evaluation_error(line: Mapping[str, Any], num_items: int) -> float:
  r"""Return the standard error of a sampled accuracy.

  With c_q of k answers to question q right,

    error = sqrt(var_q(c_q / k) / (Q - 1))

  which is that of a bootstrap over the questions: answers to one question are
  not independent. The squares are known from the mean and pass@2,

    mean((c / k)^2) = mean / k + (k - 1) / k (2 mean - pass@2)

  because 2 c / k - pass@2 of a question is its share of pairs that are right.

  Args:
    line: of the metrics, with an evaluation.
    num_items: Q, the number of questions.
  """
  metric = next(name for name in line if name.startswith(_SAMPLED))
  k, mean = int(metric.removeprefix(_SAMPLED)), line[metric]
  square = mean
  if k > 1:
    pairs = 2 * mean - line["eval/held_out/pass@2"]
    square = mean / k + (k - 1) / k * pairs
  return math.sqrt(max(square - mean**2, 0.0) / max(num_items - 1, 1))


def row(
  names: Mapping[str, Any], runs: Sequence[Run], first: Sequence[Run]
) -> dict[str, Any]:
  """Return what a table says of the runs of one setting.

  Args:
    names: of the setting.
    runs: its runs, by seed.
    first: those of the first setting of the table, which it is compared with.
  """

  def mean(field: str) -> float:
    return statistics.mean(run.summary[field] for run in runs)

  def deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0

  accuracies, usual = (
    [run.summary["eval_after"] for run in of] for of in (runs, first)
  )
  differences = [x - y for x, y in zip(accuracies, usual, strict=True)]
  return {
    **names,
    "eval_before": mean("eval_before"),
    "eval_mean": statistics.mean(accuracies),
    "eval_std": deviation(accuracies),
    # The seeds have questions of their own.
    "eval_error": math.hypot(*(run.error for run in runs)) / len(runs),
    "difference_mean": statistics.mean(differences),
    "difference_std": deviation(differences),
    "greedy_mean": mean("eval_after_greedy"),
    "realised_staleness": mean("staleness_mean"),
    "versions_per_trajectory": mean("versions_per_trajectory_mean"),
    "clip_frac": statistics.mean(run.mean("policy/clip_frac") for run in runs),
    "tokens_per_s": statistics.mean(run.tokens_per_s for run in runs),
    "rl_s": mean("rl_s"),
    "wall_s": mean("wall_s"),
    "seeds": accuracies,
    "seeds_staleness": [run.summary["staleness_mean"] for run in runs],
  }


def staleness_gap(rows: Sequence[Mapping[str, Any]]) -> float:
  """Return by how much runs of one seed and one bound differ in staleness.

  Settings whose data is not equally old are not compared by themselves.
  """
  gap = 0.0
  for bound in {x["max_staleness"] for x in rows}:
    of_bound = [
      x["seeds_staleness"] for x in rows if x["max_staleness"] == bound
    ]
    for values in zip(*of_bound, strict=True):
      gap = max(gap, max(values) - min(values))
  return gap


def best_rates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Return the rate with the greatest accuracy for each bound and objective.

  A rate `is_at_end` if no greater or no smaller one was tried, so that a better
  one may lie outside.
  """
  rates = sorted({x["learning_rate"] for x in rows}, key=float)
  found = []
  for bound, objective in dict.fromkeys(
    (x["max_staleness"], x["objective"]) for x in rows
  ):
    own = [
      x
      for x in rows
      if (x["max_staleness"], x["objective"]) == (bound, objective)
    ]
    best = max(own, key=lambda x: x["eval_mean"])
    names = ("learning_rate", "eval_mean", "eval_error", "greedy_mean")
    found.append(
      {
        "max_staleness": bound,
        "objective": objective,
        **{name: best[name] for name in names},
        "is_at_end": best["learning_rate"] in (rates[0], rates[-1]),
      }
    )
  return found


def draw(
  path: str, names: Sequence[Mapping[str, Any]], curves: np.ndarray
) -> None:
  """Draw accuracy by train step, a panel for each bound.

  The bands are one standard deviation of the seeds to each side. Some seeds
  begin with a better policy: before the deviation is taken, each seed is moved
  by the same number in all settings, so that the mean of its settings is that
  of all seeds.

  Args:
    path: the file.
    names: of the settings.
    curves: [setting, seed, evaluation, 2] train steps and accuracies.
  """
  from matplotlib.backends import backend_svg
  from matplotlib.figure import Figure

  steps, values = curves[0, 0, :, 0], curves[..., 1]
  values = values - values.mean(axis=0) + values.mean(axis=(0, 1))
  means = values.mean(axis=1)
  spread = values.std(axis=1, ddof=1) if values.shape[1] > 1 else 0 * means
  bounds = list(dict.fromkeys(x["max_staleness"] for x in names))
  figure = Figure(figsize=(2.2 * len(bounds), 2.8), layout="constrained")
  panels = figure.subplots(1, len(bounds), sharey=True, squeeze=False)[0]
  for panel, bound in zip(panels, bounds, strict=True):
    panel.set_title(f"max_staleness {bound}", fontsize=10)
    panel.set_xlabel("train step")
    for own, middle, half in zip(names, means, spread, strict=True):
      if own["max_staleness"] == bound:
        others = [str(v) for k, v in own.items() if k != "max_staleness"]
        panel.plot(steps, middle, label=", ".join(others))
        panel.fill_between(steps, middle - half, middle + half, alpha=0.2)
  panels[0].set_ylabel("held-out accuracy")
  panels[0].legend()
  backend_svg.FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
