"""Attention of one query per slot over a cache of pages.

XLA's implementation gathers the pages. The kernels, which are part of JAX, read
the pages in place.

The entries of a table past the end of its sequence, and those of idle slots,
have no meaning and may be out of range. They are clipped to pages that exist,
and lengths are clipped to the tokens that the table covers.
"""

from collections.abc import Callable, Sequence
import functools
import itertools
import warnings

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.models.attention import reference

# The keys and the values of a layer.
Layer = tuple[jax.Array, jax.Array]
# Takes the pages, queries [B N H], positions [B], the table [B W], and the
# keywords `sliding_window` and `soft_cap`.
PagedAttention = Callable[..., jax.Array]

# Tokens that a kernel processes at a time. Tables are padded to whole blocks,
# and a short table does not get smaller blocks. A kernel that works for one
# table width therefore works for every width.
_GPU_BLOCK_TOKENS = 128
_TPU_BLOCK_TOKENS = 512
_MAX_GPU_SPLITS = 16


def attend_cached(
  query: Float[Array, "B N H"],
  parts: Sequence[Layer],
  positions: Int[Array, "B"],
  *,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
) -> Float[Array, "B N H"]:
  """Return attention of one query per row over times 0..position.

  Parts after a row's position add exact zeros to its result, which therefore
  does not depend on how many parts there are. With a sliding window, only the
  newest `sliding_window` of these times count.

  Args:
    query: one per row and query head.
    parts: keys [B K H S] and values [B K S H] of successive times.
    positions: of the queries.
    sliding_window: number of tokens that a query sees, itself included.
    soft_cap: of the scores, as in `reference.xla_attention`.
  """
  rows, num_heads, head_dim = query.shape
  num_kv_heads = parts[0][0].shape[1]
  grouped = query.reshape(rows, num_kv_heads, -1, head_dim)
  scores = [
    jnp.einsum(
      "bkgh,bkhs->bkgs", grouped, keys, preferred_element_type=jnp.float32
    )
    for keys, _ in parts
  ]
  scores = jnp.concatenate(scores, axis=-1)
  scores = reference.scaled(scores, head_dim, soft_cap)
  width = scores.shape[-1]
  seen = jnp.arange(width)[None] <= positions[:, None]
  if sliding_window is not None:
    seen &= jnp.arange(width)[None] > positions[:, None] - sliding_window
  scores = jnp.where(
    seen[:, None, None], scores, jnp.float32(reference.NEGATIVE)
  )
  weights = jax.nn.softmax(scores, axis=-1)
  ends = itertools.accumulate(values.shape[2] for _, values in parts)
  mixed = [
    jnp.einsum(
      "bkgs,bksh->bkgh",
      weights[..., end - values.shape[2] : end].astype(values.dtype),
      values,
      preferred_element_type=jnp.float32,
    )
    for end, (_, values) in zip(ends, parts, strict=True)
  ]
  mixed = functools.reduce(jnp.add, mixed)
  return mixed.reshape(rows, num_heads, head_dim).astype(query.dtype)


def xla(
  layer: Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  pages: Int[Array, "B W"],
  *,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
) -> Float[Array, "B N H"]:
  """Return attention computed by XLA, which gathers the pages of the table.

  With a sliding window it gathers only those that the window can reach.
  """
  if sliding_window is not None:
    page_tokens = layer[0].shape[2]
    first = jnp.maximum(positions - sliding_window + 1, 0) // page_tokens
    # As many pages as so many tokens in a row may lie in.
    reach = min(-(-(sliding_window - 1) // page_tokens) + 1, pages.shape[1])
    index = first[:, None] + jnp.arange(reach)[None]
    pages = jnp.take_along_axis(pages, index, axis=1, mode="clip")
    positions = positions - first * page_tokens

  def gather(pool: Float[Array, "K P page H"]) -> Float[Array, "B K S H"]:
    rows = jnp.moveaxis(jnp.take(pool, pages, axis=1, mode="clip"), 0, 1)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])

  keys = jnp.swapaxes(gather(layer[0]), 2, 3)
  return attend_cached(
    query,
    [(keys, gather(layer[1]))],
    positions,
    sliding_window=sliding_window,
    soft_cap=soft_cap,
  )


def _for_kernel(
  layer: Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  pages: Int[Array, "B W"],
  block_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
  """Convert the arguments to those of the kernels.

  Returns:
    Scaled queries, lengths, a table padded to whole blocks of pages, and the
    number of pages per block.
  """
  num_pages, page_tokens = layer[0].shape[1:3]
  per_block = max(1, block_tokens // page_tokens)
  # Triton needs shapes that are powers of two.
  per_block = 1 << (per_block.bit_length() - 1)
  width = pages.shape[1]
  table = jnp.pad(pages, ((0, 0), (0, -width % per_block)))
  table = jnp.clip(table, 0, num_pages - 1)
  lengths = jnp.clip(positions + 1, 1, width * page_tokens)
  scaled = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
  return scaled, lengths, table, per_block


def _refuse(sliding_window: int | None, soft_cap: float | None) -> None:
  """Raise a NotImplementedError if there is a window or a soft cap.

  The kernels read a sequence from its first token on.
  """
  reference.refuse_soft_cap(soft_cap)
  if sliding_window is not None:
    raise NotImplementedError("it has no sliding windows")


def gpu_paged(
  layer: Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  pages: Int[Array, "B W"],
  *,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
  interpret: bool = False,
) -> Float[Array, "B N H"]:
  """Return attention computed by JAX's Triton kernel.

  The head size and the page size must be powers of two.
  """
  _refuse(sliding_window, soft_cap)
  with warnings.catch_warnings():
    # JAX 0.11 gives a DeprecationWarning on this import.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import paged_attention as kernel

  query, lengths, table, per_block = _for_kernel(
    layer, query, positions, pages, _GPU_BLOCK_TOKENS
  )
  blocks = table.shape[1] // per_block
  splits = next(n for n in range(_MAX_GPU_SPLITS, 0, -1) if blocks % n == 0)
  return kernel.paged_attention(
    query,
    *layer,
    table,
    lengths,
    pages_per_compute_block=per_block,
    k_splits=splits,
    interpret=interpret,
  )


def tpu_paged(
  layer: Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  pages: Int[Array, "B W"],
  *,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
) -> Float[Array, "B N H"]:
  """Return attention computed by JAX's Mosaic kernel.

  The kernel rounds the cache to bfloat16.
  """
  _refuse(sliding_window, soft_cap)
  from jax.experimental.pallas.ops.tpu import paged_attention as kernel

  query, lengths, table, per_block = _for_kernel(
    layer, query, positions, pages, _TPU_BLOCK_TOKENS
  )
  # The kernel multiplies float32 by bfloat16, which strict promotion forbids.
  with jax.numpy_dtype_promotion("standard"):
    return kernel.paged_attention(
      query, *layer, lengths, table, pages_per_compute_block=per_block
    )


IMPLEMENTATIONS: dict[str, PagedAttention] = {
  "xla": xla,
  "gpu_paged": gpu_paged,
  "tpu_paged": tpu_paged,
}
