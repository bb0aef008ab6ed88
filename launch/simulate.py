"""Predict the throughput of a cluster, without its devices.

    uv run launch/simulate.py --preset=areal_1p5b
    uv run launch/simulate.py --workdir=RUN
    uv run launch/simulate.py --paper
    uv run launch/simulate.py --slices

The controller's buffer, its bound on staleness and its batches are simulated
with the rates of a preset: synchronous, overlapped by one step, and
asynchronous under several bounds. Flags replace single numbers of the preset.
docs/project/scaling.md says where the rates come from and how far they can be
trusted. With --workdir the rates come from a run that was measured, and the
table has the best split of its devices for each bound instead. With --paper it
has what AReaL's paper reports beside the same simulated, in about two minutes,
and with --slices how fast TPU slices of 16 to 4,096 chips would train, in about
four.

Prints a table and, as the last line, one JSON object: `preset`, `devices`,
`rollout_frac`, `slots`, `rows` (each with `mode`, `staleness`, `tokens_per_s`,
`step_s`, `train_busy` and `speedup` over synchronous). With --workdir it has
`measured_tokens_per_s`, `predicted_tokens_per_s`, and `rows` (`staleness`,
`training_devices`, `slots`, `tokens_per_s`, `flags`), the best first. With
--paper it has `rows` (`what`, `paper`, `simulated`, `difference`, `kind`), and
with --slices `rows` (`name`, `chips`, `synchronous`, `asynchronous`,
`generating`).
"""

import command_line  # isort: skip, first, as in the other scripts

import dataclasses
import json
import pathlib
import sys
from typing import Any

from absl import flags

from jaxrl_async.config import sections

# Slow imports are made where they are used, after all checks. `simulation` is
# beside the benchmarks, not in the package.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

_PRESET = flags.DEFINE_string(
  "preset", "", "areal_1p5b, areal_7b, areal_14b, areal_32b, tpu_1p5b_v5e, ..."
)
_PAPER = flags.DEFINE_boolean(
  "paper", False, "Compare with what AReaL's paper reports."
)
_SLICES = flags.DEFINE_boolean(
  "slices", False, "Compare TPU slices of several sizes."
)
_BOUNDS = flags.DEFINE_list(
  "staleness", ["1", "2", "4", "8"], "Bounds of the asynchronous rows."
)
_DEVICES = flags.DEFINE_integer(
  "devices", 0, "Number of devices; 0 is the preset's.", 0
)
_FRAC = flags.DEFINE_float(
  "rollout_frac", 0.0, "Share of them that generates; 0 is the preset's.", 0, 1
)
_SLOTS = flags.DEFINE_integer(
  "slots", 0, "Slots of a replica; 0 is the preset's.", 0
)
_GROUPS = flags.DEFINE_integer(
  "groups_per_step", 0, "Groups of a train step; 0 is the preset's.", 0
)
_OTHER = flags.DEFINE_string(
  "other_workdir", "", "A run like the one of --workdir, but with other slots."
)
_STEPS = flags.DEFINE_integer("steps", 24, "Train steps to simulate.", 12)
_TPU_CHIPS = 64


def _check() -> None:
  sections.require(
    all(map(str.isdecimal, _BOUNDS.value)),
    "staleness",
    "must be integers, separated by commas, as 1,2,4",
  )
  kinds = (
    _PRESET.value,
    command_line.WORKDIR.value,
    _PAPER.value,
    _SLICES.value,
  )
  sections.require(
    sum(map(bool, kinds)) == 1,
    "preset",
    "give one of --preset, --workdir, --paper and --slices",
  )
  is_run = bool(command_line.WORKDIR.value)
  sections.require(
    is_run or not _OTHER.value, "other_workdir", "needs a --workdir"
  )
  sections.require(
    not is_run or not _FRAC.value,
    "rollout_frac",
    "is looked for with --workdir; leave it out",
  )
  sections.require(
    not is_run or bool(_OTHER.value) or not _SLOTS.value,
    "slots",
    "one run does not tell how long a decode step takes with other slots; give"
    " one with other slots as --other_workdir",
  )


def _cluster() -> Any:
  """Return the cluster of the preset and of the other flags."""
  from simulation import presets

  kind, _, name = _PRESET.value.partition("_")
  sections.require(
    _PRESET.value in presets.names(),
    "preset",
    f"{sections.shown(_PRESET.value)}; use {', '.join(presets.names())}",
  )
  if kind == "areal":
    return _changed(presets.areal(name))
  return _changed(presets.tpu(name, _TPU_CHIPS))


def _changed(cluster: Any) -> Any:
  """Return a cluster with what the flags say."""
  given = {
    "num_devices": _DEVICES.value,
    "rollout_frac": _FRAC.value,
    "slots": _SLOTS.value,
    "groups_per_step": _GROUPS.value,
  }
  return dataclasses.replace(
    cluster, **{name: value for name, value in given.items() if value}
  )


