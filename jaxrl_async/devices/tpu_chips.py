"""TPU chips and their slices, by name: numbers and names, without JAX."""

import dataclasses
import re

from jaxrl_async.config import sections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """What one chip holds and does at most.

  Attributes:
    kind: `device_kind` of its devices.
    hbm_bytes: that programs may use: what the compiler says when it refuses
      one, which is up to 2 % less than what is published.
    flops_per_s: of bfloat16 products.
    hbm_bytes_per_s: to and from its own memory.
    ici_bytes_per_s: that it sends over all of its links to other chips: half
      of what is published, which counts both directions.
    slices: shapes that can be had.
  """

  kind: str
  hbm_bytes: float
  flops_per_s: float
  hbm_bytes_per_s: float
  ici_bytes_per_s: float
  slices: tuple[str, ...]


_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
# Published at cloud.google.com/tpu/docs/v5e, /v5p and /v6e.
CHIPS = {
  "v5e": Chip(
    kind="TPU v5 lite",
    hbm_bytes=15.75 * 2**30,
    flops_per_s=197e12,
    hbm_bytes_per_s=819e9,
    ici_bytes_per_s=200e9,
    slices=_FLAT,
  ),
  "v5p": Chip(
    kind="TPU v5",
    hbm_bytes=95.74 * 2**30,
    flops_per_s=459e12,
    hbm_bytes_per_s=2_765e9,
    ici_bytes_per_s=600e9,
    slices=(
      *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"),
      *("4x8x8", "8x8x8", "8x8x16", "8x16x16"),
    ),
  ),
  "v6e": Chip(
    kind="TPU v6 lite",
    hbm_bytes=31.25 * 2**30,
    flops_per_s=918e12,
    hbm_bytes_per_s=1_638e9,
    ici_bytes_per_s=400e9,
    slices=_FLAT,
  ),
}


def parse(name: str) -> tuple[int, str, str]:
  """How many slices, of which chip, and their shape: 2xv5e:4x4 is 2, v5e, 4x4.

  Raises:
    ConfigError: there is no such slice.
  """
  found = re.fullmatch(r"(?s)(?:(\d)x(?=v))?(.*?)(?::(.*))?", name)
  assert found is not None  # whatever the name
  count, chip, shape = int(found[1] or 1), found[2], found[3]
  sections.require(
    chip in CHIPS and count > 0,
    "topology",
    f"{sections.shown(name)} does not exist; chips are {', '.join(CHIPS)}, and"
    " v5p:4x4x4 is a slice of one, 2xv5e:4x4 two slices",
  )
  sections.require(
    shape in CHIPS[chip].slices,
    "topology",
    f"{sections.shown(name)} does not exist; slices of {chip} are"
    f" {', '.join(CHIPS[chip].slices)}",
  )
  return count, chip, shape
