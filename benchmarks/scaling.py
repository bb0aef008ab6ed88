"""Makes the table of docs/project/scaling.md: the TPU configs, compiled.

    uv run --extra tpu-aot benchmarks/scaling.py --results=scaling.jsonl

It compiles 1.5B, 7B and 32B at 8k and 32k tokens, on three slices each, and
runs nothing. One side of a case takes one to eight minutes. What the results
already hold is not compiled again, so the same command continues where it was
stopped. `--only=1p5b:8k` takes the cases whose names begin with that, and
`--sides=training` one side of each case.

The table is on standard output. Its last line is the same as JSON.
"""

from collections.abc import Iterator
import dataclasses
import json
import math
import os
import pathlib
import runpy
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5e-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

from absl import app
from absl import flags
import hlo

from jaxrl_async.assembly import checks
from jaxrl_async.assembly import dry_run
from jaxrl_async.config import mesh_shape
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import topology
from jaxrl_async.devices import tpu_chips
from jaxrl_async.planning import aot

_RESULTS = flags.DEFINE_string(
  "results",
  None,
  "File of results; one line for each side of a case.",
  required=True,
)
_ONLY = flags.DEFINE_string(
  "only", "", "Compile only cases whose names begin with this."
)
_SIDES = flags.DEFINE_multi_enum(
  "sides",
  ["training", "rollout"],
  ["training", "rollout"],
  "Sides of each case to compile.",
)

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_MODELS = {"1p5b": "1.5B", "7b": "7B", "32b": "32B"}
_LENGTHS = ("8k", "32k")
_PROGRAMS = ("proximal", "update", "publish", "prefill", "decode")


def _cases() -> Iterator[tuple[str, Any]]:
  for model in _MODELS:
    file = runpy.run_path(str(_CONFIGS / f"tpu_{model}.py"))
    for length in _LENGTHS:
      for name in file["SLICES"]:
        config = file["get_config"](f"{length}@{name}")
        yield f"{model}:{length}@{name}", config


def _stored(path: pathlib.Path) -> dict[tuple[str, str], dict[str, Any]]:
  lines = path.read_text().splitlines() if path.exists() else []
  return {(x["case"], x["side"]): x for x in map(json.loads, lines)}


def _compile(case: str, side: str, config: Any) -> dict[str, Any]:
  devices = topology.devices(case.partition("@")[2])
  setup = checks.checked(config, devices)
  slices, attention = dry_run.programs(setup)
  # Only in training the data decides how often a loop runs.
  max_trips = setup.max_microbatches if side == "training" else 1
  compiled = []
  for program in slices[side]:
    found = aot.compile_program(program)
    text = found.executable.as_text() if found.executable else ""
    cost = hlo.Module(text, max_trips).cost() if text else hlo.Cost()
    row = dataclasses.asdict(dataclasses.replace(found, executable=None))
    compiled.append(row | {"cost": dataclasses.asdict(cost)})
    print(case, compiled[-1], file=sys.stderr, flush=True)
  return {
    "case": case,
    "side": side,
    "attention": attention,
    "programs": compiled,
  }


def _axes(shape: mesh_lib.MeshShape) -> str:
  sizes = zip(mesh_lib.AXES, shape.sizes, strict=True)
  return " ".join(f"{axis} {size}" for axis, size in sizes if size > 1)


def _row(case: str, config: Any, sides: dict[str, dict[str, Any]]) -> str:
  """Return the table's line of what has been compiled of a case."""
  shape, _, name = case.partition("@")
  model, length = shape.split(":")
  count, kind, sizes = tpu_chips.parse(name)
  chip = tpu_chips.CHIPS[kind]
  slices = {
    side: [
      aot.Compiled(**{k: v for k, v in x.items() if k != "cost"})
      for x in found["programs"]
    ]
    for side, found in sides.items()
  }
  costs = {
    x["name"]: hlo.Cost(**x["cost"])
    for found in sides.values()
    for x in found["programs"]
  }
  num_chips = count * math.prod(map(int, sizes.split("x")))
  shapes = mesh_shape.of_slices(config.mesh, num_chips)
  cells = [_MODELS[model], length, name]
  for side, mesh in zip(_SIDES.default, shapes, strict=True):
    some = slices.get(side)
    memory = max(x.memory_bytes for x in some) / 2**30 if some else 0
    cells += [_axes(mesh), f"{memory:.1f}" if some else ""]
  cells.append(f"{chip.hbm_bytes / 2**30:.2f}")
  by_name = {x.name: x for some in slices.values() for x in some}
  for program in map(by_name.get, _PROGRAMS):
    if program is None or program.refusal:
      cells.append("refused" if program else "")
      continue
    times_s = hlo.roofline_s(costs[program.name], chip)
    bound = max(times_s, key=lambda name: times_s[name])
    cells.append(f"{times_s[bound]:,.3f} {bound}")
  whole = "yes" if len(slices) == len(_SIDES.default) else "so far"
  cells.append(aot.misfit(slices, chip) or whole)
  cells.append(f"{sum(x.compile_s for x in by_name.values()):.0f}")
  return f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> None:
  """Compile what is missing and print the table."""
  del argv
  path = pathlib.Path(_RESULTS.value)
  stored = _stored(path)
  for side in _SIDES.value:
    for case, config in _cases():
      if case.startswith(_ONLY.value) and (case, side) not in stored:
        stored[case, side] = _compile(case, side, config)
        with path.open("a") as file:
          file.write(json.dumps(stored[case, side]) + "\n")
  head = (
    *("model", "tokens", "slice", "train", "GiB", "rollout", "GiB", "of"),
    *(f"{name}, s" for name in _PROGRAMS),
    *("fits", "compiled in, s"),
  )
  print(f"| {' | '.join(head)} |")
  print("| --- " * len(head) + "|")
  for case, config in _cases():
    sides = {side: x for (name, side), x in stored.items() if name == case}
    if sides:
      print(_row(case, config, sides))
  print(json.dumps(list(stored.values())))


if __name__ == "__main__":
  app.run(main)
