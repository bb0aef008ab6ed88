"""Attention over packed rows (trainer, prefill); the cache has its own file.

Scores and softmax are float32. Implementations sit in `IMPLEMENTATIONS`;
"xla" is the reference every other one is tested against.
"""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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


IMPLEMENTATIONS = {"xla": xla_attention}
