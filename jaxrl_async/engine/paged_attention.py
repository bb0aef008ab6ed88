"""One query a slot over a cache of pages: XLA's gather, or a kernel of JAX.

The kernels read pages where they are. Tables may hold entries that mean
nothing, past a sequence's end or where its slot idles: each is made a page
that exists, and none is looked at further than the table reaches.
"""

import warnings

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.engine import kv_cache

# Tokens a kernel takes at a time, not fewer for a short table, which is padded:
# so that what worked once works at every width.
_GPU_BLOCK_TOKENS = 128
_TPU_BLOCK_TOKENS = 512
_MAX_GPU_SPLITS = 16


def xla(
  layer: kv_cache.Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  pages: Int[Array, "B W"],
) -> Float[Array, "B N H"]:
  """Gathers every page of the table."""

  def gather(pool: Float[Array, "K P page H"]) -> Float[Array, "B K S H"]:
    rows = jnp.moveaxis(jnp.take(pool, pages, axis=1, mode="clip"), 0, 1)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])

  keys = jnp.swapaxes(gather(layer[0]), 2, 3)
  return kv_cache.attend_cached(query, keys, gather(layer[1]), positions)


def _for_kernel(
  layer: kv_cache.Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  pages: Int[Array, "B W"],
  block_tokens: int,
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
  """Arguments as the kernels want them.

  Returns:
    Scaled queries, lengths, a table of whole blocks of pages, and how many
    pages a block has.
  """
  num_pages, page_tokens = layer[0].shape[1:3]
  per_block = max(1, block_tokens // page_tokens)
  per_block = 1 << (per_block.bit_length() - 1)  # Triton's shapes
  width = pages.shape[1]
  table = jnp.pad(pages, ((0, 0), (0, -width % per_block)))
  table = jnp.clip(table, 0, num_pages - 1)
  lengths = jnp.clip(positions + 1, 1, width * page_tokens)
  scaled = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
  return scaled, lengths, table, per_block


def gpu_paged(
  layer: kv_cache.Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  pages: Int[Array, "B W"],
  *,
  interpret: bool = False,
) -> Float[Array, "B N H"]:
  """JAX's Triton kernel: head and page sizes that are powers of two."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # JAX 0.11
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
  layer: kv_cache.Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  pages: Int[Array, "B W"],
) -> Float[Array, "B N H"]:
  """JAX's Mosaic kernel; it rounds the cache to bfloat16."""
  from jax.experimental.pallas.ops.tpu import paged_attention as kernel

  query, lengths, table, per_block = _for_kernel(
    layer, query, positions, pages, _TPU_BLOCK_TOKENS
  )
  # The kernel multiplies float32 by bfloat16.
  with jax.numpy_dtype_promotion("standard"):
    return kernel.paged_attention(
      query, *layer, lengths, table, pages_per_compute_block=per_block
    )


IMPLEMENTATIONS: dict[str, kv_cache.PagedAttention] = {
  "xla": xla,
  "gpu_paged": gpu_paged,
  "tpu_paged": tpu_paged,
}
