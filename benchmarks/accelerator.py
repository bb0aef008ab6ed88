"""Everything that is to be known about a new GPU or TPU, within ten minutes.

    uv run --extra cuda13 benchmarks/accelerator.py
    uv run --extra tpu benchmarks/accelerator.py

The parts are programs of their own, one after the other, so that each has the
device to itself and one that fails does not take the others with it:

    kernels   every attention kernel of the platform against plain XLA
              (accelerator_kernels.py)
    generate  128 slots, prompts of 64 to 256 tokens and lognormal completions
              (generate.py)
    train     proximal logprobs and an update of packed rows of 8,192 tokens
              (train_step.py)
    transfer  a version of the weights through each channel, compared bit for
              bit (weight_transfer.py)
    run       an asynchronous run from warm start to evaluation, with the
              quickstart's small model (launch/train.py)

generate, train and transfer have Qwen2 of 1.5B with random weights, in
bfloat16; train has the 0.5B where a device has less than 40 GB. One device is
used, which both slices of the run share; with two, the run has one for each.

Prints one table: `part`, `measure`, `value`, and `share` of what this device
reaches with programs that do nothing else, where that is known. Each part's own
output is in --results. Exits with 1 if a part failed. The last line of
standard output is one JSON object: `rows`, `device`, `parts` with the seconds
and the error of each, and `wall_s`.

Hardware: a GPU or a TPU. On a CPU the models have a million parameters and the
run is shorter, to try the program itself: three minutes. Result:
docs/project/notebook.md, "On an H200".
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import side_by_side

_HERE = pathlib.Path(__file__).resolve().parent
_NAMES = ("kernels", "generate", "train", "transfer", "run")
_PARTS = flags.DEFINE_list(
  "parts", list(_NAMES), f"Which of {', '.join(_NAMES)} to run."
)
flags.register_validator(
  _PARTS, lambda parts: set(parts) <= set(_NAMES), "names of parts"
)
_LIMIT_S = flags.DEFINE_float(
  "limit_s",
  600.0,
  "Seconds for everything. A part that takes half of what is left, or the last"
  " one all of it, has failed.",
  lower_bound=1.0,
)
_RESULTS = flags.DEFINE_string(
  "results", "", "Directory for what parts write; by default a temporary one."
)
_COLUMNS = {"part": "", "measure": "", "value": "", "share": ".2f"}
# Prints what `Device` holds.
_FIND_DEVICE = """
import json
import jax
from jaxrl_async.devices import topology
device = jax.devices()[0]
found = device.platform, device.device_kind, topology.memory_bytes(device)
print(json.dumps(dict(zip(("platform", "name", "memory_bytes"), found))))
"""
# Less than this does not hold state and activations of 1.5B.
_LARGE_BYTES = 40e9
# Of the run: train steps and, before them, steps of supervised training.
_RUN_STEPS = 30
_WARM_START_STEPS = 400
_CPU_RUN_STEPS = 8
_CPU_WARM_START_STEPS = 100


class PartError(Exception):
  """A part ended without a result; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """What a process of its own found before the first part.

  Attributes:
    memory_bytes: that programs may use; None if unknown.
  """

  platform: str
  name: str
  memory_bytes: float | None

  @property
  def is_cpu(self) -> bool:
    """Return whether there is no accelerator."""
    return self.platform == "cpu"

  @property
  def is_large(self) -> bool:
    """Return whether it is known to hold the training of 1.5B."""
    return (self.memory_bytes or 0.0) >= _LARGE_BYTES


Row = dict[str, Any]


def _row(measure: str, value: str, share: float | None = None) -> Row:
  return {"measure": measure, "value": value, "share": share}


def kernels_rows(result: dict[str, Any]) -> list[Row]:
  """Return a row for each kernel: whether it agrees, and its time."""
  rows = []
  for row in result["rows"]:
    value = row["verdict"]
    if row["ms"] is not None and row["xla_ms"] is not None:
      value += f"; {row['ms']:.3f} ms, XLA {row['xla_ms']:.3f} ms"
    rows.append(_row(f"{row['use']}, {row['kernel']}", value))
  return rows


