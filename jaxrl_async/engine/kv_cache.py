"""The key-value cache, in two layouts.

`Slots`: every slot has room for the longest sequence. Keys are [slot, kv head,
head size, time], so that scores are a matrix product along time without a
transposition; values are [slot, kv head, time, head size].

`Pages`: slots share a pool of pages, which may be smaller than all of them
would need at once; a table [slot, page of the sequence] says where its tokens
are. Both arrays are [kv head, page, time in page, head size], which is what
kernels that read pages directly expect.

Layers are separate arrays: a stacked cache would be copied by the scan over
layers. Prefilled rows are in the layout of `Slots`, in either case.
"""

from collections.abc import Callable
import dataclasses

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_async.models import configs
from jaxrl_async.models.attention import reference

Layer = tuple[jax.Array, jax.Array]
# Of pages, queries [B N H], positions [B] and the table [B W].
PagedAttention = Callable[[Layer, jax.Array, jax.Array, jax.Array], jax.Array]


def from_prefill(
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  dtype: jnp.dtype,
) -> Layer:
  """A layer's rows in the layout of `Slots`."""
  key, value = key.astype(dtype), value.astype(dtype)
  return jnp.transpose(key, (0, 2, 3, 1)), jnp.transpose(value, (0, 2, 1, 3))


def empty_rows(
  model: configs.ModelConfig, *, rows: int, tokens: int, dtype: jnp.dtype
) -> list[Layer]:
  """Rows to be filled by `extend_rows`, and the cache of `Slots`."""
  k, h = model.num_kv_heads, model.head_dim
  return [
    (
      jnp.zeros((rows, k, h, tokens), dtype),
      jnp.zeros((rows, k, tokens, h), dtype),
    )
    for _ in range(model.num_layers)
  ]


def extend_rows(
  layer: Layer, chunk: Layer, start: Int[Array, ""] | int
) -> Layer:
  """Rows with a chunk of tokens written at `start`."""
  return (
    jax.lax.dynamic_update_slice_in_dim(layer[0], chunk[0], start, axis=3),
    jax.lax.dynamic_update_slice_in_dim(layer[1], chunk[1], start, axis=2),
  )


