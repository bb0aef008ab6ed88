"""The key-value cache, in two layouts.

`Slots`: every slot has room for the longest sequence. Keys are [slot, kv head,
head size, time], so that the matrix product for the scores needs no
transposition. Values are [slot, kv head, time, head size]. Time is cut into
parts at the windows that decoding attends over, and each part is an array of
its own: a window is then the first few arrays, and nothing has to be copied out
of a longer one.

`Pages`: the slots share a pool of pages. The pool may be smaller than what all
slots together could need. A table [slot, page of the sequence] says where the
tokens of each slot are. Keys and values are [kv head, page, time in page, head
size], which is what kernels that read pages directly expect.

Each layer has its own arrays, because a scan over layers would copy a stacked
cache. Prefilled rows have the layout of `Slots` in both cases.

A slot of a layer with a sliding window is a ring of as many tokens as the
window has: the token at position p lies at time p % width. What the ring has
forgotten is exactly what the window hides. Pages and prefilled rows keep all
tokens, and attention masks those that the window hides.

A layer that mixes by the gated delta rule has a `gated_delta.State` for each
slot, in both layouts: it does not grow with the tokens. A state is that after
all tokens but the newest, which the next decode step takes.
"""

from collections.abc import Iterator
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_async.models import configs
from jaxrl_async.models import gated_delta
from jaxrl_async.models.attention import paged_attention
from jaxrl_async.models.attention import reference

Layer = paged_attention.Layer
# The keys and the values of a layer, part by part.
PartedLayer = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]
# Of the scores that `attend_rows` makes at a time, on all devices together.
SCORES_BYTES = 256 << 20


def from_prefill(
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  dtype: jnp.dtype,
) -> Layer:
  """Return the prefilled rows of a layer in the layout of `Slots`."""
  key, value = key.astype(dtype), value.astype(dtype)
  return jnp.transpose(key, (0, 2, 3, 1)), jnp.transpose(value, (0, 2, 1, 3))


def empty_rows(
  model: configs.ModelConfig, *, rows: int, tokens: int, dtype: jnp.dtype
) -> list[Layer | gated_delta.State]:
  """Return zeros for every layer, as rows that `extend_rows` fills."""
  return with_states(
    model,
    rows,
    dtype,
    [_empty_layer(model, rows, tokens, dtype) for _ in range(model.num_layers)],
  )


def with_states(
  model: configs.ModelConfig, rows: int, dtype: jnp.dtype, cache: list[Any]
) -> list[Any]:
  """Return a cache with empty states in the layers that have them."""
  if model.delta is None:
    return cache
  return [
    gated_delta.empty(model.delta, rows, dtype) if is_delta else layer
    for layer, is_delta in zip(cache, model.is_delta, strict=True)
  ]


def insert_states(
  state: gated_delta.State,
  rows: gated_delta.State,
  slots: Int[Array, "M"],
  sources: Int[Array, "M"],
) -> gated_delta.State:
  """Copy states of rows into slots, except for slots that are out of range."""
  return jax.tree.map(
    lambda held, new: held.at[slots].set(new[sources], mode="drop"),
    state,
    rows,
  )


def _empty_layer(
  model: configs.ModelConfig, rows: int, tokens: int, dtype: jnp.dtype
) -> Layer:
  """Return zeros in the layout of `Slots`, for one layer."""
  k, h = model.num_kv_heads, model.head_dim
  return (
    jnp.zeros((rows, k, h, tokens), dtype),
    jnp.zeros((rows, k, tokens, h), dtype),
  )


def extend_rows(
  layer: Layer, chunk: Layer, start: Int[Array, ""] | Int[Array, "B"] | int
) -> Layer:
  """Return the rows with a chunk of tokens written at position `start`.

  Args:
    layer: the rows.
    chunk: the tokens to write; they must not reach beyond the rows' end.
    start: one position for all rows, or one for each.
  """
  if jnp.ndim(start):
    write = jax.lax.dynamic_update_slice_in_dim
    return (
      jax.vmap(functools.partial(write, axis=2))(layer[0], chunk[0], start),
      jax.vmap(functools.partial(write, axis=1))(layer[1], chunk[1], start),
    )
  return (
    jax.lax.dynamic_update_slice_in_dim(layer[0], chunk[0], start, axis=3),
    jax.lax.dynamic_update_slice_in_dim(layer[1], chunk[1], start, axis=2),
  )


def positions_from(
  start: Int[Array, ""] | Int[Array, "B"] | int, length: int
) -> Int[Array, "_ T"]:
  """Return `length` positions from `start` on: [1 T], or [B T] of each row."""
  starts = jnp.reshape(jnp.asarray(start, jnp.int32), (-1, 1))
  return starts + jnp.arange(length, dtype=jnp.int32)[None]


