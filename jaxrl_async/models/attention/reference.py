"""Attention written out, and over padded rows (prefill).

Implementations sit in a dict; "xla" is the reference every other one is tested
against, with float32 scores and softmax. Packed rows are those of
`packed_attention.py`; decoding reads the cache: `rollout/paged_attention.py`.
"""

from collections.abc import Callable

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MIXED = "mixed"  # what attention gave, for rematerialisation policies
NEGATIVE = -1e30  # finite, so that a row with nothing to attend stays finite


def packed_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
  """True where query t (second axis) may look at key s (third axis).

  Causal within a segment; padding (segment 0) looks at padding only.
  """
  length = segment_ids.shape[1]
  same = segment_ids[:, :, None] == segment_ids[:, None, :]
  order = jnp.arange(length)
  causal = order[:, None] >= order[None, :]
  return same & causal[None]


def xla_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  mask: Bool[Array, "B T T"],
) -> Float[Array, "B T N H"]:
  """Grouped-query attention written out: softmax(q k^T / sqrt(H)) v."""
  batch, length, num_heads, head_dim = query.shape
  num_kv_heads = key.shape[2]
  grouped = query.reshape(
    batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim
  )
  scores = jnp.einsum(
    "btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32
  )
  scores = scores * jnp.float32(head_dim**-0.5)
  scores = jnp.where(mask[:, None, None], scores, jnp.float32(NEGATIVE))
  weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
  mixed = jnp.einsum("bkgts,bskh->btkgh", weights, value)
  return mixed.reshape(batch, length, num_heads, head_dim)


def causal_xla(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  lengths: Int[Array, "B"],
) -> Float[Array, "B T N H"]:
  """Rows of `lengths` tokens from their start, padding to the right."""
  order = jnp.arange(query.shape[1], dtype=jnp.int32)[None]
  segments = (order < lengths[:, None]).astype(jnp.int32)
  return xla_attention(query, key, value, packed_mask(segments))


def causal_cudnn(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  lengths: Int[Array, "B"],
) -> Float[Array, "B T N H"]:
  """CuDNN's flash attention, of 16-bit types.

  A token never looks at the padding to its right, so `lengths` say nothing
  new, and without them what padding gets is finite: it goes to the cache.
  """
  del lengths
  return jax.nn.dot_product_attention(
    query, key, value, is_causal=True, implementation="cudnn"
  )


def causal_splash(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  lengths: Int[Array, "B"],
  *,
  interpret: bool = False,
) -> Float[Array, "B T N H"]:
  """JAX's splash attention for TPU; of `lengths` as `causal_cudnn`."""
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  del lengths
  length, num_heads, head_dim = query.shape[1:]
  padded = -(-length // 128) * 128  # a multiple of the lanes
  block = next(b for b in (512, 384, 256, 128) if padded % b == 0)
  mask = splash.MultiHeadMask([splash.CausalMask((padded, padded))] * num_heads)
  attend = splash.make_splash_mha_single_device(
    mask,
    block_sizes=splash.BlockSizes(block_q=block, block_kv=block),
    interpret=interpret,
  )

  def heads_first(rows):
    rows = jnp.pad(rows, ((0, 0), (0, padded - length), (0, 0), (0, 0)))
    return jnp.swapaxes(rows, 1, 2)

  scaled = query * jnp.asarray(head_dim**-0.5, query.dtype)
  mixed = jax.vmap(attend)(*map(heads_first, (scaled, key, value)))
  assert isinstance(mixed, jax.Array)  # without its residuals
  return jnp.swapaxes(mixed, 1, 2)[:, :length]


CausalAttention = Callable[
  [jax.Array, jax.Array, jax.Array, jax.Array], jax.Array
]
CAUSAL: dict[str, CausalAttention] = {
  "xla": causal_xla,
  "cudnn": causal_cudnn,
  "splash": causal_splash,
}
