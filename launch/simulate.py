"""Predict the throughput of a cluster, without its devices.

python launch/simulate.py --preset=areal_1p5b

The controller's buffer, its bound on staleness and its batches are simulated
with the rates of a preset: synchronous, overlapped by one step, and
asynchronous under several bounds. Flags replace single numbers of the preset.
docs/scaling.md says where the rates come from and how far they can be trusted.

Prints a table and, as the last line, one JSON object: `preset`, `devices`,
`rollout_frac`, `slots`, `rows` (each with `mode`, `staleness`, `tokens_per_s`,
`step_s`, `train_busy` and `speedup` over synchronous).
"""

import command_line  # isort: skip, first, as in the other scripts

import dataclasses
import json
from typing import Any

from absl import flags

from jaxrl_async.config import sections

# Slow imports are made where they are used, after all checks.

_PRESET = flags.DEFINE_string(
  "preset", "", "areal_1p5b, areal_7b, areal_14b, areal_32b, tpu_1p5b_v5e, ..."
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
_STEPS = flags.DEFINE_integer("steps", 24, "Train steps to simulate.", 12)
_TPU_CHIPS = 64


def _check() -> None:
  sections.require(
    all(map(str.isdecimal, _BOUNDS.value)),
    "staleness",
    "must be integers, separated by commas, as 1,2,4",
  )


def _cluster() -> Any:
  """Return the cluster of the preset and of the other flags."""
  from jaxrl_async.simulation import presets

  kind, _, name = _PRESET.value.partition("_")
  sections.require(
    _PRESET.value in presets.names(),
    "preset",
    f"{sections.shown(_PRESET.value)}; use {', '.join(presets.names())}",
  )
  if kind == "areal":
    cluster = presets.areal(name)
  else:
    cluster = presets.tpu(name, _TPU_CHIPS)
  given = {
    "num_devices": _DEVICES.value,
    "rollout_frac": _FRAC.value,
    "slots": _SLOTS.value,
    "groups_per_step": _GROUPS.value,
  }
  return dataclasses.replace(
    cluster, **{name: value for name, value in given.items() if value}
  )


def main() -> None:
  """Print the table of a preset."""
  from jaxrl_async.simulation import throughput

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


if __name__ == "__main__":
  command_line.start_without_config(main, _check, needs_jax=False)
