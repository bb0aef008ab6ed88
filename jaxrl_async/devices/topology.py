"""Devices of TPU slices and GPUs that this machine does not have.

libtpu can compile for a slice given only its name, and JAX's CUDA plugin for a
GPU given its description. The devices can be compiled for, but no array can be
placed on them.
"""

import importlib
import time
from typing import Any

from absl import logging
import jax
from jax.experimental import topologies

from jaxrl_async.config import sections
from jaxrl_async.devices import gpus
from jaxrl_async.devices import tpu_chips

# Only one process of a machine can use libtpu at a time.
_IS_TAKEN = "libtpu multi-process lockfile"


def chip_of(device: Any) -> tpu_chips.Chip | None:
  """Return the chip of a device; None if neither table of chips has it."""
  chips = tpu_chips.CHIPS | gpus.KINDS
  kinds = {chip.kind: chip for chip in chips.values()}
  return kinds.get(device.device_kind)


def is_described(device: Any) -> bool:
  """Return whether a device is only described, and not attached."""
  return device not in jax.devices()


def memory_bytes(device: Any) -> int | float | None:
  """Return the device memory that programs may use, or None if unknown."""
  if is_described(device):
    chip = chip_of(device)
    return chip.hbm_bytes if chip else None
  return (device.memory_stats() or {}).get("bytes_limit")


def devices(name: str, *, max_wait_s: float = 3_600.0) -> list[Any]:
  """Return the devices of one slice, such as v5p:4x4x4, of several, or GPUs.

  The devices of further slices repeat those of the first: a program is compiled
  for one slice, and the result is the same for each. The call waits while
  another process compiles with libtpu.

  Args:
    name: in the format of `tpu_chips.parse`, or of `gpus.parse` with a kind.
      For GPUs, JAX's platforms have to be set to the CPU: else the plugin looks
      for GPUs, and refuses to work without one.
    max_wait_s: longest time to wait for other processes.

  Raises:
    ConfigError: there is no such slice, what compiles for it is not installed,
      or the wait took too long.
  """
  if gpus.is_named(name):
    return _gpus(gpus.parse(name))
  count, chip, shape = tpu_chips.parse(name)
  try:
    importlib.import_module("libtpu")
  except ImportError as error:
    raise sections.ConfigError(
      "topology: libtpu, which compiles for TPUs, is not installed; add the"
      " extra, with uv run --extra tpu-aot or pip install -e '.[tpu-aot]'"
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


def _gpus(named: gpus.Gpus) -> list[Any]:
  try:
    found = topologies.get_topology_desc(
      named.kind,
      "cuda",
      target_config=gpus.description(named.kind),
      topology=f"1x1x{named.count}",
    )
  except (RuntimeError, NotImplementedError, ValueError) as error:
    reason = str(error).splitlines()[0]
    raise sections.ConfigError(
      f"topology: the plugin that compiles for {named.kind} does not work"
      f" ({reason}); add the extra, with uv run --extra cuda13 or"
      " pip install -e '.[cuda13]'"
    ) from error
  return list(found.devices)
