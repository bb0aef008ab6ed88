"""TPU chips and their slices by name: plain numbers, without JAX."""

import dataclasses
import math
import re

from jaxrl_async.config import sections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """Capacity and peak rates of one chip.

  Attributes:
    kind: `device_kind` of its devices.
    hbm_bytes: memory that programs may use, as the compiler reports it when it
      refuses a program. This is up to 2 % less than the advertised size.
    flops_per_s: of bfloat16 matrix products.
    hbm_bytes_per_s: bandwidth to the chip's own memory.
    ici_bytes_per_s: bytes sent to other chips over all links together. This is
      half of the advertised figure, which counts both directions.
    slices: shapes of the slices that are offered.
  """

  kind: str
  hbm_bytes: float
  flops_per_s: float
  hbm_bytes_per_s: float
  ici_bytes_per_s: float
  slices: tuple[str, ...]


_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
# From cloud.google.com/tpu/docs/v5e, /v5p and /v6e.
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


def parse(name: str, field: str = "topology") -> tuple[int, str, str]:
  """Return the number of slices, the chip and the shape that a name means.

  "2xv5e:4x4" gives 2, "v5e" and "4x4".

  Args:
    name: of one or several slices.
    field: the setting that holds it, for the error message.

  Raises:
    ConfigError: there is no such slice.
  """
  found = re.fullmatch(r"(?s)(?:(\d)x(?=v))?(.*?)(?::(.*))?", name)
  assert found is not None  # the pattern matches any string
  count, chip, shape = int(found[1] or 1), found[2], found[3]
  sections.require(
    chip in CHIPS and count > 0,
    field,
    f"{sections.shown(name)} does not exist; chips are {', '.join(CHIPS)}; for"
    " example, v5p:4x4x4 is one slice and 2xv5e:4x4 is two slices",
  )
  sections.require(
    shape in CHIPS[chip].slices,
    field,
    f"{sections.shown(name)} does not exist; slices of {chip} are"
    f" {', '.join(CHIPS[chip].slices)}",
  )
  return count, chip, shape


def num_chips(name: str, field: str = "topology") -> int:
  """Return the number of chips that a name means; see `parse`.

  Raises:
    ConfigError: there is no such slice.
  """
  count, _, shape = parse(name, field)
  return count * math.prod(int(size) for size in shape.split("x"))
