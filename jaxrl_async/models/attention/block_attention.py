"""Attention over packed rows, in plain XLA, of blocks that a segment joins.

The scores of a block of queries and a block of keys exist one pair at a time,
in both passes: memory grows with the length of a row, not with its square. A
pair is left out when no row's segments join it.
"""

import functools
from typing import Any

import jax
from jax import ad_checkpoint
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.models.attention import reference

BLOCK = 128  # columns


def blocks(
  query: Float[Array, "B Q N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  query_start: Int[Array, "B Q"],
  key_start: Int[Array, "B T"],
  first: int | Int[Array, ""] = 0,
  *,
  block: int = BLOCK,
) -> Float[Array, "B Q N H"]:
  """Softmax over blocks of keys with a running maximum, arXiv:2205.14135.

  What padding gets means nothing.

  Args:
    query: those of columns `first` and after.
    key: whole rows.
    value: whole rows.
    query_start: column where each query's segment begins.
    key_start: not needed.
    first: column of the first query.
    block: columns of a block.
  """
  del key_start
  batch, length, num_heads, head_dim = query.shape
  num_kv_heads = key.shape[2]
  group = num_heads // num_kv_heads

  def cut(rows, fill: Any = 0):  # [B T ...] to [blocks B block ...]
    missing = -rows.shape[1] % block
    pads = ((0, 0), (0, missing), *((0, 0),) * (rows.ndim - 2))
    rows = jnp.pad(rows, pads, constant_values=fill)
    rows = rows.reshape(batch, -1, block, *rows.shape[2:])
    return jnp.swapaxes(rows, 0, 1)

  # A padded query sees the last column, so that its softmax is of something.
  columns = first + jnp.arange(length, dtype=jnp.int32)
  last = columns[-1]
  own = jnp.pad(columns, (0, -length % block), constant_values=last)
  q = cut(query).reshape(-1, batch, block, num_kv_heads, group, head_dim)
  q = q.transpose(0, 1, 3, 4, 2, 5)
  mixed = _attend(
    q.reshape(-1, batch, num_kv_heads, group * block, head_dim),
    jnp.swapaxes(cut(key), 2, 3),
    jnp.swapaxes(cut(value), 2, 3),
    cut(query_start, last),
    own.reshape(-1, block),
  )
  mixed = mixed.reshape(-1, batch, num_kv_heads, group, block, head_dim)
  mixed = mixed.transpose(1, 0, 4, 2, 3, 5)
  return mixed.reshape(batch, -1, num_heads, head_dim)[:, :length]


def _scores(q, k, start, own, j):
  """Scores of a block of queries and block j of keys, [B K G*block block].

  Where a query does not see a key they are so low that they weigh nothing.
  """
  block = own.shape[0]
  scores = jnp.einsum(
    "bkqh,bkth->bkqt", q, k, preferred_element_type=jnp.float32
  )
  scores = scores * jnp.float32(q.shape[-1] ** -0.5)
  column = j * block + jnp.arange(block, dtype=jnp.int32)[None, None]
  sees = (start[:, :, None] <= column) & (column <= own[None, :, None])
  shape = scores.shape
  scores = scores.reshape(*shape[:2], -1, block, block)
  scores = jnp.where(sees[:, None, None], scores, reference.NEGATIVE)
  return scores.reshape(shape)


def _range(start, own):
  """First and last block of keys that any of these queries sees."""
  block = own.shape[0]
  return start.min() // block, own[-1] // block


def _attend_one(q, key, value, start, own):
  """Of one block of queries: the mixture, and the log of the softmax's sum."""
  low, high = _range(start, own)

  def step(i, carry):
    largest, total, mixed = carry
    # From the diagonal backwards. Where a query sees nothing of a block it
    # first counts all of it; the first key that it sees wipes that out.
    j = high - i
    k = lax.dynamic_index_in_dim(key, j, keepdims=False)
    v = lax.dynamic_index_in_dim(value, j, keepdims=False)
    scores = _scores(q, k, start, own, j)
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


@jax.custom_vjp
def _attend(query, key, value, start, own):
  """[b B K G*block H] queries; [c B K block H] keys and values.

  With them the columns of the queries, [b block], and where their segments
  begin, [b B block].
  """
  return _forward(query, key, value, start, own)[0]


def _forward(query, key, value, start, own):
  mixed, log_sums = lax.map(
    lambda x: _attend_one(x[0], key, value, *x[1:]), (query, start, own)
  )
  # Both, or the backward pass would make both again.
  mixed = ad_checkpoint.checkpoint_name(mixed, reference.MIXED)
  log_sums = ad_checkpoint.checkpoint_name(log_sums, reference.MIXED)
  return mixed, (query, key, value, start, own, mixed, log_sums)


def _backward(residuals, d_mixed):
  """Makes each pair's weights anew from their log-sums, arXiv:2205.14135."""
  query, key, value, start, own, mixed, log_sums = residuals
  scale = jnp.float32(query.shape[-1] ** -0.5)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

  def of_block(carry, x):
    q, start, own, out, log_sum, d_out = x
    low, high = _range(start, own)
    inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def step(j, carry):
      d_q, d_key, d_value = carry
      k = lax.dynamic_index_in_dim(key, j, keepdims=False)
      v = lax.dynamic_index_in_dim(value, j, keepdims=False)
      weights = jnp.exp(_scores(q, k, start, own, j) - log_sum[..., None])
      d_weights = product("bkqh,bkth->bkqt", d_out, v)
      d_scores = weights * (d_weights - inner[..., None]) * scale
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


_attend.defvjp(_forward, _backward)
