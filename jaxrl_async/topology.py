"""TPU slices that this machine does not have: their devices and their chips.

libtpu compiles for a slice by its name, without one. What it describes are
devices that programs can be compiled for and that nothing can be put on.
"""

import dataclasses
import importlib
import re
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import topologies

from jaxrl_async import config

# libtpu lets one process of a machine in, until that ends.
_IS_TAKEN = "libtpu multi-process lockfile"


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


def chip_of(device: Any) -> Chip | None:
  """The chip of a device, if it is one of `CHIPS`."""
  kinds = {chip.kind: chip for chip in CHIPS.values()}
  return kinds.get(device.device_kind)


def is_described(device: Any) -> bool:
  """Whether a device can be compiled for, but is not there."""
  return device not in jax.devices()


def memory_bytes(device: Any) -> int | float | None:
  """What programs may use of its memory, None where nothing says so."""
  if is_described(device):
    chip = chip_of(device)
    return chip.hbm_bytes if chip else None
  return (device.memory_stats() or {}).get("bytes_limit")


def parse(name: str) -> tuple[int, str, str]:
  """How many slices, of which chip, and their shape: 2xv5e:4x4 is 2, v5e, 4x4.

  Raises:
    ConfigError: there is no such slice.
  """
  found = re.fullmatch(r"(?:(\d)x(?=v))?(.*?)(?::(.*))?", name)
  assert found is not None  # whatever the name
  count, chip, shape = int(found[1] or 1), found[2], found[3]
  config.require(
    chip in CHIPS and count > 0,
    "topology",
    f"{name!r} does not exist; chips are {', '.join(CHIPS)}, and v5p:4x4x4 is"
    " a slice of one, 2xv5e:4x4 two slices",
  )
  config.require(
    shape in CHIPS[chip].slices,
    "topology",
    f"{name!r} does not exist; slices of {chip} are"
    f" {', '.join(CHIPS[chip].slices)}",
  )
  return count, chip, shape


def devices(name: str, *, max_wait_s: float = 3_600.0) -> list[Any]:
  """The devices of a slice, such as v5p:4x4x4, or of several.

  Those of a second slice are the first one's again: a program is compiled for
  one slice, and it is the same for each. Waits for other processes that compile
  with libtpu.

  Args:
    name: as `parse` takes it.
    max_wait_s: for those.

  Raises:
    ConfigError: there is no such slice, or nothing to compile with.
  """
  count, chip, shape = parse(name)
  try:
    importlib.import_module("libtpu")
  except ImportError as error:
    raise config.ConfigError(
      "topology: libtpu, which compiles for TPUs, is not installed; add the"
      " extra, as in uv run --extra tpu-aot or pip install -e '.[tpu-aot]'"
    ) from error
  end_s = time.monotonic() + max_wait_s
  is_waiting = False
  while True:
    try:
      one = topologies.get_topology_desc(f"{chip}:{shape}", "tpu")
      return count * list(one.devices)
    except jax.errors.JaxRuntimeError as error:
      if _IS_TAKEN not in str(error):
        reason = str(error).splitlines()[0]
        raise config.ConfigError(f"topology: {name}: {reason}") from error
      if time.monotonic() > end_s:
        raise config.ConfigError(
          f"topology: another process held libtpu for {max_wait_s:.0f} s; try"
          " again when it has ended"
        ) from error
    if not is_waiting:
      logging.warning("waiting for another process that uses libtpu")
    is_waiting = True
    time.sleep(0.5)
