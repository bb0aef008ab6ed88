"""How long weights take from the trainer to the engine, and who waits for it.

    python benchmarks/weight_transfer.py

Each version is cast by the trainer's own program, published, waited for and
adopted. Every leaf that arrives is compared with what was sent, bit for bit.
The rows are several sizes, from one device to another, and several pairs of
meshes at one size.

    cast_ms     the program that unstacks and casts, on the trainer's devices
    publish_ms  how long `publish` holds up its caller
    ready_ms    from the call of `publish` until the version can be adopted
    adopt_ms    `adopt`, until the weights lie in the rollout shardings
    gb_per_s    bytes of a version over ready_ms + adopt_ms

The trainer is held up for cast_ms + publish_ms. Everything else runs beside it.
Each time is the median of --repeats versions, without the first one.

Hardware: any; without an accelerator, eight virtual devices. Time: two minutes.
Result: docs/project/notebook.md.

The last line of standard output is one JSON object.
"""

from collections.abc import Sequence
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

from absl import app
from absl import flags
from absl import logging
import jax
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.training import publishing
from jaxrl_async.weights import transfer_directory
from jaxrl_async.weights import weight_transfer

_REPEATS = flags.DEFINE_integer(
  "repeats", 5, "Measured versions of each row.", lower_bound=1
)
_ROWS = flags.DEFINE_list(
  "rows",
  None,
  "Rows: 1m, 10m, 38m, 100m, pairs, which are the default, and 1.5b.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype", "float32", ["float32", "bfloat16"], "Type of the rollout weights."
)
_DIRECTORY = flags.DEFINE_string(
  "directory", "", "As transfer.directory; by default memory-backed."
)

MeshShape = mesh_lib.MeshShape


def _model(model_dim: int, num_layers: int, vocab_size: int):
  return configs.ModelConfig(
    vocab_size=vocab_size,
    model_dim=model_dim,
    num_layers=num_layers,
    num_heads=model_dim // 32,
    num_kv_heads=4,
    head_dim=32,
    mlp_dim=3 * model_dim,
  )


MODELS = {
  "1m": _model(128, 3, 4_096),
  "10m": _model(384, 5, 8_192),
  "38m": _model(640, 8, 12_288),
  "100m": _model(896, 12, 16_384),
}
LARGE_MODELS = {"1.5b": configs.MODELS["qwen2-1.5b"]}
PAIRS = [
  (MeshShape(fsdp=4), MeshShape(tensor=4)),
  (MeshShape(fsdp=2, tensor=2), MeshShape(data=2, tensor=2)),
  (MeshShape(tensor=4), MeshShape(data=4)),
]


def trainer_params(model: configs.ModelConfig, mesh: jax.sharding.Mesh) -> Any:
  """Return stacked float32 parameters, as the trainer holds them."""
  axes = transformer.logical_axes(model, is_stacked=True)
  init = jax.jit(
    functools.partial(transformer.init_params, model),
    out_shardings=mesh_lib.shardings(mesh, mesh_lib.TRAIN_RULES, axes),
  )
  return init(jax.random.key(0))


def assert_exact(found: Any, sent: Any) -> None:
  """Check that every leaf has the bits that were sent."""

  def check(a, b):
    bits = f"u{a.dtype.itemsize}"
    np.testing.assert_array_equal(
      np.asarray(a).view(bits), np.asarray(b).view(bits)
    )

  jax.tree.map(check, found, sent)


def measure(
  model: configs.ModelConfig,
  channel_kind: sections.Channel,
  train_shape: MeshShape,
  rollout_shape: MeshShape,
  directory: pathlib.Path,
) -> dict[str, Any]:
  """Measure one row: medians over versions."""
  train_mesh, rollout_mesh = mesh_lib.cut_devices(
    jax.devices(), train_shape=train_shape, rollout_shape=rollout_shape
  )
  params = trainer_params(model, train_mesh)
  cast = jax.jit(
    functools.partial(
      publishing.published_params,
      num_layers=model.num_layers,
      dtype=_DTYPE.value,
      weights=sections.WeightFormat.FLOAT,
    )
  )
  axes = transformer.logical_axes(model, is_stacked=False)
  target = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(cast, params),
    mesh_lib.shardings(rollout_mesh, mesh_lib.ROLLOUT_RULES, axes),
  )
  num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target))
  channel = weight_transfer.make_channel(
    channel_kind,
    directory=transfer_directory.prepare(
      sections.TransferSection(directory=_DIRECTORY.value),
      directory,
      num_bytes,
      print,
    ),
    target=target,
    coalesce=True,
  )
  times: dict[str, list[float]] = {
    name: [] for name in ("cast_ms", "publish_ms", "ready_ms", "adopt_ms")
  }
  for version in range(_REPEATS.value + 1):
    start_s = time.perf_counter()
    published = jax.block_until_ready(cast(params))
    cast_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    publish_s = channel.publish(published, version)
    assert channel.wait_for_version(version - 1, 120.0)
    ready_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    adopted = channel.adopt(version - 1)
    assert adopted is not None and adopted[1] == version
    jax.block_until_ready(adopted[0])
    adopt_s = time.perf_counter() - start_s
    if version:
      for name, value in zip(
        times, (cast_s, publish_s, ready_s, adopt_s), strict=True
      ):
        times[name].append(1e3 * value)
  assert_exact(adopted[0], published)
  channel.close()
  medians = {name: statistics.median(x) for name, x in times.items()}
  moved_s = (medians["ready_ms"] + medians["adopt_ms"]) / 1e3
  return {
    "parameters": model.num_params,
    "channel": channel_kind.value,
    "train": str(train_shape),
    "rollout": str(rollout_shape),
    "megabytes": num_bytes / 1e6,
    **medians,
    "publish_ms_max": max(times["publish_ms"]),
    "gb_per_s": num_bytes / 1e9 / moved_s,
  }


def _table(rows: Sequence[dict[str, Any]]) -> str:
  """Return a Markdown table of the rows."""
  lines = [[*rows[0]], ["---"] * len(rows[0])]
  for row in rows:
    lines.append(
      [f"{x:.2f}" if isinstance(x, float) else f"{x}" for x in row.values()]
    )
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str]) -> None:
  """Measure every row and print the results."""
  if argv[1:]:
    sys.exit(f"error: unexpected arguments {' '.join(argv[1:])}")
  logging.set_verbosity(logging.WARNING)
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  cases = []
  for name in _ROWS.value or [*MODELS, "pairs"]:
    if name == "pairs":
      cases += [(MODELS["10m"], *pair) for pair in PAIRS]
    elif model := (MODELS | LARGE_MODELS).get(name):
      cases.append((model, mesh_lib.ONE, mesh_lib.ONE))
    else:
      known = ", ".join([*MODELS, *LARGE_MODELS, "pairs"])
      sys.exit(f"error: rows: {name!r} is not one of {known}")
  rows = []
  with tempfile.TemporaryDirectory(prefix="weight_transfer_") as directory:
    for model, train_shape, rollout_shape in cases:
      for kind in (sections.Channel.DIRECT, sections.Channel.ORBAX):
        row = measure(
          model, kind, train_shape, rollout_shape, pathlib.Path(directory)
        )
        print(row, flush=True)
        rows.append(row)
  print(_table(rows))
  result = {
    "rows": rows,
    "dtype": _DTYPE.value,
    "device": jax.devices()[0].device_kind,
    "num_cores": len(os.sched_getaffinity(0)),
  }
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