def generate_rows(result: dict[str, Any]) -> list[Row]:
  """Return rates of generation and of the device."""
  (row,) = result["rows"]
  rows = [
    _row(f"{row['case']}, tokens/s", f"{row['tokens_per_s']:,.0f}"),
    _row(
      "decode step, share of the least time",
      f"{row['ms_per_step']:.2f} ms",
      row["roof_frac"],
    ),
    _row("slots that write", f"{row['occupancy']:.1%}"),
    _row("time outside of device calls", f"{row['host_frac']:.1%}"),
  ]
  for dtype, peak in result["peaks"].items():
    rows.append(
      _row(
        f"device, {dtype}",
        f"{peak['bytes_per_s'] / 1e9:,.0f} GB/s,"
        f" {peak['flops_per_s'] / 1e12:,.2f} TFLOP/s",
      )
    )
  return rows


def train_rows(result: dict[str, Any]) -> list[Row]:
  """Return rates of a train step."""
  (row,) = result["rows"]
  return [
    _row(
      f"{row['case']}, tokens/s of an update, share of the matmul rate",
      f"{row['tokens_per_s']:,.0f}",
      row["mfu"],
    ),
    _row("attention over packed rows", row["attention"]),
    _row("proximal logprobs over the update", f"{row['proximal']:.2f}"),
    _row("memory of the update", f"{row['peak_bytes'] / 1e9:.2f} GB"),
    _row("compilation of its programs", f"{row['compile_s']:.0f} s"),
  ]


def transfer_rows(result: dict[str, Any]) -> list[Row]:
  """Return, for each channel, who waits for a version and how long."""
  return [
    _row(
      f"{row['megabytes']:,.0f} MB through {row['channel']}",
      f"trainer {row['cast_ms'] + row['publish_ms']:.0f} ms, there after"
      f" {row['ready_ms']:.0f} ms, adopted in {row['adopt_ms']:.0f} ms,"
      f" {row['gb_per_s']:.2f} GB/s",
    )
    for row in result["rows"]
  ]


def run_rows(result: dict[str, Any]) -> list[Row]:
  """Return what a whole run achieved."""
  return [
    _row("train steps", f"{result['train_steps']}"),
    _row(
      "start to end; of the train steps; to the first one",
      f"{result['wall_s']:.0f} s; {result['rl_s']:.0f} s;"
      f" {result['first_step_s']:.0f} s",
    ),
    _row(
      "accuracy before and after",
      f"{result['eval_before']:.3f}, {result['eval_after']:.3f}",
    ),
    _row("largest staleness", f"{result['staleness_max']}"),
    _row("training busy", f"{result['train_busy_frac']:.0%}"),
    _row("generation busy", f"{result['rollout_busy_frac']:.0%}"),
  ]


_ROWS: dict[str, Callable[[dict[str, Any]], list[Row]]] = {
  "kernels": kernels_rows,
  "generate": generate_rows,
  "train": train_rows,
  "transfer": transfer_rows,
  "run": run_rows,
}


def arguments_of(
  part: str, device: Device, directory: pathlib.Path
) -> list[str]:
  """Return the program of a part, and its arguments."""

  def benchmark(name: str, *arguments: str) -> list[str]:
    return [str(_HERE / f"{name}.py"), *arguments]

  if part == "kernels":
    return benchmark("accelerator_kernels")
  if part == "generate":
    row = "cpu-1m" if device.is_cpu else "1.5b-128x1k"
    return benchmark(
      "generate", f"--rows={row}", "--repeats=1", "--notransformers"
    )
  if part == "train":
    row = "1.5b-8k" if device.is_large else "0.5b-8k"
    row = "cpu-1m" if device.is_cpu else row
    return benchmark("train_step", f"--rows={row}", "--repeats=3", "--notorch")
  if part == "transfer":
    row, dtype = ("1m", "float32") if device.is_cpu else ("1.5b", "bfloat16")
    return benchmark(
      "weight_transfer", f"--rows={row}", f"--dtype={dtype}", "--repeats=3"
    )
  steps, warm_start = _RUN_STEPS, _WARM_START_STEPS
  dtypes = ["model.compute_dtype=bfloat16", "rollout.dtype=bfloat16"]
  if device.is_cpu:
    steps, warm_start, dtypes = _CPU_RUN_STEPS, _CPU_WARM_START_STEPS, []
  settings = [
    f"train.num_steps={steps}",
    f"warm_start.num_steps={warm_start}",
    *dtypes,
  ]
  return [
    str(_HERE.parent / "launch" / "train.py"),
    f"--config={_HERE.parent / 'configs' / 'quickstart.py'}",
    f"--workdir={directory / 'run'}",
    *(f"--config.{setting}" for setting in settings),
  ]


