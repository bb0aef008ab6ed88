"""Attention over packed rows, in plain XLA, of blocks that a segment joins.

The scores of a block of queries and a block of keys exist one pair at a time,
in both passes: memory grows with the length of a row, not with its square.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.models import attention

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

  The work is that of the pairs of blocks which a segment joins. What padding
  gets means nothing.
  """
  del key_start
  num_heads, num_kv_heads = query.shape[2], key.shape[2]
  group = num_heads // num_kv_heads
  length = query.shape[1]
  columns = first + jnp.arange(length, dtype=jnp.int32)

  def padded(rows, fill: Any = 0):
    missing = -rows.shape[0] % block
    pads = ((0, missing), *((0, 0),) * (rows.ndim - 1))
    return jnp.pad(rows, pads, constant_values=fill)

  def cut(rows):  # [T K ...] to [blocks K block ...]
    rows = rows.reshape(-1, block, *rows.shape[1:])
    return jnp.moveaxis(rows, 1, 2)

  def one_row(arguments):
    q, k, v, start = arguments
    # A padded query sees its own column, so that its softmax is of something.
    start = cut_columns(padded(start, columns[-1]))
    own = cut_columns(padded(columns, columns[-1]))
    q = cut(padded(q).reshape(-1, num_kv_heads, group, q.shape[-1]))
    q = jnp.swapaxes(q, 2, 3)  # [blocks K group block H]
    q = q.reshape(*q.shape[:2], group * block, -1)
    mixed = _attend_blocks(q, cut(padded(k)), cut(padded(v)), start, own)
    mixed = mixed.reshape(*mixed.shape[:2], group, block, -1)
    mixed = mixed.transpose(0, 3, 1, 2, 4)
    return mixed.reshape(-1, num_heads, mixed.shape[-1])[:length]

  def cut_columns(values):
    return values.reshape(-1, block)

  return lax.map(one_row, (query, key, value, query_start))


def _block_scores(q, k, start, own, j, block):
  """Scores of a block of queries and block j of keys, [K G*block block].

  Where a query does not see a key they are so low that they weigh nothing.
  """
  scores = jnp.einsum("kqh,kth->kqt", q, k, preferred_element_type=jnp.float32)
  scores = scores * jnp.float32(q.shape[-1] ** -0.5)
  column = j * block + jnp.arange(block, dtype=jnp.int32)
  sees = (start[:, None] <= column[None]) & (column[None] <= own[:, None])
  shape = scores.shape
  scores = scores.reshape(shape[0], -1, block, block)
  scores = jnp.where(sees[None, None], scores, attention.NEGATIVE)
  return scores.reshape(shape)


def _attend_one(q, key, value, start, own):
  """Of one block of queries: the mixture, and the log of the softmax's sum."""
  block = own.shape[0]
  last = own[-1] // block

  def step(i, carry):
    largest, total, mixed = carry
    # From the diagonal backwards. Where a query sees nothing of a block it
    # first counts all of it; the first key that it sees wipes that out.
    j = last - i
    k = lax.dynamic_index_in_dim(key, j, keepdims=False)
    v = lax.dynamic_index_in_dim(value, j, keepdims=False)
    scores = _block_scores(q, k, start, own, j, block)
    new_largest = jnp.maximum(largest, scores.max(-1))
    drop = jnp.exp(largest - new_largest)
    weights = jnp.exp(scores - new_largest[..., None])
    mixed = mixed * drop[..., None] + jnp.einsum(
      "kqt,kth->kqh",
      weights.astype(v.dtype),
      v,
      preferred_element_type=jnp.float32,
    )
    return new_largest, total * drop + weights.sum(-1), mixed

  zeros = jnp.zeros(q.shape[:2], jnp.float32)
  empty = (
    jnp.full_like(zeros, attention.NEGATIVE),
    zeros,
    jnp.zeros(q.shape, jnp.float32),
  )
  count = last - start.min() // block + 1
  largest, total, mixed = lax.fori_loop(0, count, step, empty)
  return (mixed / total[..., None]).astype(q.dtype), largest + jnp.log(total)


@jax.custom_vjp
def _attend_blocks(query, key, value, start, own):
  """[b K G*t H] queries over [c K t H] keys and values; [b t] columns."""
  return _attend_forward(query, key, value, start, own)[0]


def _attend_forward(query, key, value, start, own):
  mixed, log_sums = lax.map(
    lambda x: _attend_one(x[0], key, value, *x[1:]), (query, start, own)
  )
  return mixed, (query, key, value, start, own, mixed, log_sums)


def _attend_backward(residuals, d_mixed):
  """Makes each pair's weights anew from their log-sums, arXiv:2205.14135."""
  query, key, value, start, own, mixed, log_sums = residuals
  block = own.shape[1]
  scale = jnp.float32(query.shape[-1] ** -0.5)

  def of_block(carry, x):
    q, start, own, out, log_sum, d_out = x
    last = own[-1] // block
    inner = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def step(j, carry):
      d_q, d_key, d_value = carry
      k = lax.dynamic_index_in_dim(key, j, keepdims=False)
      v = lax.dynamic_index_in_dim(value, j, keepdims=False)
      scores = _block_scores(q, k, start, own, j, block)
      weights = jnp.exp(scores - log_sum[..., None])
      product = functools.partial(
        jnp.einsum, preferred_element_type=jnp.float32
      )
      d_weights = product("kqh,kth->kqt", d_out, v)
      d_scores = weights * (d_weights - inner[..., None]) * scale
      d_scores = d_scores.astype(q.dtype)
      d_v = product("kqt,kqh->kth", weights.astype(d_out.dtype), d_out)
      d_k = product("kqt,kqh->kth", d_scores, q)
      return (
        d_q + product("kqt,kth->kqh", d_scores, k),
        d_key.at[j].add(d_k),
        d_value.at[j].add(d_v),
      )

    d_q = jnp.zeros(q.shape, jnp.float32)
    d_q, *d_keys = lax.fori_loop(
      start.min() // block, last + 1, step, (d_q, *carry)
    )
    return tuple(d_keys), d_q.astype(q.dtype)

  zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (key, value))
  (d_key, d_value), d_query = lax.scan(
    of_block, zeros, (query, start, own, mixed, log_sums, d_mixed)
  )
  d_key, d_value = d_key.astype(key.dtype), d_value.astype(value.dtype)
  return d_query, d_key, d_value, None, None


_attend_blocks.defvjp(_attend_forward, _attend_backward)
