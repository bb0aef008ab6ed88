"""Tokens per second of the rollout slice, against transformers and the bound.

    python benchmarks/generate.py

Weights are random, and completions end at lengths that were drawn beforehand
(workloads.py). All sequences are submitted at once, and the clock runs until
the last one has ended. Without --rows, the rows are those of the platform. Each
repeat writes the workload once with the scheduler and once, in a process that
waits meanwhile, with `transformers.generate` (transformers_generate.py, which
needs the dependency group `reference`). Both have done the work once before, so
compiling is not counted.

    tokens_per_s     written tokens over wall-clock time, up to each drawn
                     length
    vs_transformers  ours over theirs, median of the ratios of the repeats
    vs_vllm          with --vllm: the same over vLLM for CPUs (vllm_generate.py,
                     in an environment that uv makes)
    cpu_time_ratio   theirs over ours, in time on cores. Where other work shares
                     the machine, this number is steadier than the one above.
    occupancy        written tokens per slot and decode step, while work waits
    ms_per_step      time of decode calls over the number of their decode steps
    first_token_s    time until the end of the call that wrote a sequence's
                     first token: from its submission, and from the moment when
                     a slot was free for it
    host_frac        share of the wall-clock time outside device calls
    roof_frac        the least time for what was decoded, over the time of the
                     decode calls. The least time of a decode step is the longer
                     of reading weights and cached tokens at the memory
                     bandwidth and of computing the products at the matmul rate,
                     both measured here. Data that fits the last-level cache may
                     be read faster than that.

With --adopt the rows are different: other weights are adopted every few calls,
with caches recomputed or kept, and a column has the time of one adoption with
all slots busy.

Hardware: two CPU cores, float32, for the rows cpu-1m, cpu-10m and cpu-135m. The
other rows need a GPU and use bfloat16. Time: eight minutes with --repeats=1,
most of it in transformers. Result: docs/project/results.md has the
table.

The last line of standard output is one JSON object.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

# Leave the other process its share of the device's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from absl import app
from absl import flags
import generation
import jax
import roofline
import side_by_side
import workloads

from jaxrl_async.config import sections

_CASES = workloads.CPU_CASES | workloads.GPU_CASES
_ROWS = flags.DEFINE_list(
  "rows",
  None,
  f"Cases to measure, by default the platform's: {', '.join(_CASES)}.",
)
flags.register_validator(
  _ROWS, lambda rows: set(rows or ()) <= _CASES.keys(), "names of cases"
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 2, "How often each row is measured.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of weights and workload.")
_STEPS_PER_CALL = flags.DEFINE_integer(
  "decode_steps_per_call",
  0,
  "Decode steps of a call; 0 takes the case's.",
  lower_bound=0,
)
_DTYPE = flags.DEFINE_enum(
  "dtype", None, ["float32", "bfloat16"], "Dtype; by default the case's."
)
_TRANSFORMERS = flags.DEFINE_boolean(
  "transformers", True, "Compare with transformers.generate."
)
_VLLM = flags.DEFINE_boolean("vllm", False, "Compare with vLLM for CPUs too.")
_ADOPT = flags.DEFINE_boolean("adopt", False, "Measure adoptions instead.")
_ADOPT_EVERY = flags.DEFINE_integer(
  "adopt_every", 16, "Calls between adoptions.", lower_bound=1
)
_ASYNC_DISPATCH = flags.DEFINE_boolean(
  "async_dispatch",
  False,
  "Value of jax_cpu_enable_async_dispatch, which is off in runs.",
)
_COMPILE_CACHE = flags.DEFINE_string(
  "compile_cache", "", "Directory of a persistent XLA cache; none if empty."
)

# Columns of the table, and their formats.
_COLUMNS = {
  "case": "",
  "tokens_per_s": ".0f",
  "transformers_tokens_per_s": ".0f",
  "vs_transformers": ".2f",
  "cpu_time_ratio": ".2f",
  "vllm_tokens_per_s": ".0f",
  "vs_vllm": ".2f",
  "occupancy": ".3f",
  "ms_per_step": ".2f",
  "host_frac": ".3f",
  "roof_frac": ".3f",
  "vs_without_adoption": ".2f",
  "adopt_s": ".4f",
}


def _case(name: str) -> workloads.Case:
  case = _CASES[name]
  steps = _STEPS_PER_CALL.value or case.sizes.decode_steps_per_call
  sizes = dataclasses.replace(case.sizes, decode_steps_per_call=steps)
  dtype = _DTYPE.value or case.dtype
  return dataclasses.replace(case, sizes=sizes, dtype=dtype)


def _row(name: str, directory: pathlib.Path) -> dict[str, Any]:
  """Measure one case against transformers."""
  case = _case(name)
  workload = workloads.draw(case, _SEED.value)
  engine = generation.engine(case, _SEED.value)
  versions = [generation.params(engine, _SEED.value, 0)]
  generation.run(engine, versions, workload)
  work = {
    "model": dataclasses.asdict(case.model),
    "dtype": case.dtype,
    "slots": case.sizes.num_slots,
    "cache_tokens": case.sizes.cache_tokens,
    "prompts": [p.tolist() for p in workload.prompts],
    "completion_tokens": workload.completion_tokens.tolist(),
  }
  path = directory / f"{name}.json"
  reference = vllm = None
  if _TRANSFORMERS.value and side_by_side.has_transformers():
    reference = side_by_side.Reference("transformers_generate.py", path, work)
  if _VLLM.value:
    vllm = side_by_side.Reference(
      "vllm_generate.py",
      path,
      work,
      python=("uv", "run", "--script"),
    )
  runs, theirs, of_vllm = [], [], []
  for _ in range(_REPEATS.value):
    record = generation.run(engine, versions, workload)
    runs.append(roofline.measure(case, engine, workload, record))
    if reference:
      theirs.append(reference.run())
    if vllm:
      of_vllm.append(vllm.run())
  row: dict[str, Any] = {
    "case": name,
    "num_params": case.model.num_params,
    "transformers_tokens_per_s": None,
    "vs_transformers": None,
    "vs_transformers_repeats": None,
    "cpu_time_ratio": None,
    "vllm_tokens_per_s": None,
    "vs_vllm": None,
    **side_by_side.median(runs),
  }
  if reference:
    reference.close()
    pairs = list(zip(runs, theirs, strict=True))
    ratios = [
      ours["tokens_per_s"] / other["tokens_per_s"] for ours, other in pairs
    ]
    row |= {
      "vs_transformers": statistics.median(ratios),
      "vs_transformers_repeats": ratios,
      "cpu_time_ratio": statistics.median(
        [other["cpu_s"] / ours["cpu_s"] for ours, other in pairs]
      ),
      "transformers_tokens_per_s": side_by_side.median(theirs)["tokens_per_s"],
      "transformers_variant": theirs[0]["variant"],
    }
  if vllm:
    vllm.close()
    row |= {
      "vllm_tokens_per_s": side_by_side.median(of_vllm)["tokens_per_s"],
      "vllm_variant": of_vllm[0]["variant"],
      "vs_vllm": statistics.median(
        ours["tokens_per_s"] / other["tokens_per_s"]
        for ours, other in zip(runs, of_vllm, strict=True)
      ),
    }
  _print_profile(row)
  return row


def _adopt_rows(name: str) -> list[dict[str, Any]]:
  """Measure one case without adoptions and with each kind of them."""
  case = _case(name)
  workload = workloads.draw(case, _SEED.value)
  engine = generation.engine(case, _SEED.value)
  versions = [generation.params(engine, _SEED.value, i) for i in range(2)]
  kinds = [(sections.KvOnAdopt.RECOMPUTE, 0)]
  kinds += [(kind, _ADOPT_EVERY.value) for kind in sections.KvOnAdopt]
  for kind, every in kinds:  # compiles
    generation.run(
      engine, versions, workload, kv_on_adopt=kind, adopt_every=every
    )
  runs: list[list[dict[str, Any]]] = [[] for _ in kinds]
  for _ in range(_REPEATS.value):
    for (kind, every), measured in zip(kinds, runs, strict=True):
      record = generation.run(
        engine, versions, workload, kv_on_adopt=kind, adopt_every=every
      )
      measured.append(roofline.measure(case, engine, workload, record))
  rows = []
  for (kind, every), measured in zip(kinds, runs, strict=True):
    ratios = [
      here["tokens_per_s"] / without["tokens_per_s"]
      for here, without in zip(measured, runs[0], strict=True)
    ]
    row = {
      "case": f"{name} {kind.value}" if every else name,
      "adopt_every_calls": every,
      "vs_without_adoption": statistics.median(ratios),
      "adopt_s": generation.adoption_s(engine, versions, workload, kind)
      if every
      else None,
      **side_by_side.median(measured),
    }
    print(f"{row['case']}:")
    _print_profile(row)
    rows.append(row)
  return rows


def _print_profile(row: dict[str, Any]) -> None:
  """Print where the time went."""
  print(
    f"  {row['wall_s']:.2f} s: decode {row['decode_frac']:.1%}, prefill and"
    f" insertion {row['prefill_frac']:.1%}, host {row['host_frac']:.1%}; a"
    f" decode step {row['ms_per_step']:.2f} ms"
  )
  print(
    f"  least time of all decode calls: weights {row['bound_weights_s']:.3f} s"
    f" and cache {row['bound_cache_s']:.3f} s, or products"
    f" {row['bound_products_s']:.3f} s;"
    f" they took {row['decode_frac'] * row['wall_s']:.3f} s"
  )
  for window, (count, time_ms) in row["decode_call_ms_by_window"].items():
    print(f"  window {window}: {count} calls, median {time_ms:.1f} ms")
  for place in ("submission", "slot"):
    p50, p99 = (row[f"first_token_s_from_{place}_p{p}"] for p in (50, 99))
    print(f"  first token from {place}: p50 {p50:.3f} s, p99 {p99:.3f} s")


def main(argv: Sequence[str]) -> None:
  """Measure every row and print the results."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  jax.config.update("jax_cpu_enable_async_dispatch", _ASYNC_DISPATCH.value)
  if _COMPILE_CACHE.value:
    jax.config.update("jax_compilation_cache_dir", _COMPILE_CACHE.value)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  is_cpu = jax.default_backend() == "cpu"
  names = _ROWS.value or list(
    workloads.CPU_CASES if is_cpu else workloads.GPU_CASES
  )
  rows = []
  with tempfile.TemporaryDirectory(prefix="generate_") as directory:
    for name in names:
      print(f"{name}: {_CASES[name].model.num_params:,} parameters")
      if _ADOPT.value:
        rows += _adopt_rows(name)
      else:
        rows.append(_row(name, pathlib.Path(directory)))
  peaks = {
    dtype: dataclasses.asdict(roofline.peaks(dtype))
    for dtype in sorted({_case(name).dtype for name in names})
  }
  for dtype, peak in peaks.items():
    print(
      f"measured here, {dtype}: {peak['bytes_per_s'] / 1e9:.1f} GB/s,"
      f" {peak['flops_per_s'] / 1e9:.0f} GFLOP/s"
    )
  print(side_by_side.table(rows, _COLUMNS))
  result = {
    "rows": rows,
    "peaks": peaks,
    "device": jax.devices()[0].device_kind,
    "num_cores": len(os.sched_getaffinity(0)),
    "jax_cpu_enable_async_dispatch": _ASYNC_DISPATCH.value,
  }
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
