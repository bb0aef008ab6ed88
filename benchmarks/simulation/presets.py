"""Clusters whose speed is predicted: AReaL's, and TPU slices.

The rates of a decode step follow from the architecture and from the rates of a
chip: all weights and all cached tokens are read once in a step. Those of a
train step are published or compiled, as `docs/project/scaling.md` says of each.
"""

import dataclasses

from simulation import throughput


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """A device.

  Attributes:
    flops_per_s: of bfloat16 products.
    bytes_per_s: of its memory.
    memory_bytes: of its memory.
    layer_s: seconds of a decode step for each layer besides reading: launches,
      and exchanges between devices.
    efficiency: share of `bytes_per_s` that decoding reaches, and of
      `flops_per_s` that products reach.
  """

  flops_per_s: float
  bytes_per_s: float
  memory_bytes: float
  layer_s: float
  efficiency: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A decoder in bfloat16: its sizes, and the bytes of a cached token."""

  params: float
  layers: int
  cached_bytes: int


# H800: the data sheet. layer_s is calibrated; see docs/project/scaling.md.
H800 = Chip(
  flops_per_s=989e12,
  bytes_per_s=3.35e12,
  memory_bytes=80e9,
  layer_s=9e-5,
  efficiency=0.8,
)
# As devices.tpu_chips has them. The rates are reached, as
# docs/project/scaling.md says.
TPUS = {
  "v5e": Chip(
    flops_per_s=197e12,
    bytes_per_s=819e9,
    memory_bytes=15.75 * 2**30,
    layer_s=0.0,
    efficiency=1.0,
  ),
  "v5p": Chip(
    flops_per_s=459e12,
    bytes_per_s=2_765e9,
    memory_bytes=95.74 * 2**30,
    layer_s=0.0,
    efficiency=1.0,
  ),
  "v6e": Chip(
    flops_per_s=918e12,
    bytes_per_s=1_638e9,
    memory_bytes=31.25 * 2**30,
    layer_s=0.0,
    efficiency=1.0,
  ),
}
MODELS = {
  "1p5b": Model(params=1.78e9, layers=28, cached_bytes=28 * 2 * 2 * 128 * 2),
  "7b": Model(params=7.62e9, layers=28, cached_bytes=28 * 2 * 4 * 128 * 2),
  "14b": Model(params=14.8e9, layers=48, cached_bytes=48 * 2 * 8 * 128 * 2),
  "32b": Model(params=32.8e9, layers=64, cached_bytes=64 * 2 * 8 * 128 * 2),
}
# Calibrated with the mean length that the paper's throughput and hours of 1.5B
# have in common.
AREAL_LENGTHS = throughput.Lengths(median=7_150.0, sigma=0.8, limit=27_648)
_CODE_LENGTHS = throughput.Lengths(median=16_000.0, sigma=0.8, limit=27_648)
_TPU_LENGTHS = throughput.Lengths(median=3_000.0, sigma=0.8, limit=7_168)
_MAX_SLOTS = 512
_MEMORY_FRAC = 0.85


def cluster(
  model: Model,
  chip: Chip,
  *,
  num_devices: int,
  devices_per_replica: int,
  lengths: throughput.Lengths,
  train_device_s: float,
  rollout_frac: float = 0.75,
  slots: int = 0,
  switch_s: float = 0.0,
  adopt_s: float = 1.0,
) -> throughput.Cluster:
  """Return a cluster with the rates of its chips.

  Args:
    model: that is trained.
    chip: of which there are num_devices.
    num_devices: in all.
    devices_per_replica: that share an engine.
    lengths: of completions.
    train_device_s: seconds of a device for a trained token.
    rollout_frac: share of the devices that generates.
    slots: of a replica; 0 takes as many as its memory holds.
    switch_s: as in `Cluster`.
    adopt_s: as in `Cluster`.

  Raises:
    ValueError: the weights do not fit a replica.
  """
  weights = 2 * model.params
  bytes_per_s = chip.bytes_per_s * chip.efficiency * devices_per_replica
  flops_per_s = chip.flops_per_s * chip.efficiency * devices_per_replica
  memory = chip.memory_bytes * _MEMORY_FRAC * devices_per_replica - weights
  fitting = int(memory / (model.cached_bytes * lengths.mean_cached()))
  if fitting < 1:
    raise ValueError(f"{devices_per_replica} devices hold no engine")
  return throughput.Cluster(
    num_devices=num_devices,
    rollout_frac=rollout_frac,
    devices_per_replica=devices_per_replica,
    lengths=lengths,
    slots=slots or min(fitting, _MAX_SLOTS),
    step_s=chip.layer_s * model.layers + weights / bytes_per_s,
    slot_s=2 * model.params / flops_per_s,
    cached_s=model.cached_bytes / bytes_per_s,
    recompute_s=2 * model.params / flops_per_s,
    adopt_s=adopt_s,
    train_device_s=train_device_s,
    switch_s=switch_s,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
  """What AReaL's paper reports of a model (arXiv:2505.24298).

  Attributes:
    num_nodes: of 8 GPUs.
    num_steps: train steps of the run.
    sync_hours: of its synchronous system.
    async_hours: of its asynchronous system.
  """

  num_nodes: int
  num_steps: int
  sync_hours: float
  async_hours: float

  @property
  def speedup(self) -> float:
    """How many times faster the asynchronous system is."""
    return self.sync_hours / self.async_hours


PAPER = {
  "1p5b": Published(
    num_nodes=16, num_steps=250, sync_hours=41.0, async_hours=14.8
  ),
  "7b": Published(
    num_nodes=24, num_steps=250, sync_hours=57.7, async_hours=25.4
  ),
  "14b": Published(
    num_nodes=32, num_steps=80, sync_hours=48.8, async_hours=21.9
  ),
  "32b": Published(
    num_nodes=48, num_steps=60, sync_hours=51.1, async_hours=31.1
  ),
}
# Thousand tokens a second of 1.5B by the bound on staleness.
PAPER_THROUGHPUT = {
  0: 128.7,
  1: 269.3,
  2: 356.6,
  4: 356.6,
  8: 371.7,
  16: 382.4,
  throughput.UNBOUNDED: 396.8,
}
_DEVICES_PER_REPLICA = {"1p5b": 1, "7b": 1, "14b": 2, "32b": 4}
_COMPLETIONS_PER_STEP = 512 * 16
# What devices that do both lose, as a share of the train step of the part that
# trains in the asynchronous system. Calibrated with the speedup of 1.5B.
_SWITCH_FRAC = 0.75


def areal(name: str) -> throughput.Cluster:
  """Return the cluster on which the paper trained a model."""
  paper = PAPER[name]
  num_devices = 8 * paper.num_nodes
  num_training = num_devices // 4
  lengths = _CODE_LENGTHS if name in ("14b", "32b") else AREAL_LENGTHS
  tokens = _COMPLETIONS_PER_STEP * lengths.mean()
  step_s = 3_600 * paper.async_hours / paper.num_steps
  if name == "1p5b":
    step_s = tokens / (1e3 * PAPER_THROUGHPUT[8])
  return cluster(
    MODELS[name],
    H800,
    num_devices=num_devices,
    devices_per_replica=_DEVICES_PER_REPLICA[name],
    lengths=lengths,
    train_device_s=step_s * num_training / tokens,
    switch_s=_SWITCH_FRAC * step_s,
  )


# Seconds of `proximal` and `update` at 8k tokens in the table of
# docs/project/scaling.md, the devices that they are of, and the devices of a
# replica.
_TPU_ROWS = {
  "1p5b_v5e": (16.432 + 61.619, 4, 1),
  "1p5b_v5p": (14.105 + 52.893, 2, 1),
  "7b_v5p": (32.304 + 120.521, 4, 2),
  "32b_v5p": (36.089 + 109.155, 32, 8),
}
_ROW_TOKENS = 512 * 8_192


def tpu(name: str, num_devices: int) -> throughput.Cluster:
  """Return a cluster of TPU chips with the rates of a compiled config."""
  size, kind = name.split("_")
  train_s, num_training, devices_per_replica = _TPU_ROWS[name]
  return cluster(
    MODELS[size],
    TPUS[kind],
    num_devices=num_devices,
    devices_per_replica=devices_per_replica,
    lengths=_TPU_LENGTHS,
    train_device_s=train_s * num_training / _ROW_TOKENS,
  )


def names() -> list[str]:
  """Return the names of all presets."""
  return [*(f"areal_{m}" for m in PAPER), *(f"tpu_{row}" for row in _TPU_ROWS)]
