"""What run.exact_resume costs: the tokens that a run trains in a second.

    uv run benchmarks/exact_resume.py
    uv run benchmarks/exact_resume.py --checkpoint_every=1 --repeats=5

A warm start is made once, and all runs begin from it. Each is a process of its
own, with the same config, the same number of train steps and a checkpoint every
few of them:

    fast        without run.exact_resume, as runs are by default
    same_bits   the same, with the flag of XLA that run.exact_resume sets
    exact       with run.exact_resume

So `exact` against `same_bits` is what the cuts cost, and `same_bits` against
`fast` what the flag costs, which matters on CPUs alone. A short run of each
kind fills XLA's persistent cache before. Then the three are repeated in turn,
every second time in the reverse order, so that a machine that becomes slower
favours none. The first three steps, evaluations and the start are left out.

The last line is JSON:

    ratio             tokens per second of `exact` over those of `fast`; the
                      median of the repeats, with ratio_min and ratio_max
    ratio_of_cuts     the same over those of `same_bits`
    cuts              cuts of a run within the steps that are timed
    cut_trajectories  trajectories that a cut interrupts
    cut_tokens        their tokens, which are prefilled again. Where the replica
                      was about to adopt new weights, it would have prefilled
                      them anyway
    cut_s             seconds that training stands still for a checkpoint with a
                      cut, less those without one
    fast, same_bits, exact
                      tokens_per_s, step_s, stood_still_s of a checkpoint, and
                      prefill_per_token: prefilled tokens for each written one;
                      medians of the repeats
    compilations      programs that timed runs did not find in the cache

Hardware: two CPU cores. Time: about twenty minutes beside other work, less
on idle cores. Result: docs/how-to/replay.md.
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

from jaxrl_async.devices import xla_flags
from jaxrl_async.storage import outstanding as outstanding_lib

_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each kind.", 1)
_STEPS = flags.DEFINE_integer("steps", 24, "Train steps of each run.", 5)
_EVERY = flags.DEFINE_integer(
  "checkpoint_every", 4, "Train steps between checkpoints.", 1
)
_CONFIG = flags.DEFINE_string(
  "config", "configs/quickstart.py", "Config file of the runs."
)
_WARM_START_STEPS = flags.DEFINE_integer(
  "warm_start_steps", 0, "Of the warm start; 0 takes the config's.", 0
)

_FIRST_STEPS = 3  # that are not timed
# Of each kind of run: XLA's flags, and those of launch/train.py.
_KINDS = {
  "fast": ("", ()),
  "same_bits": (xla_flags.of_same_bits(), ()),
  "exact": (xla_flags.of_same_bits(), ("--config.run.exact_resume",)),
}
_COLUMNS = ("tokens_per_s", "step_s", "stood_still_s", "prefill_per_token")


def _measure(workdir: pathlib.Path) -> dict[str, float]:
  """Return what a run has measured of its timed steps."""
  steps = launching.metrics(workdir)
  steps = [line for line in steps if line["step"] > _FIRST_STEPS]

  def total(per_second: str) -> float:
    return sum(line[per_second] * line["time/step_s"] for line in steps)

  step_s = [line["time/step_s"] for line in steps]
  # A checkpoint is taken between two steps, and is in the line of the second.
  stood_still_s = [line["checkpoint/stood_still_s"] for line in steps]
  prefilled = sum(
    line["rollout/tokens_per_s"] * line["time/step_s"] * frac / (1 - frac)
    for line in steps
    if (frac := line["rollout/prefill_frac"]) < 1
  )
  return {
    "tokens_per_s": total("train/tokens_per_s") / sum(step_s),
    "step_s": statistics.fmean(step_s),
    "stood_still_s": statistics.median([x for x in stood_still_s if x] or [0]),
    "prefill_per_token": prefilled / (total("rollout/tokens_per_s") or 1),
  }


def _cuts(workdir: pathlib.Path) -> list[list[int]]:
  """Return the lengths of the trajectories that each timed cut interrupted."""
  cuts = []
  for path in (workdir / "checkpoints").iterdir():
    if path.name.isdecimal() and _FIRST_STEPS <= int(path.name) < _STEPS.value:
      groups = [one.group for one in outstanding_lib.read(path)]
      cuts.append(
        [
          len(trajectory.tokens)
          for group in groups
          for trajectory in group.trajectories
          if trajectory.finish_reason is None and trajectory.loss_mask.any()
        ]
      )
  return cuts


def _runs(directory: pathlib.Path) -> list[dict[str, dict[str, Any]]]:
  """Make all runs; return of each repeat what was measured, by kind."""
  cache = f"--compile_cache={directory / 'compile_cache'}"
  config = f"--config={launching.ROOT / _CONFIG.value}"
  num_steps = _WARM_START_STEPS.value
  print("warm start", file=sys.stderr)
  params = launching.launch(
    "sft.py",
    config,
    cache,
    f"--workdir={directory / 'warm_start'}",
    *([f"--config.warm_start.num_steps={num_steps}"] if num_steps else []),
  )["params"]

  def train(name: str, kind: str, num_steps: int) -> dict[str, Any]:
    print(f"{name}: {kind}", file=sys.stderr)
    flags_of_xla, more = _KINDS[kind]
    workdir = directory / f"{name}_{kind}"
    summary = launching.launch(
      "train.py",
      config,
      cache,
      f"--workdir={workdir}",
      f"--config.warm_start.checkpoint={params}",
      f"--config.train.num_steps={num_steps}",
      f"--config.run.checkpoint_every={_EVERY.value}",
      f"--config.run.keep_checkpoints={_STEPS.value + 1}",
      "--config.eval.num_items=8",
      "--config.eval.every=0",
      *more,
      further_xla_flags=flags_of_xla,
    )
    return {
      **_measure(workdir),
      "cuts": _cuts(workdir) if kind == "exact" else [],
      "compilations": summary["num_compilations"],
    }

  for kind in _KINDS:
    train("filling_the_cache", kind, _EVERY.value + _FIRST_STEPS)
  return [
    {
      kind: train(f"repeat_{number}", kind, _STEPS.value)
      for kind in (reversed(_KINDS) if number % 2 else _KINDS)
    }
    for number in range(_REPEATS.value)
  ]


def _result(runs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
  """Return what all runs say."""

  def ratios(other: str) -> list[float]:
    return [x["exact"]["tokens_per_s"] / x[other]["tokens_per_s"] for x in runs]

  medians = {
    kind: {
      name: statistics.median(run[kind][name] for run in runs)
      for name in _COLUMNS
    }
    for kind in _KINDS
  }
  cuts = [lengths for run in runs for lengths in run["exact"]["cuts"]]
  return {
    "ratio": statistics.median(ratios("fast")),
    "ratio_min": min(ratios("fast")),
    "ratio_max": max(ratios("fast")),
    "ratio_of_cuts": statistics.median(ratios("same_bits")),
    "cuts": len(cuts) / len(runs),
    "cut_trajectories": statistics.fmean(map(len, cuts)) if cuts else 0.0,
    "cut_tokens": statistics.fmean(map(sum, cuts)) if cuts else 0.0,
    "cut_s": medians["exact"]["stood_still_s"]
    - medians["same_bits"]["stood_still_s"],
    **medians,
    "compilations": sum(
      x["compilations"] for run in runs for x in run.values()
    ),
  }


def main(argv: Sequence[str]) -> None:
  """Measure, and print the results."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  with tempfile.TemporaryDirectory(prefix="exact_resume_") as directory:
    runs = _runs(pathlib.Path(directory))
  rows = [
    {"repeat": number, "run": kind, **{x: run[kind][x] for x in _COLUMNS}}
    for number, run in enumerate(runs)
    for kind in _KINDS
  ]
  print(launching.markdown(rows))
  print(json.dumps(_result(runs)))


if __name__ == "__main__":
  app.run(main)
