"""The methods that benchmarks/algorithms.py compares, and what it finds."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import inspect
import json
import math
import pathlib
import statistics
import sys
from typing import Any

import launching
import numpy as np
from scipy import stats

from jaxrl_async.config import algorithms
from jaxrl_async.config import sections

_SEQUENCE_MEAN = sections.BehaviorWeightLevel.SEQUENCE_MEAN
# Each makes a section of the algorithm.
METHODS: dict[str, Callable[[], sections.AlgorithmSection]] = {
  **{
    name: function
    for name, function in inspect.getmembers(algorithms)
    if isinstance(function, functools.partial)
  },
  "sequence_weights": functools.partial(
    algorithms.areal,
    behavior_weight_level=_SEQUENCE_MEAN,
    behavior_weight_floor=0.9,
    behavior_weight_cap=1.1,
  ),
  "sequence_mask": functools.partial(algorithms.areal, sequence_kl_bound=0.02),
  "dual_clip": functools.partial(algorithms.areal, dual_clip=3.0),
  "two_epochs": functools.partial(algorithms.areal, num_epochs=2),
  "gspo_02": functools.partial(algorithms.gspo, clip_low=0.02, clip_high=0.02),
  "gspo_05": functools.partial(algorithms.gspo, clip_low=0.05, clip_high=0.05),
}
# The method that the others are compared with.
REFERENCE = "grpo"
# Seconds of a train step, and of start and evaluation, on two idle cores.
_STEP_S, _START_S = 0.6, 30
# Metrics whose mean over the steps is printed.
_METRICS = (
  "policy/clip_frac",
  "policy/entropy",
  "offpolicy/ess",
  "offpolicy/left_out_frac",
  "offpolicy/behavior_weight_capped_frac",
  "staleness/mean",
  "time/update_s",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """Which runs are compared.

  Attributes:
    directory: where runs and results are kept.
    methods: names of `METHODS`, `REFERENCE` among them.
    seeds: each method is run with each of them.
    num_steps: of each run.
    further: settings of all runs and of their warm starts, as "a.b=c".
  """

  directory: pathlib.Path
  methods: Sequence[str]
  seeds: Sequence[int]
  num_steps: int
  further: Sequence[str] = ()

  def to_be_made(self) -> str:
    """Return how many runs are missing, and about how long they take."""
    names = [f"{name}_{seed}" for seed in self.seeds for name in self.methods]
    usual_s = _STEP_S * self.num_steps + _START_S
    return launching.to_be_made(self.directory, names, usual_s)


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


def _made(
  comparison: Comparison,
  method: str,
  seed: int,
  launch_once: Callable[..., Any],
) -> dict[str, float]:
  """Return the numbers of one run, which may have been made before."""
  section = _overrides(METHODS[method]())
  workdir = launching.after_warm_start(
    comparison.directory,
    f"{method}_{seed}",
    config=launching.ROOT / "configs" / "staleness.py",
    seed=seed,
    further=comparison.further,
    fields={
      "train.num_steps": comparison.num_steps,
      "eval.every": 0,
      **{f"algorithm.{field}": value for field, value in section.items()},
    },
    launch_once=launch_once,
  )
  summary = json.loads((workdir / "summary.json").read_text())
  steps = launching.metrics(workdir)[1:]
  return {
    "eval_before": summary["eval_before"],
    "eval_after": summary["eval_after"],
    "greedy_after": summary["eval_after_greedy"],
    **{x: statistics.mean(line[x] for line in steps) for x in _METRICS},
    "rl_s": summary["rl_s"],
  }


def made(
  comparison: Comparison,
  launch_once: Callable[..., Any] = launching.launch_once,
) -> dict[str, list[dict[str, float]]]:
  """Make the runs that are missing; return the numbers of all, by method.

  Args:
    comparison: says which.
    launch_once: as in `launching`.
  """
  print(comparison.to_be_made(), file=sys.stderr)
  found: dict[str, list[dict[str, float]]] = {
    name: [] for name in comparison.methods
  }
  for seed in comparison.seeds:
    for name, runs in found.items():
      runs.append(_made(comparison, name, seed, launch_once))
  return found


def noise(values: np.ndarray) -> tuple[float, int]:
  r"""Return the standard error of a difference of two methods, and its freedom.

  The accuracy of method m with seed s is taken as the sum of a number of the
  method, one of the seed, and a chance e of the same variance everywhere:

    y_ms = mu_m + nu_s + e_ms
    sigma^2 = sum (y_ms - y_m. - y_.s + y_..)^2 / ((M - 1) (S - 1))
    error = sqrt(2 sigma^2 / S)

  where the dots are means. Both methods of a difference have their own chance.
  (The deviations of the differences themselves would all share that of the
  method they are taken from, and so have about S - 1 degrees of freedom.)

  Args:
    values: [M, S] accuracies.
  """
  num_methods, num_seeds = values.shape
  residuals = (
    values
    - values.mean(axis=1, keepdims=True)
    - values.mean(axis=0, keepdims=True)
    + values.mean()
  )
  freedom = (num_methods - 1) * (num_seeds - 1)
  variance = float((residuals**2).sum()) / freedom
  return math.sqrt(2 * variance / num_seeds), freedom


def said(
  runs: Mapping[str, Sequence[Mapping[str, float]]],
) -> dict[str, Any]:
  """Return what the last line says of the runs of each method, by seed."""
  values = np.array([[x["eval_after"] for x in runs[name]] for name in runs])
  error, freedom = noise(values)
  bound = float(stats.t.ppf(0.975, freedom)) * error
  reference = values[[*runs].index(REFERENCE)]
  rows = []
  for (name, found), own in zip(runs.items(), values, strict=True):
    difference = float((own - reference).mean())
    rows.append(
      {
        "method": name,
        "difference": difference,
        "is_within_noise": abs(difference) <= bound,
        **{x: statistics.mean(run[x] for run in found) for x in found[0]},
        "seeds": own.tolist(),
      }
    )
  return {"table": rows, "noise": error, "degrees_of_freedom": freedom}