def run_part(
  arguments: Sequence[str], output: pathlib.Path, limit_s: float
) -> dict[str, Any]:
  """Run a Python program; return the JSON of its last line.

  Args:
    arguments: of the interpreter: a file, or -c and a text, and what follows.
    output: file for what it prints, without `.out` and `.err`.
    limit_s: after which it is killed.

  Raises:
    PartError: it failed, or did not end in time.
  """
  out, err = (output.with_suffix(suffix) for suffix in (".out", ".err"))
  with out.open("w") as stdout, err.open("w") as stderr:
    process = subprocess.Popen(
      [sys.executable, *arguments], stdout=stdout, stderr=stderr
    )
    try:
      code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
      raise PartError(f"it did not end in {limit_s:.0f} s; see {out}") from None
  if code:
    said = err.read_text(errors="replace").strip().splitlines()
    reason = said[-1] if said else "no message"
    raise PartError(f"exit code {code}: {reason}; see {err}")
  return json.loads(out.read_text().strip().splitlines()[-1])


def measure(
  parts: Sequence[str], directory: pathlib.Path, limit_s: float
) -> dict[str, Any]:
  """Run the parts in order; return the JSON object that is printed last.

  Args:
    parts: their names.
    directory: for their outputs.
    limit_s: for all of them together.

  Raises:
    PartError: no device was found.
  """
  start_s = time.monotonic()
  device = Device(
    **run_part(["-c", _FIND_DEVICE], directory / "device", limit_s)
  )
  rows: list[Row] = []
  ended: dict[str, Any] = {}
  wanted = [part for part in _NAMES if part in parts]
  for part in wanted:
    print(f"{part}: ", end="", flush=True)
    part_s, error = time.monotonic(), ""
    left_s = limit_s - (part_s - start_s)
    try:
      result = run_part(
        arguments_of(part, device, directory),
        directory / part,
        max(0.1, left_s if part == wanted[-1] else left_s / 2),
      )
      rows += [{"part": part, **row} for row in _ROWS[part](result)]
    except PartError as failed:
      error = str(failed)
      rows.append({"part": part, **_row("failed", error)})
    wall_s = time.monotonic() - part_s
    ended[part] = {"wall_s": round(wall_s, 1), "error": error}
    print(error or f"{wall_s:.0f} s", flush=True)
  return {
    "rows": rows,
    "device": device.name,
    "num_cores": len(os.sched_getaffinity(0)),
    "parts": ended,
    "wall_s": round(time.monotonic() - start_s, 1),
  }


def main(argv: Sequence[str]) -> None:
  """Run the parts and print the table."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  directory = _RESULTS.value or tempfile.mkdtemp(prefix="accelerator_")
  path = pathlib.Path(directory).absolute()
  path.mkdir(parents=True, exist_ok=True)
  print(f"output: {path}")
  try:
    result = measure(_PARTS.value, path, _LIMIT_S.value)
  except PartError as error:
    sys.exit(f"error: no device: {error}")
  print(f"device: {result['device']}")
  print(side_by_side.table(result["rows"], _COLUMNS))
  print(json.dumps(result))
  if any(part["error"] for part in result["parts"].values()):
    sys.exit(1)


if __name__ == "__main__":
  app.run(main)
