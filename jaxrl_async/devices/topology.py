"""Devices of TPU slices that this machine does not have.

libtpu compiles for a slice by its name, without one. What it describes are
devices that programs can be compiled for and that nothing can be put on.
"""

import importlib
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import topologies

from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips

# libtpu lets one process of a machine in, until that ends.
_IS_TAKEN = "libtpu multi-process lockfile"


def chip_of(device: Any) -> tpu_chips.Chip | None:
  """The chip of a device, if it is one of `tpu_chips.CHIPS`."""
  kinds = {chip.kind: chip for chip in tpu_chips.CHIPS.values()}
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


def devices(name: str, *, max_wait_s: float = 3_600.0) -> list[Any]:
  """The devices of a slice, such as v5p:4x4x4, or of several.

  Those of a second slice are the first one's again: a program is compiled for
  one slice, and it is the same for each. Waits for other processes that compile
  with libtpu.

  Args:
    name: as `tpu_chips.parse` takes it.
    max_wait_s: for those.

  Raises:
    ConfigError: there is no such slice, or nothing to compile with.
  """
  count, chip, shape = tpu_chips.parse(name)
  try:
    importlib.import_module("libtpu")
  except ImportError as error:
    raise sections.ConfigError(
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
        raise sections.ConfigError(f"topology: {name}: {reason}") from error
      if time.monotonic() > end_s:
        raise sections.ConfigError(
          f"topology: another process held libtpu for {max_wait_s:.0f} s; try"
          " again when it has ended"
        ) from error
    if not is_waiting:
      logging.warning("waiting for another process that uses libtpu")
    is_waiting = True
    time.sleep(0.5)