def _advise() -> None:
  """Print what the split of a run's devices should be."""
  from simulation import measured
  from simulation import throughput

  run = measured.read(pathlib.Path(command_line.WORKDIR.value))
  other = measured.read(pathlib.Path(_OTHER.value)) if _OTHER.value else None
  cluster = measured.cluster(run, other)
  bound = run.config.algorithm.max_staleness
  found_per_s = measured.tokens_per_s(run)
  same = throughput.predict(cluster, throughput.Mode.ASYNCHRONOUS, bound)
  print(
    f"measured {found_per_s:.0f} tokens/s, simulated {same.tokens_per_s:.0f},"
    f" with {cluster.num_training(throughput.Mode.ASYNCHRONOUS)} of"
    f" {cluster.num_devices} devices training, {cluster.slots} slots a replica"
    f" and a bound of {bound}"
  )
  slots = [_SLOTS.value or cluster.slots]
  if other is not None and not _SLOTS.value:
    slots = measured.slots_between(run, other)
  if _GROUPS.value:
    run.config.algorithm.groups_per_step = _GROUPS.value
  best = measured.advise(
    _changed(cluster),
    run.config,
    [int(b) for b in _BOUNDS.value],
    slots,
    num_steps=_STEPS.value,
  )
  print("| bound | devices that train | slots | tokens/s | training busy |")
  print("| --- | --- | --- | --- | --- |")
  rows = []
  for one in best:
    found = one.prediction
    rows.append(
      {
        "staleness": one.max_staleness,
        "training_devices": one.num_training,
        "slots": one.slots,
        "tokens_per_s": round(found.tokens_per_s, 1),
        "flags": one.flags,
      }
    )
    print(
      f"| {one.max_staleness} | {one.num_training} | {one.slots} |"
      f" {found.tokens_per_s:.0f} | {found.train_busy:.0%} |"
    )
  print("best:", *best[0].flags)
  print(
    json.dumps(
      {
        "measured_tokens_per_s": round(found_per_s, 1),
        "predicted_tokens_per_s": round(same.tokens_per_s, 1),
        "rows": rows,
      }
    )
  )


def _compare() -> None:
  """Print the modes of a preset."""
  from simulation import throughput

  cluster = _cluster()
  modes = [(throughput.Mode.SYNCHRONOUS, 0), (throughput.Mode.OVERLAPPED, 1)]
  modes += [(throughput.Mode.ASYNCHRONOUS, int(b)) for b in _BOUNDS.value]
  rows: list[dict[str, Any]] = []
  print("| mode | bound | k tokens/s | step, s | training busy | speedup |")
  print("| --- | --- | --- | --- | --- | --- |")
  for mode, bound in modes:
    found = throughput.predict(cluster, mode, bound, num_steps=_STEPS.value)
    first = rows[0]["tokens_per_s"] if rows else found.tokens_per_s
    speedup = found.tokens_per_s / first
    rows.append(
      {
        "mode": mode.value,
        "staleness": bound,
        "tokens_per_s": round(found.tokens_per_s, 1),
        "step_s": round(found.step_s, 2),
        "train_busy": round(found.train_busy, 3),
        "speedup": round(speedup, 3),
      }
    )
    print(
      f"| {mode} | {bound} | {found.tokens_per_s / 1e3:.1f} |"
      f" {found.step_s:.1f} | {found.train_busy:.0%} | {speedup:.2f} |"
    )
  print(
    json.dumps(
      {
        "preset": _PRESET.value,
        "devices": cluster.num_devices,
        "rollout_frac": cluster.rollout_frac,
        "slots": cluster.slots,
        "rows": rows,
      }
    )
  )


def _compare_with_paper() -> None:
  """Print what AReaL's paper reports, and the same simulated."""
  from simulation import areal_comparison

  print("| number | paper | simulated | difference | |")
  print("| --- | --- | --- | --- | --- |")
  rows = []
  for row in areal_comparison.rows(_STEPS.value):
    rows.append(
      dataclasses.asdict(row) | {"difference": round(row.difference, 3)}
    )
    print(
      f"| {row.what} | {row.paper:.4g} | {row.simulated:.4g} |"
      f" {row.difference:+.0%} | {row.kind} |",
      flush=True,
    )
  print(json.dumps({"rows": rows}))


def _compare_slices() -> None:
  """Print how fast TPU slices of several sizes would train."""
  from simulation import slice_sizes

  print("| model | chips | sync, k tokens/s | async | chips that generate |")
  print("| --- | --- | --- | --- | --- |")
  rows = []
  for row in slice_sizes.rows(_STEPS.value):
    rows.append(dataclasses.asdict(row))
    print(
      f"| {row.name} | {row.chips:,} | {row.synchronous / 1e3:.4g} |"
      f" {row.asynchronous / 1e3:.4g} | {row.generating:,} |",
      flush=True,
    )
  print(json.dumps({"rows": rows}))


def main() -> None:
  """Print a table."""
  if _PAPER.value:
    _compare_with_paper()
  elif _SLICES.value:
    _compare_slices()
  elif command_line.WORKDIR.value:
    _advise()
  else:
    _compare()


if __name__ == "__main__":
  command_line.start_without_config(main, _check, needs_jax=False)
