"""One token a row: counter-based keys, inverse CDF, the logprob it had.

A token's key is a function of (run seed, stream, group index, member,
position) and of nothing else: not of slot, batch or time. With the versions
recorded per token that is what a replay needs.
"""

import enum

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


class Stream(enum.IntEnum):
  """Who a token is sampled for; keeps their randomness apart."""

  TRAIN = 0
  EVAL = 1
  SERVE = 2


def row_keys(
  seed: Int[Array, ""],
  streams: Int[Array, "B"],
  groups: Int[Array, "B"],
  members: Int[Array, "B"],
) -> UInt32[Array, "B 2"]:
  """The part of the key that stays the same along a trajectory."""

  def one(stream, group, member):
    key = jax.random.key(seed)
    for counter in (stream, group, member):
      key = jax.random.fold_in(key, counter)
    return jax.random.key_data(key)

  return jax.vmap(one)(streams, groups, members)


def sample(
  logits: Float[Array, "B V"],
  keys: UInt32[Array, "B 2"],
  positions: Int[Array, "B"],
  temperature: Float[Array, "B"],
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Draws a token a row by inverse CDF from one uniform.

  Args:
    logits: float32.
    keys: of `row_keys`.
    positions: of the tokens to be drawn.
    temperature: the distribution is softmax(logits / temperature); 0 takes the
      largest logit and reports its logprob at temperature 1.

  Returns:
    Tokens, and the logprob of each under the distribution it was drawn from.
  """

  def uniform(key, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
    return jax.random.uniform(key, (), jnp.float32)

  is_greedy = temperature == 0.0
  divisor = jnp.where(is_greedy, jnp.float32(1.0), temperature)
  scaled = logits / divisor[:, None]
  scaled = scaled - jnp.max(scaled, axis=-1, keepdims=True)
  weights = jnp.exp(scaled)
  cdf = jnp.cumsum(weights, axis=-1)
  threshold = jax.vmap(uniform)(keys, positions) * cdf[:, -1]
  drawn = jnp.sum(cdf <= threshold[:, None], axis=-1, dtype=jnp.int32)
  largest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  tokens = jnp.where(is_greedy, largest, drawn)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - jnp.log(jnp.sum(weights, axis=-1))
