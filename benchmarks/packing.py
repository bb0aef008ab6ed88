"""How full packed rows are, and what packing saves of a train step.

    python benchmarks/packing.py

Lengths are lognormal, as completions of a reasoning model are: median 300,
deviation 1.0 in logarithms, cut at 8,192 tokens (one in 2,100 is that long).
They are packed into rows of 8,192. The following are counted at full scale, as
mean and least over --seeds draws of --trajectories lengths, which are one
minibatch:

    pack_efficiency           tokens over the tokens of microbatches in use
    pack_gain_over_padding    microbatches with one trajectory per row, over
                              ours
    pack_gain_over_fixed_count  microbatches with the same number of
                              trajectories each, in order of arrival, over ours;
                              the number is the largest that fits in all of them
    shard_balance             mean over largest time of 8 shards of two rows,
                              if attention skips what the mask hides, for
                              --model; also without balancing
    pack_ms                   time to pack 2,000 trajectories in four
                              minibatches, best of 5

All microbatches have the same shape, so on a device that does not skip padding
the time is proportional to their number. This is measured too: update_s of the
three ways, for --timed_trajectories of a sixteenth of the length (median 19, at
most 512) on a policy of 0.31 million parameters, with plain XLA attention and
one compiled program for all.

Hardware: two CPU cores. Time: half a minute. Result: docs/project/notebook.md.
The last line of standard output is one JSON object.
"""

from collections.abc import Sequence
import functools
import json
import sys
import time
from typing import Any

from absl import app
from absl import flags
import jax
import numpy as np
import optax
import packed_lengths

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

_SEEDS = flags.DEFINE_integer("seeds", 10, "Number of draws of lengths.", 1)
_TRAJECTORIES = flags.DEFINE_integer(
  "trajectories", 512, "Trajectories of a minibatch.", 1
)
_ROWS = flags.DEFINE_integer(
  "rows_per_microbatch", 1, "Rows of a microbatch at full scale.", 1
)
_MODEL = flags.DEFINE_string(
  "model", "qwen2-1.5b", "Model whose attention cost shard_balance uses."
)
_TIMED = flags.DEFINE_integer(
  "timed_trajectories",
  128,
  "Trajectories of the timed updates; 0 skips them.",
  0,
)

_SCALE = 16  # how much shorter the timed trajectories are
_TIMED_ROWS = 2


def pack_ms() -> float:
  """Time the packing of 2,000 trajectories, without their transfer."""
  group = packed_lengths.make_group(packed_lengths.draw_lengths(2_000, 0))
  times_s = []
  for _ in range(5):
    start_s = time.perf_counter()
    packing.pack(
      [group],
      np.zeros(2_000, np.float32),
      tokens_per_row=packed_lengths.MAX_TOKENS,
      rows_per_microbatch=1,
      num_minibatches=4,
    )
    times_s.append(time.perf_counter() - start_s)
  return 1e3 * min(times_s)


def _joined(
  parts: Sequence[np.ndarray], *, rows: int, num_microbatches: int
) -> packing.PackedBatch:
  """Pack one microbatch for each part, and pad to the given number."""
  packed = [
    packed_lengths.pack(
      part, tokens_per_row=packed_lengths.MAX_TOKENS // _SCALE, rows=rows
    )[0]
    for part in parts
  ]
  batch = jax.tree.map(lambda *x: np.concatenate(x, axis=1), *packed)
  shape = (1, -1, _TIMED_ROWS, packed_lengths.MAX_TOKENS // _SCALE)
  batch = jax.tree.map(lambda x: x.reshape(shape), batch)
  missing = num_microbatches - batch.tokens.shape[1]
  return jax.tree.map(
    lambda x: np.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))), batch
  )