def attend_rows(
  layer: Layer,
  query: Float[Array, "B T N H"],
  start: Int[Array, ""] | Int[Array, "B"] | int,
  *,
  sliding_window: int | None = None,
  soft_cap: float | None = None,
) -> Float[Array, "B T N H"]:
  """Return causal attention of a chunk of queries over cached rows.

  Args:
    layer: the cached rows, those of the chunk included.
    query: queries at positions start, start + 1, …
    start: position of the first query, for all rows or for each.
    sliding_window: number of tokens that a query sees, itself included; None is
      all of them.
    soft_cap: of the scores, as in `reference.xla_attention`.
  """
  rows, length, num_heads, head_dim = query.shape
  num_kv_heads, width = layer[0].shape[1], layer[0].shape[3]
  of_query = 4 * rows * num_heads * width
  piece = max(
    size
    for size in range(1, length + 1)
    if length % size == 0 and (size == 1 or size * of_query <= SCORES_BYTES)
  )
  grouped = query.reshape(rows, length, num_kv_heads, -1, head_dim)
  positions = positions_from(start, length)
  attend = functools.partial(_attend_piece, layer, sliding_window, soft_cap)
  if piece == length:
    mixed = attend((grouped, positions))
  else:
    # Only queries are cut: a mesh splits the rows and the heads. The scores of
    # one query are always small beside the rows that it attends to.
    pieces = grouped.reshape(rows, -1, piece, *grouped.shape[2:])
    of_pieces = positions.reshape(len(positions), -1, piece)
    mixed = jax.lax.map(
      attend, (jnp.swapaxes(pieces, 0, 1), jnp.swapaxes(of_pieces, 0, 1))
    )
    mixed = jnp.swapaxes(mixed, 0, 1)
  return mixed.reshape(rows, length, num_heads, head_dim).astype(query.dtype)


