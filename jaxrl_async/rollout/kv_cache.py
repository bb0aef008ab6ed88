"""The key-value cache: dense slots, one pair of arrays a layer.

Keys are [slot, kv head, head size, time], so that scores are a matrix product
along time without a transposition; values are [slot, kv head, time, head
size]. Layers are separate arrays: a stacked cache would be copied by the scan
over layers.
"""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.models import attention
from jaxrl_async.models import configs

Layer = tuple[jax.Array, jax.Array]


def init(
  config: configs.ModelConfig, *, slots: int, tokens: int, dtype: jnp.dtype
) -> list[Layer]:
  """An empty cache."""
  k, h = config.num_kv_heads, config.head_dim
  return [
    (
      jnp.zeros((slots, k, h, tokens), dtype),
      jnp.zeros((slots, k, tokens, h), dtype),
    )
    for _ in range(config.num_layers)
  ]


def from_prefill(
  key: Float[Array, "B T K H"], value: Float[Array, "B T K H"], dtype
) -> Layer:
  """A layer's rows in the cache's layout."""
  key, value = key.astype(dtype), value.astype(dtype)
  return jnp.transpose(key, (0, 2, 3, 1)), jnp.transpose(value, (0, 2, 1, 3))


def insert_rows(
  layer: Layer,
  rows: Layer,
  slots: Int[Array, "B"],
  sources: Int[Array, "B"],
) -> Layer:
  """Copies prefilled rows into slots; a slot out of range writes nothing."""
  length = rows[0].shape[-1]
  keys = layer[0].at[slots, :, :, :length].set(rows[0][sources], mode="drop")
  values = layer[1].at[slots, :, :length].set(rows[1][sources], mode="drop")
  return keys, values


def write_token(
  layer: Layer,
  key: Float[Array, "B K H"],
  value: Float[Array, "B K H"],
  positions: Int[Array, "B"],
) -> Layer:
  """Writes one token a slot at its position."""
  slots = jnp.arange(key.shape[0])
  keys, values = layer
  keys = keys.at[slots, :, :, positions].set(
    key.astype(keys.dtype), mode="drop", unique_indices=True
  )
  values = values.at[slots, :, positions].set(
    value.astype(values.dtype), mode="drop", unique_indices=True
  )
  return keys, values


def attend(
  layer: Layer,
  query: Float[Array, "B N H"],
  positions: Int[Array, "B"],
  window: int,
) -> Float[Array, "B N H"]:
  """One query a slot over cached times 0..position, all below `window`."""
  keys, values = layer[0][..., :window], layer[1][:, :, :window]
  slots, num_heads, head_dim = query.shape
  num_kv_heads = keys.shape[1]
  grouped = query.reshape(
    slots, num_kv_heads, num_heads // num_kv_heads, head_dim
  )
  scores = jnp.einsum(
    "bkgh,bkhs->bkgs", grouped, keys, preferred_element_type=jnp.float32
  )
  scores = scores * jnp.float32(head_dim**-0.5)
  seen = jnp.arange(window)[None] <= positions[:, None]
  scores = jnp.where(
    seen[:, None, None], scores, jnp.float32(attention.NEGATIVE)
  )
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  mixed = jnp.einsum("bkgs,bksh->bkgh", weights, values)
  return mixed.reshape(slots, num_heads, head_dim).astype(query.dtype)
