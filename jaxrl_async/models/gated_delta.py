"""The gated delta rule: a mixer with a state of fixed size (arXiv:2412.06464).

Each value head has a matrix S [key size, value size]. A token with the key k,
the query q, the value v, the decay a in (0, 1) and the rate b in (0, 1) does

    S <- a S
    S <- S + b k (v - S^T k)^T
    o  = S^T q

so that the value that S has for the key moves towards v. Queries, keys and
values have passed a short causal convolution. Keys have length 1, and queries
1 / sqrt(key size). Value heads share the key heads in order, as in grouped
attention.

`over_rows` computes whole rows in chunks, as `torch_chunk_gated_delta_rule` of
transformers does. Within a chunk, all its updates together are the solution of
a triangular system. `step` computes a token. All of it is in float32.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_async.models import configs

Activation = Callable[[jax.Array], jax.Array]

_CHUNK = 64  # tokens; a power of two
_NORM_EPS = 1e-6


class Inputs(NamedTuple):
  """What a layer makes of its tokens; Nk key heads and Nv value heads.

  Attributes:
    query: [*B Nk Hk] before the convolution.
    key: [*B Nk Hk] likewise.
    value: [*B Nv Hv] likewise.
    log_decay: [*B Nv] float32, at most 0.
    rate: [*B Nv] float32, how far a value moves.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  log_decay: jax.Array
  rate: jax.Array