def _attend_piece(
  layer: Layer,
  sliding_window: int | None,
  soft_cap: float | None,
  piece: tuple[Float[Array, "B T K G H"], Int[Array, "_ T"]],
) -> Float[Array, "B T K G H"]:
  """Return attention of queries at these positions; see `attend_rows`."""
  (keys, values), (query, positions) = layer, piece
  scores = jnp.einsum(
    "btkgh,bkhs->bkgts", query, keys, preferred_element_type=jnp.float32
  )
  scores = reference.scaled(scores, query.shape[-1], soft_cap)
  times = jnp.arange(keys.shape[3])[None, None]
  seen = times <= positions[..., None]
  if sliding_window is not None:
    seen &= times > positions[..., None] - sliding_window
  scores = jnp.where(
    seen[:, None, None], scores, jnp.float32(reference.NEGATIVE)
  )
  weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
  return jnp.einsum("bkgts,bksh->btkgh", weights, values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
  """A cache with one row for each slot, which is a ring if there is a window.

  A layer that holds less than `cache_tokens` is a ring.

  Attributes:
    windows: the windows that decoding attends over, in ascending order. The
      last is `cache_tokens`.
  """

  num_slots: int
  cache_tokens: int
  windows: tuple[int, ...]

  logical_axes = ("batch", "kv_heads")

  def init(
    self, model: configs.ModelConfig, dtype: jnp.dtype
  ) -> list[PartedLayer]:
    """Return an empty cache."""
    layers = []
    for window in model.windows_within(self.cache_tokens):
      width = window or self.cache_tokens
      ends = [*(x for x in self.windows if x < width), width]
      parts = [
        _empty_layer(model, self.num_slots, end - start, dtype)
        for start, end in itertools.pairwise([0, *ends])
      ]
      layers.append(tuple(zip(*parts, strict=True)))
    return layers

  def insert(
    self,
    layer: PartedLayer,
    rows: Layer,
    slots: Int[Array, "M"],
    sources: Int[Array, "M"],
    lengths: Int[Array, "R"],
  ) -> PartedLayer:
    """Copy prefilled rows into slots, except for slots that are out of range.

    Args:
      layer: the cache of one layer.
      rows: the prefilled rows of that layer.
      slots: where each row is copied to.
      sources: index of each row among the prefilled rows.
      lengths: number of tokens of each prefilled row.
    """
    length, width = rows[0].shape[-1], _width(layer)
    if length > width:
      rows, length = _newest(rows, lengths, width), width
    all_keys, all_values = [], []
    for start, keys, values in _parts(layer):
      size = min(keys.shape[-1], length - start)
      if size > 0:
        taken = slice(start, start + size)
        keys = keys.at[slots, :, :, :size].set(
          rows[0][sources, :, :, taken], mode="drop"
        )
        values = values.at[slots, :, :size].set(
          rows[1][sources, :, taken], mode="drop"
        )
      all_keys.append(keys)
      all_values.append(values)
    return tuple(all_keys), tuple(all_values)

  def write(
    self,
    layer: PartedLayer,
    key: Float[Array, "B K H"],
    value: Float[Array, "B K H"],
    positions: Int[Array, "B"],
    pages: Int[Array, "B P"],
    is_active: Bool[Array, "B"],
    window: int,
  ) -> PartedLayer:
    """Write the key and value of one token per slot at its position.

    All positions must be less than `window`; an idle slot may write nothing.
    """
    del pages, is_active  # what an idle slot writes is never read
    slots = jnp.arange(self.num_slots)
    width = _width(layer)
    if width < self.cache_tokens:
      positions = positions % width
    all_keys, all_values = [], []
    for start, keys, values in _parts(layer):
      if start < window:
        # Indices below 0 count from the end, those of the size are dropped.
        size = keys.shape[-1]
        times = jnp.where(positions < start, size, positions - start)
        keys = keys.at[slots, :, :, times].set(
          key.astype(keys.dtype), mode="drop", unique_indices=True
        )
        values = values.at[slots, :, times].set(
          value.astype(values.dtype), mode="drop", unique_indices=True
        )
      all_keys.append(keys)
      all_values.append(values)
    return tuple(all_keys), tuple(all_values)

  def attend(
    self,
    layer: PartedLayer,
    query: Float[Array, "B N H"],
    positions: Int[Array, "B"],
    pages: Int[Array, "B P"],
    window: int,
    sliding_window: int | None,
    soft_cap: float | None = None,
  ) -> Float[Array, "B N H"]:
    """Return attention of one query per slot over cached times 0..position.

    All positions must be less than `window`. A ring holds no token that its
    query does not see, once it is full; before that it is like any other row.
    """
    del pages, sliding_window
    parts = [
      (keys, values) for start, keys, values in _parts(layer) if start < window
    ]
    return paged_attention.attend_cached(
      query, parts, positions, soft_cap=soft_cap
    )


def _width(layer: PartedLayer) -> int:
  """Return the tokens that a slot of the layer holds."""
  return sum(keys.shape[-1] for keys in layer[0])


def _parts(
  layer: PartedLayer,
) -> Iterator[tuple[int, jax.Array, jax.Array]]:
  """Yield the first time, the keys and the values of each part."""
  start = 0
  for keys, values in zip(*layer, strict=True):
    yield start, keys, values
    start += keys.shape[-1]


def _newest(rows: Layer, lengths: Int[Array, "R"], width: int) -> Layer:
  """Return the newest tokens of prefilled rows, as rings of `width` tokens.

  The entries of a row that is shorter than the ring are those of the row, and
  meaningless past its end.
  """
  last = lengths[:, None] - 1
  # The newest position that lies at each time of the ring.
  positions = last - (last - jnp.arange(width, dtype=jnp.int32)[None]) % width
  positions = jnp.maximum(positions, 0)

  def take(array: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jnp.take_along_axis(array, index, axis, mode="clip")

  keys, values = rows
  return (
    take(keys, positions[:, None, None], 3),
    take(values, positions[:, None, :, None], 2),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
  """A pool of pages that all slots share.

  Attributes:
    attention: one of `paged_attention.IMPLEMENTATIONS`.
  """

  num_pages: int
  page_tokens: int
  attention: paged_attention.PagedAttention

  logical_axes = ("kv_heads",)

  def init(self, model: configs.ModelConfig, dtype: jnp.dtype) -> list[Layer]:
    """Return an empty pool."""
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
    """Copy a prefilled row into pages, except for pages that are out of range.

    Args:
      layer: the pool of one layer.
      rows: the prefilled rows of that layer.
      row: index of the row among them.
      pages: for each page_tokens tokens of the row, the page they are copied
        to.
    """

    def put(pool: jax.Array, times: Float[Array, "K S H"]) -> jax.Array:
      k, _, h = times.shape
      paged = times.reshape(k, len(pages), self.page_tokens, h)
      return pool.at[:, pages].set(paged, mode="drop")

    # A gather, because a slice of rows that are sharded over devices would
    # first bring all rows to every device.
    keys, values = (jnp.take(x, row[None], axis=0)[0] for x in rows)
    return put(layer[0], jnp.swapaxes(keys, 1, 2)), put(layer[1], values)

  def rows(self, layer: Layer, pages: Int[Array, "R W"]) -> Layer:
    """Return rows in the layout of `Slots` that hold what pages hold.

    Args:
      layer: the pool of one layer.
      pages: the pages of each row, in order. For pages that are out of range a
        row holds zeros.
    """

    def take(pool: jax.Array) -> jax.Array:
      found = jnp.take(pool, pages, axis=1, mode="fill", fill_value=0)
      k, r, w, page, h = found.shape
      return jnp.swapaxes(found.reshape(k, r, w * page, h), 0, 1)

    keys, values = map(take, layer)
    return jnp.swapaxes(keys, 2, 3), values

  def write(
    self,
    layer: Layer,
    key: Float[Array, "B K H"],
    value: Float[Array, "B K H"],
    positions: Int[Array, "B"],
    pages: Int[Array, "B P"],
    is_active: Bool[Array, "B"],
    window: int,
  ) -> Layer:
    """Write the key and value of one token per active slot at its position.

    Idle slots write nothing, because their pages may belong to other sequences
    by now.
    """
    del window  # the tables cover every position
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
    sliding_window: int | None,
    soft_cap: float | None = None,
  ) -> Float[Array, "B N H"]:
    """Return attention of one query per slot over cached times 0..position.

    All positions must be less than `window`.
    """
    pages = pages[:, : -(-window // self.page_tokens)]
    return self.attention(
      layer,
      query,
      positions,
      pages,
      sliding_window=sliding_window,
      soft_cap=soft_cap,
    )
