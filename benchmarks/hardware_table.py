"""Print which models fit on which hardware, by the dry run's estimate.

    uv run benchmarks/hardware_table.py

Nothing is compiled and no device is needed. The estimate is the one with which
`launch/train.py --dry_run` begins (`planning.memory_estimate`), for weights,
gradients and moments in the sizes that the trainer keeps. The output stands in
docs/how-to/hardware.md.

Each cell has the GiB of a device that trains, by the first of these that fits:
as it is; `m`, the first moment in bfloat16; `o`, both moments in the host's
memory. Compiled programs were found to take up to 1.7 times the estimate. So
`?` says that an estimate is above 60 % of the memory, and `no` that it is above
92 %. A microbatch is one row of the given length for all devices that share it,
and at least 8 slots of the cache have to fit.
"""

import dataclasses

from absl import app

from jaxrl_async.config import mesh_shape
from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.planning import memory_estimate

GB = 10**9
SAFE, MOST = 0.60, 0.92  # shares of the memory: the estimate leaves things out
LEAST_SLOTS = 8
TOKENS = {"1k": 1_024, "8k": 8_192, "32k": 32_768}
RANK = 16
MODULES = "query", "key", "value", "output", "gate", "up", "down"
MODELS = {
  "0.5B": configs.MODELS["qwen2-0.5b"],
  "1.5B": configs.MODELS["qwen2-1.5b"],
  "8B": configs.MODELS["qwen3-8b"],
  "32B": configs.MODELS["qwen2.5-32b"],
}


@dataclasses.dataclass(frozen=True)
class Hardware:
  """Devices of a run.

  Attributes:
    train: devices that train.
    rollout: devices of a replica; 0 where the device that trains generates.
    device_bytes: memory of each.
  """

  train: int
  rollout: int
  device_bytes: float


def _tpu(chip: str, train: int, rollout: int) -> Hardware:
  return Hardware(train, rollout, tpu_chips.CHIPS[chip].hbm_bytes)


HARDWARE = {
  "24 GB": Hardware(1, 0, 24 * GB),
  "40 GB": Hardware(1, 0, 40 * GB),
  "80 GB": Hardware(1, 0, 80 * GB),
  "8 x 80 GB": Hardware(4, 4, 80 * GB),
  "v5e-8": _tpu("v5e", 4, 4),
  "v5e-16": _tpu("v5e", 4, 4),  # host 0 trains, a replica has another
  "2 x v5e-16": _tpu("v5e", 16, 4),
  "v6e-8": _tpu("v6e", 4, 4),
  "v5p-8": _tpu("v5p", 2, 2),
}


def training_bytes(
  model: configs.ModelConfig, num_tokens: int, train: int, first_moment: int
) -> int:
  """Return the least estimate over ways to share a row, on one device.

  Args:
    model: the architecture, with adapters or without.
    num_tokens: of a row.
    train: devices that train.
    first_moment: bytes of an element; 0 keeps no moment on the device.
  """
  return min(
    _training_bytes(model, num_tokens, train, first_moment, context)
    for context in (1, 2, 4, 8, 16)
    if train % context == 0
  )


def _training_bytes(
  model: configs.ModelConfig,
  num_tokens: int,
  train: int,
  first_moment: int,
  context: int,
) -> int:
  trained = lora_lib.num_params(model) or model.num_params
  frozen = 2 * model.num_params if model.lora else 0
  moments = trained * (first_moment + 4) if first_moment else 0
  fsdp = train // context
  section = sections.TrainSection(
    tokens_per_row=num_tokens, rows_per_microbatch=fsdp, vocab_chunk=16_384
  )
  estimate = memory_estimate.training(
    model,
    mesh_shape.MeshShape(fsdp=fsdp, context=context),
    sections.ShardingRules(),
    section,
    sections.ModelSection(compute_dtype="bfloat16"),
    policy=memory_estimate.ModelBytes(
      trainable=4 * trained // train,
      frozen=frozen // train,
      optimizer=moments // train,
    ),
    tokens_per_step=128 * num_tokens,
  )
  return estimate.total


def rollout_bytes(
  model: configs.ModelConfig, num_tokens: int, rollout: int
) -> int:
  """Return the estimate for a device that generates, with `LEAST_SLOTS`."""
  section = sections.RolloutSection(
    num_slots=LEAST_SLOTS,
    cache_tokens=num_tokens,
    prefill_rows=1,
    prefill_chunk=512,
    prefill_buckets=(512, num_tokens),
    window_buckets=(num_tokens,),
    dtype="bfloat16",
  )
  tensor = max(rollout, 1)
  while model.num_kv_heads % tensor:
    tensor //= 2
  shape = mesh_shape.MeshShape(data=max(rollout, 1) // tensor, tensor=tensor)
  base = 2 * model.num_params
  adapters = 2 * lora_lib.num_params(model)
  parts = memory_estimate.rollout(
    model,
    shape,
    sections.MeshSection().rollout_rules,
    section,
    published=adapters or base,
    base=base if adapters else 0,
  )
  return sum(parts.values())


def cell(model: configs.ModelConfig, num_tokens: int, on: Hardware) -> str:
  """Return what stands in the table: GiB, the lever, and a doubt; or no."""
  generation = rollout_bytes(model, num_tokens, on.rollout)
  for mark, first_moment in (("", 4), (" m", 2), (" o", 0)):
    needed = training_bytes(model, num_tokens, on.train, first_moment)
    if not on.rollout:
      needed += generation
    share = max(needed, generation) / on.device_bytes
    if share <= MOST:
      unsure = "" if share <= SAFE else " ?"
      return f"{needed / 2**30:.1f}{mark}{unsure}"
  return "no"


def with_lora(model: configs.ModelConfig) -> configs.ModelConfig:
  """Return the model with adapters on all kernels."""
  lora = configs.Lora(rank=RANK, alpha=2.0 * RANK, modules=MODULES)
  return dataclasses.replace(model, lora=lora)


def table() -> list[str]:
  """Return the lines of the table."""
  lines = [
    f"| model | tokens | {' | '.join(HARDWARE)} |",
    "| --- " * (2 + len(HARDWARE)) + "|",
  ]
  for name, model in MODELS.items():
    for kind, trained in (("full", model), ("LoRA", with_lora(model))):
      for length, num_tokens in TOKENS.items():
        cells = [cell(trained, num_tokens, on) for on in HARDWARE.values()]
        lines.append(f"| {name} {kind} | {length} | {' | '.join(cells)} |")
  return lines


def main(_) -> None:
  """Print the table."""
  print("\n".join(table()))


if __name__ == "__main__":
  app.run(main)
