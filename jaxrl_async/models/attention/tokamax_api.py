"""The only module that imports Tokamax: flash attention for Hopper and later.

Tokamax is where the GPU kernels of JAX went. Its benchmarks import xprof, which
nothing here needs. A stub takes its place in `sys.modules` while Tokamax is
imported, and is removed afterwards, whether or not xprof is installed.

What is used is not public: the public function takes no first key per query,
with which the kernel skips the segments that a query does not see.
"""

from collections.abc import Iterator
import contextlib
import functools
import sys
import types
from typing import Any

from absl import logging
import jax
from jaxtyping import Array, Float, Int

_STUBS = "xprof", "xprof.cli", "xprof.cli.tools"


@contextlib.contextmanager
def _importing() -> Iterator[None]:
  """Replace xprof with stubs, and undo this."""
  saved = {name: sys.modules.pop(name, None) for name in _STUBS}
  for name in _STUBS:
    sys.modules[name] = types.ModuleType(name)
  tools: Any = sys.modules[_STUBS[-1]]
  tools.get_kernel_stats_tool = None
  try:
    yield
  finally:
    for name, original in saved.items():
      del sys.modules[name]
      if original is not None:
        sys.modules[name] = original


def _is_news(record: Any) -> bool:
  """Return False for the screenful that Tokamax logs when it finds no tuning.

  No mask that it was tuned for has a first key per query, so that it never has
  one for ours, and takes its heuristics.
  """
  return not str(record.msg).startswith("Autotuning cache miss")


@functools.cache
def _modules() -> tuple[Any, Any]:
  """Return the modules of the attention's interface and of its masks."""
  with _importing():
    from tokamax._src import config
    from tokamax._src.ops.attention import api
    from tokamax._src.ops.attention import base
  # Its settings are flags. It would take the command line of a program that
  # does not use flags for its own.
  if not config.flags.FLAGS.is_parsed():
    config.flags.FLAGS.mark_as_parsed()
  logging.get_absl_logger().addFilter(_is_news)
  return api, base


def kernel_named(name: str) -> Any:
  """Return one of Tokamax's implementations of attention."""
  return _modules()[0].IMPLEMENTATIONS[name]


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  first_seen: Int[Array, "B T"],
  *,
  kernel: str = "mosaic_gpu",
) -> Float[Array, "B T N H"]:
  """Return causal attention in which query t sees no key before first_seen[t].

  The forward pass reads no block of keys that none of its queries sees. The
  backward pass reads all blocks up to the diagonal.

  Args:
    query: queries without the scale, bfloat16 or float16.
    key: one per token and kv head.
    value: one per token and kv head.
    first_seen: the first column that each query sees.
    kernel: Tokamax's name of the implementation. "mosaic_gpu" needs compute
      capability 9.0 or more. Its "xla" runs everywhere.

  Raises:
    ImportError: Tokamax is not installed.
    NotImplementedError: the kernel takes no such device, dtype or shape.
  """
  mask = _modules()[1].Mask(is_causal=True, k_start=first_seen[:, None])
  # It compares arrays of different rank, which the tests' settings forbid.
  with jax.numpy_rank_promotion("allow"):
    return kernel_named(kernel)(
      query, key, value, mask=mask, logits_scale=query.shape[-1] ** -0.5
    )
