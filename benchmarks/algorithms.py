"""Each published method on the task of the quickstart, for a few steps.

    python benchmarks/algorithms.py --methods=areal,gspo --seeds=0,1 --steps=10

For each seed a warm start is made once, and every run begins from it. A run is
configs/quickstart.py with the fields in which `config.algorithms` differs from
the defaults. Group size, minibatches and learning rate are those of that file,
which were chosen for decoupled PPO: the comparison says that a method trains,
and not which one is best.

Prints one JSON line for each run, with its accuracies, the mean reward of the
first and of the last steps, and what the metrics say of its updates. Hardware:
two CPU cores.
"""

from collections.abc import Sequence
import dataclasses
import inspect
import json
import pathlib
import sys
import tempfile
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

_NAMES = flags.DEFINE_list("methods", [*_METHODS], "Functions of algorithms.")
flags.register_validator(
  _NAMES,
  lambda names: set(names) <= _METHODS.keys(),
  message=f"of {', '.join(_METHODS)}, separated by commas",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1"], "Seeds, comma-separated.")
flags.register_validator(
  _SEEDS,
  lambda seeds: all(map(str.isdecimal, seeds)) and len(seeds) > 0,
  message="integers, separated by commas, as 0,1",
)
_STEPS = flags.DEFINE_integer("steps", 10, "Steps of each run.", lower_bound=2)
_WARM_START_STEPS = flags.DEFINE_integer(
  "warm_start_steps", 600, "Steps of each warm start.", lower_bound=1
)

# Metrics whose mean over the steps is printed.
_MEANS = (
  "policy/grad_norm",
  "policy/clip_frac",
  "policy/entropy",
  "offpolicy/ess",
  "offpolicy/left_out_frac",
  "time/update_s",
)


def _overrides(section: sections.AlgorithmSection) -> list[str]:
  """Return the flags for the fields that differ from the defaults."""
  usual = sections.AlgorithmSection()
  names = [field.name for field in dataclasses.fields(section)]
  values = {name: getattr(section, name) for name in names}
  return [
    f"--config.algorithm.{name}={getattr(value, 'value', value)}"
    for name, value in values.items()
    if value != getattr(usual, name)
  ]


def _row(
  name: str, seed: int, summary: dict[str, Any], workdir: pathlib.Path
) -> dict[str, Any]:
  """Return what is printed of a run."""
  text = (workdir / "metrics.jsonl").read_text()
  steps = [json.loads(line) for line in text.splitlines()][1:]

  def mean(metric: str, lines: Sequence[dict[str, Any]]) -> float:
    found = [line[metric] for line in lines]
    return sum(found) / len(found)

  few = max(1, len(steps) // 4)
  return {
    "method": name,
    "seed": seed,
    "steps": len(steps),
    "eval_before": summary["eval_before"],
    "eval_after": summary["eval_after"],
    "reward_first": mean("reward/mean", steps[:few]),
    "reward_last": mean("reward/mean", steps[-few:]),
    **{metric: mean(metric, steps) for metric in _MEANS},
    "rl_s": summary["rl_s"],
  }


def _measure(seed: int, directory: pathlib.Path) -> None:
  """Train one seed by each method, and print a line for each."""

  def arguments(name: str) -> list[str]:
    return [
      f"--config={launching.ROOT / 'configs' / 'quickstart.py'}",
      f"--config.seed={seed}",
      f"--workdir={directory / f'{name}_{seed}'}",
      f"--compile_cache={directory / 'compile_cache'}",
    ]

  print(f"seed {seed}: warm start", file=sys.stderr)
  params = launching.launch(
    "sft.py",
    *arguments("warm_start"),
    f"--config.warm_start.num_steps={_WARM_START_STEPS.value}",
  )["params"]
  for name in _NAMES.value:
    print(f"seed {seed}: {name}", file=sys.stderr)
    summary = launching.launch(
      "train.py",
      *arguments(name),
      f"--config.warm_start.checkpoint={params}",
      f"--config.train.num_steps={_STEPS.value}",
      "--config.eval.every=0",
      *_overrides(_METHODS[name]()),
    )
    row = _row(name, seed, summary, directory / f"{name}_{seed}")
    print(json.dumps(row), flush=True)


def main(argv: Sequence[str]) -> None:
  """Measure every seed."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  with tempfile.TemporaryDirectory(prefix="algorithms_") as directory:
    for seed in map(int, _SEEDS.value):
      _measure(seed, pathlib.Path(directory))


if __name__ == "__main__":
  app.run(main)
