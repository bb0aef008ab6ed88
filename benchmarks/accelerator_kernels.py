"""Every attention kernel of this platform against plain XLA.

    python benchmarks/accelerator_kernels.py

A run tries the kernels itself when it starts, takes the first one that agrees,
and logs why it refused others. Here all of them are tried in the same way, with
the heads of a 1.5B Qwen2, and timed.

    use      packed: attention over the trainer's packed rows, with gradients;
             prefill: over prompts; decode: one query for each slot, over pages
    verdict  "agrees", or why a run would not take the kernel
    error    largest distance from XLA in float32 of a result or a gradient,
             relative to its norm, in a small call
    allowed  how far it may be: three times as far as XLA in this dtype
    ms       one call at full size: a row of 4,096 tokens, 8 prompts of 1,024,
             128 slots with 1,024 cached tokens each
    xla_ms   the same with XLA; empty if it does not fit the device

Hardware: any. On a CPU, which has only attention in blocks and in chunks, sizes
are smaller. Time: one to two minutes.

The last line of standard output is one JSON object: `rows`, and `device`.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import statistics
import sys
import time
from typing import Any

from absl import app
import jax
from jax import numpy as jnp
import numpy as np
import side_by_side

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.models.attention import choice
from jaxrl_async.models.attention import kernel_errors
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.models.attention import paged_attention
from jaxrl_async.models.attention import reference

_REPEATS = 10  # calls of which the median is taken
_COLUMNS = {
  "use": "",
  "kernel": "",
  "verdict": "",
  "error": ".2g",
  "allowed": ".2g",
  "ms": ".3f",
  "xla_ms": ".3f",
}
# Plain XLA too, but not what the others are compared with.
_PLAIN = "chunks", "blocks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
  """Shapes of the calls.

  Attributes:
    heads: number of query heads, of kv heads, and the head size.
    row_tokens: length of a packed row.
  """

  heads: tuple[int, int, int]
  dtype: str
  row_tokens: int
  engine: decode_state_lib.EngineSizes


def _size(name: str, heads: tuple[int, int, int], *, scale: int) -> Size:
  tokens, slots = 1_024 // scale, 128 // scale
  return Size(
    heads=heads,
    dtype=name,
    row_tokens=4_096 // scale,
    engine=decode_state_lib.EngineSizes(
      num_slots=slots,
      cache_tokens=tokens,
      decode_steps_per_call=8,
      prefill_rows=8,
      prefill_buckets=(tokens,),
      window_buckets=(tokens,),
      page_tokens=16,
      num_pages=slots * tokens // 16,
    ),
  )


ACCELERATOR = _size("bfloat16", (12, 2, 128), scale=1)
CPU = _size("float32", (4, 2, 32), scale=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Use:
  """One place where attention is computed.

  Attributes:
    implementations: by name; "xla" is the reference.
    kernels: those of this platform.
    integers: lengths, positions and tables of a call at full size.
  """

  implementations: dict[str, choice.Implementation]
  kernels: tuple[str, ...]
  trial: choice.Trial
  integers: tuple[np.ndarray, ...]

  def full_arguments(self) -> tuple[Any, ...]:
    """Return random arrays and the integers, in the shapes of a large call."""
    integers = iter(self.integers)

    def array(shape: jax.ShapeDtypeStruct) -> jax.Array:
      if jnp.issubdtype(shape.dtype, jnp.integer):
        found = next(integers)
        assert found.shape == shape.shape
        return jnp.asarray(found)
      return jax.random.normal(jax.random.key(0), shape.shape, shape.dtype)

    return jax.tree.map(array, self.trial.shapes)


def uses(size: Size, platform: str) -> dict[str, Use]:
  """Return the uses, with the kernels that runs try on this platform."""
  dtype, engine = jnp.dtype(size.dtype), size.engine
  slots, width = engine.num_slots, engine.pages_per_slot
  pages = np.arange(slots * width, dtype=np.int32).reshape(slots, width)

  def kernels(candidates: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    return candidates.get(platform, ())

  return {
    "packed": Use(
      implementations={
        name: choice.with_gradients(name, None)
        for name in packed_attention.IMPLEMENTATIONS
      },
      kernels=(*kernels(choice.PACKED), *_PLAIN),
      trial=choice.packed_trial(size.heads, size.row_tokens, dtype),
      integers=(np.zeros((1, size.row_tokens), np.int32),),
    ),
    "prefill": Use(
      implementations={
        name: choice.of_tokens(attend)
        for name, attend in reference.CAUSAL.items()
      },
      kernels=kernels(choice.PREFILL),
      trial=choice.prefill_trial(
        size.heads, engine.prefill_rows, engine.prefill_buckets[-1], dtype
      ),
      integers=(
        np.full((engine.prefill_rows,), engine.prefill_buckets[-1], np.int32),
      ),
    ),
    "decode": Use(
      implementations=dict(paged_attention.IMPLEMENTATIONS),
      kernels=kernels(choice.DECODE),
      trial=choice.decode_trial(
        size.heads,
        slots=slots,
        num_pages=engine.num_pages,
        page_tokens=engine.page_tokens,
        pages_per_slot=width,
        dtype=dtype,
      ),
      integers=(
        np.full((slots,), engine.cache_tokens - 1, np.int32),
        pages,
      ),
    ),
  }


def _time_ms(attend: Callable[..., jax.Array], arguments: Any) -> float | None:
  """Return the median time of a call; None if it does not run."""
  compiled = jax.jit(attend)
  times_s = []
  try:
    jax.block_until_ready(compiled(*arguments))
    for _ in range(_REPEATS):
      start_s = time.perf_counter()
      jax.block_until_ready(compiled(*arguments))
      times_s.append(time.perf_counter() - start_s)
  except kernel_errors.refusals():
    return None
  return 1e3 * statistics.median(times_s)


def _error(
  attend: Callable[..., Any],
  trial: choice.Trial,
  expected: choice.Reference,
) -> float | None:
  """Return the largest distance; None if the call does not run."""
  try:
    return float(expected.errors(attend, trial).max())
  except kernel_errors.refusals():
    return None


def measure(name: str, use: Use) -> list[dict[str, Any]]:
  """Try and time each kernel of a use."""
  if not use.kernels:
    return []
  reference_of = use.implementations["xla"]
  expected = choice.Reference.of(reference_of, use.trial)
  arguments = use.full_arguments()
  xla_ms = _time_ms(reference_of, arguments)
  rows = []
  for kernel in use.kernels:
    attend = use.implementations[kernel]
    reason = choice.refusal(attend, use.trial, expected)
    rows.append(
      {
        "use": name,
        "kernel": kernel,
        "verdict": reason or "agrees",
        "error": _error(attend, use.trial, expected),
        "allowed": float(expected.allowed.max()),
        "ms": _time_ms(attend, arguments),
        "xla_ms": xla_ms,
      }
    )
  return rows


def main(argv: Sequence[str]) -> None:
  """Try every kernel and print the results."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  device = jax.devices()[0]
  size = CPU if device.platform == "cpu" else ACCELERATOR
  rows = []
  for name, use in uses(size, device.platform).items():
    rows += measure(name, use)
  print(side_by_side.table(rows, _COLUMNS))
  print(json.dumps({"rows": rows, "device": device.device_kind}))


if __name__ == "__main__":
  app.run(main)
