"""How fast TPU slices of several sizes would train, by simulation.

The rates are those of compiled programs; see docs/project/scaling.md.
"""

from collections.abc import Iterator
import dataclasses

from simulation import presets
from simulation import throughput

NAMES = ("1p5b_v5e", "7b_v5p", "32b_v5p")
NUM_CHIPS = (16, 64, 256, 1_024, 4_096)
BOUND = 4
_SPLITS = (0.25, 0.5, 0.75)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """The speed of a model on a number of chips.

  Attributes:
    name: of the model and the chip.
    chips: how many there are.
    synchronous: tokens/s if all chips generate and then all train.
    asynchronous: tokens/s with a bound of BOUND and the best split.
    generating: chips that generate in that split.
  """

  name: str
  chips: int
  synchronous: float
  asynchronous: float
  generating: int


def rows(num_steps: int = 24) -> Iterator[Row]:
  """Yield a row for each model and each number of chips.

  Args:
    num_steps: train steps to simulate for each.
  """
  for name in NAMES:
    for chips in NUM_CHIPS:
      yield row(name, chips, num_steps)


def row(name: str, chips: int, num_steps: int) -> Row:
  """Return one row.

  Args:
    name: of the preset, without "tpu_".
    chips: how many there are.
    num_steps: train steps to simulate.
  """
  cluster = presets.tpu(name, chips)
  together = throughput.predict(
    cluster, throughput.Mode.SYNCHRONOUS, num_steps=num_steps
  )
  found = {}
  for split in _SPLITS:
    apart = dataclasses.replace(cluster, rollout_frac=split)
    generating = chips - apart.num_training(throughput.Mode.ASYNCHRONOUS)
    if generating % cluster.devices_per_replica:
      continue  # a part of a replica generates nothing
    found[generating] = throughput.predict(
      apart, throughput.Mode.ASYNCHRONOUS, BOUND, num_steps=num_steps
    ).tokens_per_s
  best = max(found, key=lambda generating: found[generating])
  return Row(
    name=name,
    chips=chips,
    synchronous=together.tokens_per_s,
    asynchronous=found[best],
    generating=best,
  )