class Filters(NamedTuple):
  """The convolutions of a layer: a factor for each of the last W tokens.

  Attributes:
    query: [Nk Hk W], the factor of the token itself last.
    key: [Nk Hk W].
    value: [Nv Hv W].
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array


class State(NamedTuple):
  """What a layer remembers of each row, or what describes these arrays.

  Attributes:
    memory: [B Nv Hk Hv] float32.
    query: [B W-1 Nk Hk] the last tokens' queries before the convolution.
    key: [B W-1 Nk Hk] likewise.
    value: [B W-1 Nv Hv] likewise.
  """

  memory: Any
  query: Any
  key: Any
  value: Any


# The logical axes of a state, for its sharding.
STATE_AXES = State(
  memory=("batch", "heads"),
  query=("batch", None, "heads"),
  key=("batch", None, "heads"),
  value=("batch", None, "heads"),
)


def empty(delta: configs.GatedDelta, rows: int, dtype: jnp.dtype) -> State:
  """Return the state before the first token.

  Args:
    delta: sizes of the layer.
    rows: number of rows.
    dtype: of what the convolution remembers.
  """
  tail = rows, delta.conv_tokens - 1
  keys = (*tail, delta.num_key_heads, delta.key_dim)
  values = (*tail, delta.num_value_heads, delta.value_dim)
  memory = rows, delta.num_value_heads, delta.key_dim, delta.value_dim
  return State(
    memory=jnp.zeros(memory, jnp.float32),
    query=jnp.zeros(keys, dtype),
    key=jnp.zeros(keys, dtype),
    value=jnp.zeros(values, dtype),
  )


# -- the convolution ----------------------------------------------------------


def _convolved(
  x: Float[Array, "B T N H"],
  factors: Float[Array, "N H W"],
  ages: Int[Array, "B T"],
  tail: Float[Array, "B V N H"] | None,
  activation: Activation,
) -> Float[Array, "B T N H"]:
  """Return activation(sum_i factors[W-1-i] x[t-i]) over i <= ages[t].

  Args:
    x: what is convolved.
    factors: of the last W tokens.
    ages: number of tokens before each one in its segment.
    tail: what comes before x; None is nothing.
    activation: of the sum.
  """
  length, width = x.shape[1], factors.shape[-1]
  if tail is None:
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0), (0, 0)))
  else:
    padded = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
  padded, factors = padded.astype(jnp.float32), factors.astype(jnp.float32)
  total = jnp.zeros(x.shape, jnp.float32)
  for back in range(width):
    start = width - 1 - back
    term = padded[:, start : start + length] * factors[None, None, :, :, start]
    is_seen = (ages >= back)[..., None, None]
    total = total + jnp.where(is_seen, term, jnp.float32(0.0))
  return activation(total).astype(x.dtype)


def _tail(
  before: Float[Array, "B V N H"],
  x: Float[Array, "B T N H"],
  num_kept: Int[Array, "B"],
) -> Float[Array, "B V N H"]:
  """Return the newest entries after the first `num_kept` of each row."""
  whole = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
  cut = functools.partial(
    jax.lax.dynamic_slice_in_dim, slice_size=before.shape[1], axis=0
  )
  return jax.vmap(lambda row, start: cut(row, start))(whole, num_kept)


def _unit(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
  """Return float32 vectors of length 1."""
  x = x.astype(jnp.float32)
  square = jnp.sum(x * x, axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(square + jnp.float32(_NORM_EPS))


def _heads(
  query: Float[Array, "*B K H"], key: Float[Array, "*B K H"], num_heads: int
) -> tuple[Float[Array, "*B N H"], Float[Array, "*B N H"]]:
  """Return normed queries and keys of each value head."""
  query, key = _unit(query), _unit(key)
  query = query * jnp.float32(query.shape[-1] ** -0.5)
  each = num_heads // query.shape[-2]
  return jnp.repeat(query, each, axis=-2), jnp.repeat(key, each, axis=-2)


# -- rows ---------------------------------------------------------------------


def over_rows(
  inputs: Inputs,
  filters: Filters,
  activation: Activation,
  ages: Int[Array, "B T"],
  state: State | None = None,
  num_kept: Int[Array, "B"] | None = None,
) -> tuple[Float[Array, "B T N V"], State | None]:
  """Return the outputs of rows of tokens, and the state after them.

  Args:
    inputs: of the tokens.
    filters: of the layer.
    activation: of the convolution.
    ages: number of tokens before each token in its segment. At 0 the state is
      empty, whatever came before.
    state: before the first token; None is empty.
    num_kept: the state that is returned is that after so many tokens of each
      row. What comes after them is padding, and has no meaning. None returns no
      state, and all tokens count.
  """
  tails = (None,) * 3 if state is None else state[1:]
  query, key, value = (
    _convolved(x, factors, ages, tail, activation)
    for x, factors, tail in zip(inputs[:3], filters, tails, strict=True)
  )
  rows, length, num_heads = inputs.rate.shape
  log_decay, rate = inputs.log_decay, inputs.rate
  if num_kept is not None:
    order = jnp.arange(length, dtype=jnp.int32)[None]
    is_kept = (order < num_kept[:, None])[..., None]
    # A token that neither decays nor moves anything.
    log_decay = jnp.where(is_kept, log_decay, jnp.float32(0.0))
    rate = jnp.where(is_kept, rate, jnp.float32(0.0))
  query, key = _heads(query, key, num_heads)
  memory = None if state is None else state.memory
  # On a TPU, products of float32 would otherwise be of bfloat16.
  with jax.default_matmul_precision("highest"):
    mixed, memory = _in_chunks(
      query, key, value.astype(jnp.float32), log_decay, rate, ages == 0, memory
    )
  mixed = mixed.astype(inputs.value.dtype)
  if num_kept is None:
    return mixed, None
  assert state is not None
  tails = (
    _tail(before, x, num_kept)
    for before, x in zip(state[1:], inputs[:3], strict=True)
  )
  return mixed, State(memory, *tails)


def _in_chunks(
  query: Float[Array, "B T N K"],
  key: Float[Array, "B T N K"],
  value: Float[Array, "B T N V"],
  log_decay: Float[Array, "B T N"],
  rate: Float[Array, "B T N"],
  is_first: Bool[Array, "B T"],
  memory: Float[Array, "B N K V"] | None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N K V"]]:
  """Return the outputs of the rule, and the memory after the last token.

  With g the sums of the log decays from the start of a chunk, the updates u of
  its tokens solve

      u_i = b_i (v_i - exp(g_i) S^T k_i - sum_{j<i} exp(g_i - g_j) k_i.k_j u_j)

  where S is the memory before the chunk, and j counts only in the segment of i.
  """
  length = query.shape[1]
  size = min(_CHUNK, 1 << (length - 1).bit_length())

  def cut(x: jax.Array) -> jax.Array:
    """Return [C B N T ...]: chunks, rows, heads and the tokens of a chunk."""
    x = jnp.pad(x, ((0, 0), (0, -length % size)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

  query, key, value, log_decay, rate = map(
    cut, (query, key, value, log_decay, rate)
  )
  # Padding is a part of the last segment, and does nothing to it.
  segments = jnp.cumsum(cut(is_first[..., None].astype(jnp.int32)), axis=-1)
  own = segments[..., None] == segments[..., None, :]
  order = jnp.arange(size)
  is_before = own & (order[:, None] >= order[None])[None, None, None]
  total = jnp.cumsum(log_decay, axis=-1)
  minus_infinity = jnp.float32(-jnp.inf)
  between = total[..., None] - total[..., None, :]
  between = jnp.exp(jnp.where(is_before, between, minus_infinity))
  # From the memory before the chunk, and to the memory after it.
  is_old, is_last = segments == 0, segments == segments[..., -1:]
  since = jnp.exp(jnp.where(is_old, total, minus_infinity))
  until = jnp.exp(jnp.where(is_last, total[..., -1:] - total, minus_infinity))

  rated = key * rate[..., None]
  system = jnp.einsum("...ik,...jk->...ij", rated, key) * between
  is_below = (order[:, None] > order[None])[None, None, None]
  inverse = _unit_inverse(jnp.where(is_below, system, jnp.float32(0.0)))
  updates = inverse @ (value * rate[..., None])
  reads = inverse @ (rated * since[..., None])
  within = jnp.einsum("...ik,...jk->...ij", query, key) * between
  old_query = query * since[..., None]
  new_key = key * until[..., None]

  def chunk(memory: jax.Array, x: tuple[jax.Array, ...]):
    updates, reads, within, old_query, new_key, kept = x
    updates = updates - reads @ memory
    mixed = old_query @ memory + within @ updates
    memory = memory * kept[..., None, None]
    return memory + jnp.swapaxes(new_key, -1, -2) @ updates, mixed

  if memory is None:
    shape = (*key.shape[1:3], key.shape[-1], value.shape[-1])
    memory = jnp.zeros(shape, jnp.float32)
  memory, mixed = jax.lax.scan(
    chunk,
    memory,
    (updates, reads, within, old_query, new_key, since[..., -1]),
  )
  mixed = jnp.moveaxis(jnp.moveaxis(mixed, 2, 3), 0, 1)
  mixed = mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])
  return mixed[:, :length], memory


def _unit_inverse(lower: Float[Array, "*B T T"]) -> Float[Array, "*B T T"]:
  """Return (1 + lower)^-1 of strictly lower triangular matrices.

  Of two blocks on the diagonal with the inverses A and D, and B below them, it
  is A and D with -D B A below. The size is a power of two.
  """
  half = lower.shape[-1] // 2
  if half == 0:
    return jnp.ones_like(lower)
  blocks = lower[..., :half, :half], lower[..., half:, half:]
  first, second = _unit_inverse(jnp.stack(blocks))
  below = -(second @ lower[..., half:, :half] @ first)
  above = jnp.concatenate([first, jnp.zeros_like(below)], axis=-1)
  return jnp.concatenate(
    [above, jnp.concatenate([below, second], axis=-1)], axis=-2
  )


# -- a token ------------------------------------------------------------------


def step(
  inputs: Inputs, filters: Filters, activation: Activation, state: State
) -> tuple[Float[Array, "B N V"], State]:
  """Return the output of one token for each row, and the state after it."""
  convolved, tails = [], []
  for x, factors, tail in zip(inputs[:3], filters, state[1:], strict=True):
    whole = jnp.concatenate([tail, x[:, None].astype(tail.dtype)], axis=1)
    turned = jnp.moveaxis(factors.astype(jnp.float32), -1, 0)[None]
    total = (whole.astype(jnp.float32) * turned).sum(1)
    convolved.append(activation(total).astype(x.dtype))
    tails.append(whole[:, 1:])
  query, key, value = convolved
  query, key = _heads(query, key, inputs.rate.shape[-1])
  memory = state.memory * jnp.exp(inputs.log_decay)[..., None, None]
  known = jnp.einsum("bnkv,bnk->bnv", memory, key, precision="highest")
  update = (value.astype(jnp.float32) - known) * inputs.rate[..., None]
  memory = memory + key[..., None] * update[..., None, :]
  mixed = jnp.einsum("bnkv,bnk->bnv", memory, query, precision="highest")
  return mixed.astype(inputs.value.dtype), State(memory, *tails)
