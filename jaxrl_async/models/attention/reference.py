"""Reference attention, and attention over padded rows for prefill.

The implementations are in a dict. "xla", with float32 scores and softmax, is
the reference that every other one is tested against. Packed rows are in
`packed_attention.py`, and decoding, which reads the cache, is in
`paged_attention.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MIXED = "mixed"  # name of attention's output, for rematerialisation policies
LANES = 128  # of a TPU's registers; its kernels take multiples of it
NEGATIVE = -1e30  # finite, so that the softmax of a fully masked row is finite


def packed_mask(
  segment_ids: Int[Array, "B T"],
  sliding_window: int | Int[Array, ""] | None = None,
) -> Bool[Array, "B T T"]:
  """Return True where query t (second axis) may see key s (third axis).

  The mask is causal within a segment. Padding (segment 0) sees only padding.
  With a sliding window, t sees t - sliding_window < s <= t, which is itself and
  the sliding_window - 1 tokens before it (arXiv:2310.06825).
  """
  length = segment_ids.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  order = jnp.arange(length)
  causal = order[:, None] >= order[None, :]
  if sliding_window is not None:
    causal &= order[:, None] - order[None, :] < sliding_window
  return same & causal[None]


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
  """Return cap tanh(x / cap) (arXiv:2408.00118), or x without a cap."""
  return x if cap is None else jnp.float32(cap) * jnp.tanh(x / cap)


def scaled(
  scores: jax.Array, head_dim: int, soft_cap: float | None
) -> jax.Array:
  """Return products of queries and keys over sqrt(H), within a soft cap."""
  return soft_capped(scores * jnp.float32(head_dim**-0.5), soft_cap)


def refuse_soft_cap(soft_cap: float | None) -> None:
  """Raise a NotImplementedError if scores are to have a soft cap.

  Every kernel that has none calls it. The choice of a kernel tells the reason.
  """
  if soft_cap is not None:
    raise NotImplementedError("it has no soft caps of scores")


def xla_attention(
  query: Float[Array, "B Q N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  mask: Bool[Array, "B Q T"],
  soft_cap: float | None = None,
) -> Float[Array, "B Q N H"]:
  """Return grouped-query attention: softmax(q k^T / sqrt(H)) v.

  Each of the K key and value heads serves N / K query heads.

  Args:
    query: one per token and query head.
    key: one per token and kv head.
    value: one per token and kv head.
    mask: True where a query (second axis) may see a key (third axis).
    soft_cap: of the scores, see `soft_capped`.
  """
  batch, length, num_heads, head_dim = query.shape
  num_kv_heads = key.shape[2]
  grouped = query.reshape(
    batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim
  )
  scores = jnp.einsum(
    "btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32
  )
  scores = scaled(scores, head_dim, soft_cap)
  scores = jnp.where(mask[:, None, None], scores, jnp.float32(NEGATIVE))
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  mixed = jnp.einsum("bkgts,bskh->btkgh", weights, value)
  return mixed.reshape(batch, length, num_heads, head_dim)


def causal_xla(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  lengths: Int[Array, "B"],
  *,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
  """Return causal attention over rows of `lengths` tokens, padded right.

  Every entry of `CAUSAL` takes the same arguments and returns the mixed values.
  The results at padding are finite but otherwise meaningless. `sliding_window`
  is as in `packed_mask`, and `soft_cap` as in `xla_attention`.
  """
  order = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
  segments = (order < lengths[:, None]).astype(jnp.int32)
  mask = packed_mask(segments, sliding_window)
  return xla_attention(query, key, value, mask, soft_cap)


def causal_cudnn(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  lengths: Int[Array, "B"],
  *,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
  """Return cuDNN's causal flash attention, for 16-bit types.

  `lengths` is not needed, because a token never sees the padding to its right.
  Without a mask, the results at padding are finite, which matters because they
  go to the cache.
  """
  del lengths
  refuse_soft_cap(soft_cap)
  return jax.nn.dot_product_attention(
    query,
    key,
    value,
    is_causal=True,
    local_window_size=(
      None if sliding_window is None else (sliding_window - 1, 0)
    ),
    implementation="cudnn",
  )


def splash_block(length: int) -> int:
  """Return the largest block of splash attention that divides a length.

  Args:
    length: a multiple of LANES.
  """
  return next(b for b in (512, 384, 256, LANES) if length % b == 0)


def splash_mask(length: int, sliding_window: int | None) -> Any:
  """Return splash attention's mask; it skips blocks outside of the window."""
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  if sliding_window is None:
    return splash.CausalMask((length, length))
  return splash.LocalMask((length, length), (sliding_window - 1, 0), 0)


def heads_first(
  rows: Float[Array, "B T N H"], missing: int
) -> Float[Array, "B N padded H"]:
  """Append `missing` tokens of padding, and move heads before tokens."""
  padded = jnp.pad(rows, ((0, 0), (0, missing), (0, 0), (0, 0)))
  return jnp.swapaxes(padded, 1, 2)


def causal_splash(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  lengths: Int[Array, "B"],
  *,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
  interpret: bool = False,
) -> Float[Array, "B T N H"]:
  """Return JAX's causal splash attention for TPU.

  `lengths` is not needed, as in `causal_cudnn`.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  del lengths
  refuse_soft_cap(soft_cap)
  length, num_heads, head_dim = query.shape[1:]
  padded = length + -length % LANES
  block = splash_block(padded)
  mask = splash_mask(padded, sliding_window)
  attend = splash.make_splash_mha_single_device(
    splash.MultiHeadMask([mask] * num_heads),
    block_sizes=splash.BlockSizes(block_q=block, block_kv=block),
    interpret=interpret,
  )

  scaled = query * jnp.asarray(head_dim**-0.5, query.dtype)
  mixed = jax.vmap(attend)(
    *(heads_first(x, padded - length) for x in (scaled, key, value))
  )
  assert isinstance(mixed, jax.Array)  # the result alone, without residuals
  return jnp.swapaxes(mixed, 1, 2)[:, :length]


# Takes queries, keys and values [B T heads H], lengths [B], and the keywords
# `sliding_window` and `soft_cap`.
CausalAttention = Callable[..., jax.Array]
CAUSAL: dict[str, CausalAttention] = {
  "xla": causal_xla,
  "cudnn": causal_cudnn,
  "splash": causal_splash,
}
