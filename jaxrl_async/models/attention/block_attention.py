"""Attention over packed rows in plain XLA, one pair of blocks at a time.

The scores of a block of queries and a block of keys exist for one pair of
blocks at a time, in both passes. Memory therefore grows linearly with the
length of a row instead of with its square. Pairs of blocks that share no
segment in any row are skipped.
"""

import functools

import jax
from jax import ad_checkpoint
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.models.attention import reference

BLOCK = 128  # columns of a block


def blocks(
  query: Float[Array, "B Q N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  query_start: Int[Array, "B Q"],
  key_start: Int[Array, "B T"],
  first: int | Int[Array, ""] = 0,
  *,
  block: int = BLOCK,
  soft_cap: float | None = None,
) -> Float[Array, "B Q N H"]:
  """Return attention by an online softmax over blocks (arXiv:2205.14135).

  The results at padding are meaningless.

  Args:
    query: queries of the columns from `first` on.
    key: keys of whole rows.
    value: values of whole rows.
    query_start: column at which each query's segment begins.
    key_start: not used; the other implementations need it.
    first: column of the first query.
    block: columns of a block.
    soft_cap: of the scores, as in `reference.xla_attention`.
  """
  del key_start
  batch, length, num_heads, head_dim = query.shape
  num_kv_heads = key.shape[2]
  group = num_heads // num_kv_heads

  def cut(rows: Array, fill: int | Array = 0) -> Array:
    """Pad [B T ...] with `fill` and cut it into [blocks B block ...]."""
    missing = -rows.shape[1] % block
    pads = ((0, 0), (0, missing), *((0, 0),) * (rows.ndim - 2))
    rows = jnp.pad(rows, pads, constant_values=fill)
    rows = rows.reshape(batch, -1, block, *rows.shape[2:])
    return jnp.swapaxes(rows, 0, 1)

  # A padded query attends to the last column, so its softmax is over something.
  columns = first + jnp.arange(length, dtype=jnp.int32)
  last = columns[-1]
  own = jnp.pad(columns, (0, -length % block), constant_values=last)
  q = cut(query).reshape(-1, batch, block, num_kv_heads, group, head_dim)
  q = q.transpose(0, 1, 3, 4, 2, 5)
  mixed = _attend(
    soft_cap,
    q.reshape(-1, batch, num_kv_heads, group * block, head_dim),
    jnp.swapaxes(cut(key), 2, 3),
    jnp.swapaxes(cut(value), 2, 3),
    cut(query_start, last),
    own.reshape(-1, block),
  )
  mixed = mixed.reshape(-1, batch, num_kv_heads, group, block, head_dim)
  mixed = mixed.transpose(1, 0, 4, 2, 3, 5)
  return mixed.reshape(batch, -1, num_heads, head_dim)[:, :length]


def _scores(
  q: Float[Array, "B K Q H"],
  k: Float[Array, "B K block H"],
  start: Int[Array, "B block"],
  own: Int[Array, "block"],
  j: int | Array,
  soft_cap: float | None,
) -> Float[Array, "B K Q block"]:
  """Return the scores of a block of queries and block j of keys.

  Q stands for group * block, all queries of one kv head. Where a query must not
  see a key, the score is so low that its weight is 0.
  """
  block = own.shape[0]
  scores = jnp.einsum(
    "bkqh,bkth->bkqt", q, k, preferred_element_type=jnp.float32
  )
  scores = reference.scaled(scores, q.shape[-1], soft_cap)
  column = j * block + jnp.arange(block, dtype=jnp.int32)[None, None]
  sees = (start[:, :, None] <= column) & (column <= own[None, :, None])
  shape = scores.shape
  scores = scores.reshape(*shape[:2], -1, block, block)
  scores = jnp.where(sees[:, None, None], scores, reference.NEGATIVE)
  return scores.reshape(shape)


def _range(
  start: Int[Array, "B block"], own: Int[Array, "block"]
) -> tuple[Array, Array]:
  """Return the first and the last block of keys that these queries see."""
  block = own.shape[0]
  return start.min() // block, own[-1] // block


def _attend_one(
  soft_cap: float | None,
  q: Float[Array, "B K Q H"],
  key: Float[Array, "c B K block H"],
  value: Float[Array, "c B K block H"],
  start: Int[Array, "B block"],
  own: Int[Array, "block"],
) -> tuple[Float[Array, "B K Q H"], Float[Array, "B K Q"]]:
  """Return the result of one block of queries, and its log-sums.

  The log-sums are the logarithms of the softmax's sums; the backward pass needs
  them.
  """
  low, high = _range(start, own)

  def step(
    i: int | Array, carry: tuple[Array, Array, Array]
  ) -> tuple[Array, Array, Array]:
    largest, total, mixed = carry
    # From the diagonal backwards. As long as a query has seen no key, its
    # maximum is NEGATIVE and masked keys count with weight 1. The first key
    # that it does see raises the maximum, and `drop` then erases what was
    # counted before.
    j = high - i
    k = lax.dynamic_index_in_dim(key, j, keepdims=False)
    v = lax.dynamic_index_in_dim(value, j, keepdims=False)
    scores = _scores(q, k, start, own, j, soft_cap)
    new_largest = jnp.maximum(largest, scores.max(-1))
    drop = jnp.exp(largest - new_largest)
    weights = jnp.exp(scores - new_largest[..., None])
    mixed = mixed * drop[..., None] + jnp.einsum(
      "bkqt,bkth->bkqh",
      weights.astype(v.dtype),
      v,
      preferred_element_type=jnp.float32,
    )
    return new_largest, total * drop + weights.sum(-1), mixed

  zeros = jnp.zeros(q.shape[:3], jnp.float32)
  lowest = jnp.full_like(zeros, reference.NEGATIVE)
  nothing = lowest, zeros, jnp.zeros(q.shape, jnp.float32)
  largest, total, mixed = lax.fori_loop(0, high - low + 1, step, nothing)
  return (mixed / total[..., None]).astype(q.dtype), largest + jnp.log(total)


def _attended(
  soft_cap: float | None,
  query: Float[Array, "b B K Q H"],
  key: Float[Array, "c B K block H"],
  value: Float[Array, "c B K block H"],
  start: Int[Array, "b B block"],
  own: Int[Array, "b block"],
) -> Float[Array, "b B K Q H"]:
  """Return attention with a backward pass that recomputes the scores.

  Q stands for group * block, all queries of one kv head.

  Args:
    soft_cap: of the scores, or None.
    query: b blocks of queries.
    key: c blocks of keys.
    value: c blocks of values.
    start: the column at which the segment of each query begins.
    own: the column of each query.
  """
  return _forward(soft_cap, query, key, value, start, own)[0]


def _forward(
  soft_cap: float | None,
  query: Array,
  key: Array,
  value: Array,
  start: Array,
  own: Array,
) -> tuple[Array, tuple[Array, ...]]:
  """Return the result, and what the backward pass needs."""
  mixed, log_sums = lax.map(
    lambda x: _attend_one(soft_cap, x[0], key, value, *x[1:]),
    (query, start, own),
  )
  # Both get the name, because the backward pass would recompute both if either
  # were missing.
  mixed = ad_checkpoint.checkpoint_name(mixed, reference.MIXED)
  log_sums = ad_checkpoint.checkpoint_name(log_sums, reference.MIXED)
  return mixed, (query, key, value, start, own, mixed, log_sums)


def _backward(
  soft_cap: float | None, residuals: tuple[Array, ...], d_mixed: Array
) -> tuple[Array, Array, Array, None, None]:
  """Recompute the weights of each pair from the log-sums (arXiv:2205.14135)."""
  query, key, value, start, own, mixed, log_sums = residuals
  scale = jnp.float32(query.shape[-1] ** -0.5)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def of_block(
    carry: tuple[Array, ...], x: tuple[Array, ...]
  ) -> tuple[tuple[Array, ...], Array]:
    q, start, own, out, log_sum, d_out = x
    low, high = _range(start, own)
    inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def step(
      j: int | Array, carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
      d_q, d_key, d_value = carry
      k = lax.dynamic_index_in_dim(key, j, keepdims=False)
      v = lax.dynamic_index_in_dim(value, j, keepdims=False)
      scores = _scores(q, k, start, own, j, soft_cap)
      weights = jnp.exp(scores - log_sum[..., None])
      d_weights = product("bkqh,bkth->bkqt", d_out, v)
      d_scores = weights * (d_weights - inner[..., None]) * scale
      if soft_cap is not None:
        # d c tanh(x / c) = 1 - tanh(x / c)^2. Keys that are not seen have a
        # score far below -c, and a weight of 0.
        tanh = jnp.clip(scores / soft_cap, -1.0, 1.0)
        d_scores = d_scores * (1.0 - jnp.square(tanh))
      d_scores = d_scores.astype(q.dtype)
      weights = weights.astype(d_out.dtype)
      return (
        d_q + product("bkqt,bkth->bkqh", d_scores, k),
        d_key.at[j].add(product("bkqt,bkqh->bkth", d_scores, q)),
        d_value.at[j].add(product("bkqt,bkqh->bkth", weights, d_out)),
      )

    d_q = jnp.zeros(q.shape, jnp.float32)
    d_q, *d_keys = lax.fori_loop(low, high + 1, step, (d_q, *carry))
    return tuple(d_keys), d_q.astype(q.dtype)

  zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
  (d_key, d_value), d_query = lax.scan(
    of_block, zeros, (query, start, own, mixed, log_sums, d_mixed)
  )
  d_key, d_value = d_key.astype(key.dtype), d_value.astype(value.dtype)
  return d_query, d_key, d_value, None, None


_attend = jax.custom_vjp(_attended, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)
