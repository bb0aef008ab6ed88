"""XLA's flags, which it reads from the environment when JAX looks for devices.

The launch scripts set all of them. Only the flag below is set here as well, for
a script of the user's that trains: without it, `run.exact_resume` would not be
exact on every processor. This module does not import JAX.
"""

import os
import sys

# Makes a sequence's bits independent of its slot, also on a CPU. "Randomness is
# a function" in docs/design.md has the reason.
SAME_BITS = "--xla_cpu_experimental_ynn_fusion_type="


def current() -> str:
  """Return the flags that XLA was started with, or will be."""
  return os.environ.get("XLA_FLAGS", "")


def use_same_bits() -> bool:
  """Set the flag, and return whether it is set for XLA.

  It is not if JAX has looked for devices before.
  """
  if SAME_BITS in current():
    return True
  if "jax" in sys.modules:
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
      return False
  os.environ["XLA_FLAGS"] = f"{current()} {SAME_BITS}".strip()
  return True
