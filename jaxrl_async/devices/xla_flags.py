"""XLA's flags, and what the processor is fast at.

XLA reads its flags from the environment when JAX looks for devices.

The launch scripts set all of them. A script of the user's that trains sets only
that of `of_same_bits`: without it, `run.exact_resume` would not be exact on
every processor. This module does not import JAX.
"""

import os
import pathlib
import sys

# Has XLA use its own products on a CPU, instead of those of YNNPACK.
OWN_PRODUCTS = "--xla_cpu_experimental_ynn_fusion_type="
# Has XLA use programs of a GPU that repeat their bits. Without it some add in
# any order, and which kernel is the fastest is measured at each start.
REPEATS_ON_GPU = "--xla_gpu_deterministic_ops=true"
_PROCESSOR = pathlib.Path("/proc/cpuinfo")
_GPU_DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# With this flag, GPUs sum the gradients of a layer while they compute the next
# one. Programs of a single GPU stay as they are. docs/project/scaling.md has
# the other flags that were tried.
_OF_GPUS = "--xla_gpu_enable_pipelined_all_reduce"


def current() -> str:
  """Return the flags that XLA was started with, or will be."""
  return os.environ.get("XLA_FLAGS", "")


def of_same_bits() -> str:
  """Return the flag that makes a sequence's bits independent of its slot.

  Which products depend on the row of the batch differs between processors:
  those of YNNPACK do with AVX-512, and XLA's own ones do without it.
  docs/explanation/overview.md, "Randomness is a function", has measurements.

  Returns:
    The flag, or "" if none is needed.
  """
  try:
    has_avx512 = "avx512" in _PROCESSOR.read_text()
  except OSError:
    has_avx512 = False  # not Linux: no processor there is known to need it
  return OWN_PRODUCTS if has_avx512 else ""


def has_bfloat16() -> bool:
  """Return whether the processor multiplies bfloat16, faster than float32."""
  try:
    text = _PROCESSOR.read_text()
  except OSError:
    return False  # not Linux
  return "avx512_bf16" in text or "amx_bf16" in text


def of_gpus() -> str:
  """Return the flag with which GPUs exchange while they compute.

  Returns:
    The flag, or "" if JAX will find no GPU of NVIDIA's, or the user has set it.
  """
  platforms = os.environ.get("JAX_PLATFORMS", "")
  if platforms:
    has_gpus = bool({"cuda", "gpu"} & {*platforms.split(",")})
  else:
    has_gpus = _GPU_DRIVER.exists()
  is_wanted = has_gpus and _OF_GPUS not in current()
  return f"{_OF_GPUS}=true" if is_wanted else ""


def use(flag: str) -> bool:
  """Set a flag, and return whether it is set for XLA.

  It is not if JAX has looked for devices before.

  Args:
    flag: the flag; "" is always set.
  """
  if flag in current():
    return True
  if "jax" in sys.modules:
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
      return False
  os.environ["XLA_FLAGS"] = f"{current()} {flag}".strip()
  return True
