"""The measurements of a generation run, and the least time it could take."""

import dataclasses
import functools
import statistics
import time
from typing import Any

import generation
import jax
from jax import numpy as jnp
import numpy as np
import workloads

from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.planning import matmul_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peaks:
  """The rates that this device reaches with programs that do nothing else."""

  bytes_per_s: float
  flops_per_s: float


@functools.cache
def peaks(dtype: str) -> Peaks:
  """Measure the bandwidth of a += s * b and the rate of large products."""
  is_cpu = jax.default_backend() == "cpu"
  size = 2**25 if is_cpu else 2**30
  b = jnp.ones((size,), jnp.float32)
  triad = jax.jit(lambda a, b: a + jnp.float32(0.5) * b, donate_argnums=0)
  a = jax.block_until_ready(triad(jnp.zeros_like(b), b))
  times_s = []
  for _ in range(10):
    start_s = time.perf_counter()
    a = jax.block_until_ready(triad(a, b))
    times_s.append(time.perf_counter() - start_s)
  devices = jax.devices()[:1]
  width = 1_024 if is_cpu else 8_192
  rates = [
    matmul_rate.measured_matmul_flops(devices, dtype, width) for _ in range(5)
  ]
  return Peaks(bytes_per_s=3 * b.nbytes / min(times_s), flops_per_s=max(rates))


def _calls(
  engine: engine_lib.Engine,
  workload: workloads.Workload,
  record: generation.Record,
) -> dict[str, np.ndarray]:
  """Reconstruct what each decode call did, from when each sequence began.

  Returns:
    Arrays over calls: `steps` that wrote something, `tokens` written, `cached`
    tokens that all of these attended to, and the `longest` number of cached
    tokens at the end of the call.
  """
  n = engine.sizes.decode_steps_per_call
  num_calls = len(record.step_ends_s)
  prompts = np.array([len(p) for p in workload.prompts])
  call = np.arange(num_calls)[:, None] - record.began[None]
  before = np.clip(call * n, 0, workload.completion_tokens[None])
  after = np.clip((call + 1) * n, 0, workload.completion_tokens[None])
  written = after - before
  # Token i of a completion attends to prompt + i tokens, itself included.
  cached = written * prompts + (after * (after - 1) - before * (before - 1)) / 2
  return {
    "steps": written.max(axis=1),
    "tokens": written.sum(axis=1),
    "cached": cached.sum(axis=1),
    "longest": np.where(written > 0, prompts + before, 0).max(axis=1) + n,
  }


def _bound_s(
  case: workloads.Case, calls: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Return the least seconds of each call, by bandwidth and by matmul rate."""
  peak, m = peaks(case.dtype), case.model
  itemsize = jnp.dtype(case.dtype).itemsize
  # A tied head is read and multiplied once. Of an untied embedding only the
  # rows of tokens are read.
  is_untied = not m.has_tied_head
  num_read = m.num_params - is_untied * m.vocab_size * m.model_dim
  cached_bytes = m.cache_bytes(tokens=1, itemsize=itemsize)
  attended_flops = 4 * m.num_layers * m.num_heads * m.head_dim
  return {
    "weights": calls["steps"] * num_read * itemsize / peak.bytes_per_s,
    "cache": calls["cached"] * cached_bytes / peak.bytes_per_s,
    "products": (
      2 * num_read * calls["tokens"] + attended_flops * calls["cached"]
    )
    / peak.flops_per_s,
  }


def measure(
  case: workloads.Case,
  engine: engine_lib.Engine,
  workload: workloads.Workload,
  record: generation.Record,
) -> dict[str, Any]:
  """Return the numbers of one run."""
  calls = _calls(engine, workload, record)
  bound_s = _bound_s(case, calls)
  least_s = np.maximum(
    bound_s["weights"] + bound_s["cache"], bound_s["products"]
  )
  decode_s = record.busy_s["decode"]
  steps = len(record.step_ends_s) * engine.sizes.decode_steps_per_call
  first = record.step_ends_s[record.began]
  starts = np.concatenate([[0.0], record.step_ends_s[:-1]])
  waited = first - starts[record.entered]
  stats = record.stats
  return {
    "tokens_per_s": int(workload.completion_tokens.sum()) / record.wall_s,
    "occupancy": stats.busy_slot_steps / max(1, stats.waiting_slot_steps),
    "ms_per_step": 1e3 * decode_s / steps,
    # One thread makes all calls, so they do not overlap.
    "host_frac": 1 - sum(record.busy_s.values()) / record.wall_s,
    "roof_frac": float(least_s.sum()) / decode_s,
    "first_token_s_from_submission_p50": float(np.percentile(first, 50)),
    "first_token_s_from_submission_p99": float(np.percentile(first, 99)),
    "first_token_s_from_slot_p50": float(np.percentile(waited, 50)),
    "first_token_s_from_slot_p99": float(np.percentile(waited, 99)),
    "wall_s": record.wall_s,
    "cpu_s": record.cpu_s,
    "decode_frac": decode_s / record.wall_s,
    "prefill_frac": record.busy_s["prefill"] / record.wall_s,
    "bound_weights_s": float(bound_s["weights"].sum()),
    "bound_cache_s": float(bound_s["cache"].sum()),
    "bound_products_s": float(bound_s["products"].sum()),
    "decode_call_ms_by_window": _by_window(engine, calls, record),
  }


def _by_window(
  engine: engine_lib.Engine,
  calls: dict[str, np.ndarray],
  record: generation.Record,
) -> dict[int, tuple[int, float]]:
  """Return the calls of each window's bucket, and their median milliseconds.

  A step of the scheduler is one call, with the prefill before it.
  """
  reached = calls["longest"][calls["tokens"] > 0]
  times_s = np.diff(record.step_ends_s, prepend=0.0)
  found: dict[int, list[float]] = {}
  # Calls while the pipeline is filled or drained are not distinguished.
  for longest, time_s in zip(reached, times_s, strict=False):
    reach = min(int(longest), engine.sizes.cache_tokens)
    window = next(w for w in engine.sizes.window_buckets if w >= reach)
    found.setdefault(window, []).append(1e3 * time_s)
  return {
    window: (len(found[window]), statistics.median(found[window]))
    for window in sorted(found)
  }