def measured_updates() -> dict[str, float]:
  """Time one update of the same trajectories, batched in three ways."""
  width, model = (
    packed_lengths.MAX_TOKENS // _SCALE,
    configs.MODELS["three-layers"],
  )
  lengths = packed_lengths.draw_lengths(_TIMED.value, 0, scale=_SCALE)
  if len(lengths) % _TIMED_ROWS:
    sys.exit(f"error: --timed_trajectories must be a multiple of {_TIMED_ROWS}")
  size = len(lengths) // _TIMED_ROWS
  ways = {
    "packed": packed_lengths.pack(
      lengths, tokens_per_row=width, rows=_TIMED_ROWS, min_microbatches=size
    )[0],
    "fixed_count": _joined(
      packed_lengths.fixed_count(
        lengths, tokens_per_row=width, rows=_TIMED_ROWS
      ),
      rows=_TIMED_ROWS,
      num_microbatches=size,
    ),
    "padded": _joined(
      np.split(lengths, len(lengths)), rows=1, num_microbatches=size
    ),
  }
  optimizer = optax.sgd(0.0)
  update = jax.jit(
    functools.partial(
      train_step.update,
      train_step.ForwardSettings(
        model=model,
        compute_dtype="float32",
        remat=sections.Remat.FULL,
        attention="xla",
        temperature=1.0,
        vocab_chunk=4_096,
      ),
      algorithm_lib.policy_loss(
        sections.Config(
          algorithm=sections.AlgorithmSection(
            proximal=sections.ProximalMode.REUSE, num_minibatches=1
          )
        )
      ),
      objectives.rollout_diagnostic,
      {train_state.POLICY: optimizer},
    )
  )
  params = jax.jit(functools.partial(transformer.init_params, model))(
    jax.random.key(0)
  )
  policy = train_state.ModelState(
    trainable=params, frozen={}, opt_state=optimizer.init(params)
  )
  state = train_state.TrainState(models={train_state.POLICY: policy})
  times_s, losses = {}, {}
  for name in ("packed", *ways):  # the first compiles
    batch = jax.device_put(ways[name])
    start_s = time.perf_counter()
    _, metrics = update(state, batch, np.int32(0))
    losses[name] = float(metrics["entropy_sum"][0])
    times_s[name] = time.perf_counter() - start_s
  np.testing.assert_allclose([*losses.values()], losses["packed"], rtol=1e-4)
  return times_s


def main(argv: Sequence[str]) -> None:
  """Count, then measure, and print both."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  sizes = {"tokens_per_row": packed_lengths.MAX_TOKENS, "rows": _ROWS.value}
  model = configs.MODELS[_MODEL.value]
  draws = [
    packed_lengths.draw_lengths(_TRAJECTORIES.value, s)
    for s in range(_SEEDS.value)
  ]
  columns = {
    "pack_efficiency": [
      packed_lengths.pack_efficiency(x, **sizes) for x in draws
    ],
    "pack_gain_over_padding": [
      packed_lengths.pack_gain_over_padding(x, **sizes) for x in draws
    ],
    "pack_gain_over_fixed_count": [
      packed_lengths.pack_gain_over_fixed_count(x, **sizes) for x in draws
    ],
    "shard_balance": [
      packed_lengths.shard_balance(x, model, is_balanced=True) for x in draws
    ],
    "shard_balance_without": [
      packed_lengths.shard_balance(x, model, is_balanced=False) for x in draws
    ],
  }
  result: dict[str, Any] = {}
  for name, values in columns.items():
    result[name] = float(np.mean(values))
    result[f"{name}_min"] = float(np.min(values))
    print(f"{name:<28}{np.mean(values):8.3f}  (least {np.min(values):.3f})")
  result["pack_ms"] = pack_ms()
  print(f"{'pack_ms':<28}{result['pack_ms']:8.1f}")
  if _TIMED.value:
    times_s = measured_updates()
    result["update_s"] = times_s
    for name in ("padded", "fixed_count"):
      gain = times_s[name] / times_s["packed"]
      result[f"measured_gain_over_{name}"] = gain
      print(
        f"update_s {times_s['packed']:.2f} packed, {times_s[name]:.2f} {name}:"
        f" {gain:.2f} times"
      )
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