def attend_rows(
  layer: Layer,
  query: Float[Array, "B T N H"],
  start: Int[Array, ""] | int,
) -> Float[Array, "B T N H"]:
  """Queries at positions start, start + 1, … over cached rows."""
  keys, values = layer
  rows, length, num_heads, head_dim = query.shape
  num_kv_heads, width = keys.shape[1], keys.shape[3]
  grouped = query.reshape(rows, length, num_kv_heads, -1, head_dim)
  scores = jnp.einsum(
    "btkgh,bkhs->bkgts", grouped, keys, preferred_element_type=jnp.float32
  )
  scores = scores * jnp.float32(head_dim**-0.5)
  seen = jnp.arange(width)[None] <= start + jnp.arange(length)[:, None]
  scores = jnp.where(
    seen[None, None, None], scores, jnp.float32(reference.NEGATIVE)
  )
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  mixed = jnp.einsum("bkgts,bksh->btkgh", weights, values)
  return mixed.reshape(rows, length, num_heads, head_dim).astype(query.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
  """A row of the cache for each slot."""

  num_slots: int
  cache_tokens: int

  logical_axes = ("batch", "kv_heads")

  def init(self, model: configs.ModelConfig, dtype: jnp.dtype) -> list[Layer]:
    """An empty cache."""
    return empty_rows(
      model, rows=self.num_slots, tokens=self.cache_tokens, dtype=dtype
    )

  def insert(
    self,
    layer: Layer,
    rows: Layer,
    slots: Int[Array, "M"],
    sources: Int[Array, "M"],
  ) -> Layer:
    """Copies prefilled rows into slots; a slot out of range writes nothing."""
    length = rows[0].shape[-1]
    keys = layer[0].at[slots, :, :, :length].set(rows[0][sources], mode="drop")
    values = layer[1].at[slots, :, :length].set(rows[1][sources], mode="drop")
    return keys, values

  def write(
    self,
    layer: Layer,
    key: Float[Array, "B K H"],
    value: Float[Array, "B K H"],
    positions: Int[Array, "B"],
    pages: Int[Array, "B P"],
    is_active: Bool[Array, "B"],
  ) -> Layer:
    """Writes one token a slot at its position."""
    del pages, is_active  # an idle slot may write what nobody reads
    slots = jnp.arange(self.num_slots)
    keys, values = layer
    keys = keys.at[slots, :, :, positions].set(
      key.astype(keys.dtype), mode="drop", unique_indices=True
    )
    values = values.at[slots, :, positions].set(
      value.astype(values.dtype), mode="drop", unique_indices=True
    )
    return keys, values

  def attend(
    self,
    layer: Layer,
    query: Float[Array, "B N H"],
    positions: Int[Array, "B"],
    pages: Int[Array, "B P"],
    window: int,
  ) -> Float[Array, "B N H"]:
    """One query a slot over cached times 0..position, all below `window`."""
    del pages
    keys, values = layer[0][..., :window], layer[1][:, :, :window]
    return attend_cached(query, keys, values, positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
  """A pool of pages that all slots share.

  Attributes:
    attention: of `paged_attention.IMPLEMENTATIONS`.
  """

  num_pages: int
  page_tokens: int
  attention: PagedAttention

  logical_axes = ("kv_heads",)

  def init(self, model: configs.ModelConfig, dtype: jnp.dtype) -> list[Layer]:
    """An empty pool."""
    shape = model.num_kv_heads, self.num_pages, self.page_tokens
    return [
      (
        jnp.zeros((*shape, model.head_dim), dtype),
        jnp.zeros((*shape, model.head_dim), dtype),
      )
      for _ in range(model.num_layers)
    ]

  def fill(
    self, layer: Layer, rows: Layer, row: Int[Array, ""], pages: Int[Array, "W"]
  ) -> Layer:
    """Copies a prefilled row into pages; one out of range is left out."""

    def put(pool: jax.Array, times: Float[Array, "K S H"]) -> jax.Array:
      k, _, h = times.shape
      paged = times.reshape(k, len(pages), self.page_tokens, h)
      return pool.at[:, pages].set(paged, mode="drop")

    # A gather: of rows split over devices a slice would bring all to each.
    keys, values = (jnp.take(x, row[None], axis=0)[0] for x in rows)
    return put(layer[0], jnp.swapaxes(keys, 1, 2)), put(layer[1], values)

  def write(
    self,
    layer: Layer,
    key: Float[Array, "B K H"],
    value: Float[Array, "B K H"],
    positions: Int[Array, "B"],
    pages: Int[Array, "B P"],
    is_active: Bool[Array, "B"],
  ) -> Layer:
    """Writes one token a slot; an idle slot's pages may be another's now."""
    index = (positions // self.page_tokens)[:, None]
    page = jnp.take_along_axis(pages, index, axis=1, mode="clip")[:, 0]
    page = jnp.where(is_active, page, self.num_pages)
    time = positions % self.page_tokens

    def put(pool: jax.Array, rows: Float[Array, "B K H"]) -> jax.Array:
      rows = jnp.swapaxes(rows, 0, 1).astype(pool.dtype)
      return pool.at[:, page, time].set(rows, mode="drop")

    return put(layer[0], key), put(layer[1], value)

  def attend(
    self,
    layer: Layer,
    query: Float[Array, "B N H"],
    positions: Int[Array, "B"],
    pages: Int[Array, "B P"],
    window: int,
  ) -> Float[Array, "B N H"]:
    """As of `Slots`."""
    pages = pages[:, : -(-window // self.page_tokens)]
    return self.attention(layer, query, positions, pages)


def attend_cached(
  query: Float[Array, "B N H"],
  keys: Float[Array, "B K H S"],
  values: Float[Array, "B K S H"],
  positions: Int[Array, "B"],
) -> Float[Array, "B N H"]:
  """One query a row over its keys and values up to its position."""
  rows, num_heads, head_dim = query.shape
  num_kv_heads, width = keys.shape[1], keys.shape[3]
  grouped = query.reshape(rows, num_kv_heads, -1, head_dim)
  scores = jnp.einsum(
    "bkgh,bkhs->bkgs", grouped, keys, preferred_element_type=jnp.float32
  )
  scores = scores * jnp.float32(head_dim**-0.5)
  seen = jnp.arange(width)[None] <= positions[:, None]
  scores = jnp.where(
    seen[:, None, None], scores, jnp.float32(reference.NEGATIVE)
  )
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  mixed = jnp.einsum("bkgs,bksh->bkgh", weights, values)
  return mixed.reshape(rows, num_heads, head_dim).astype(query.dtype)
