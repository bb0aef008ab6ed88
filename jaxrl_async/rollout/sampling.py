"""One token a row: counter-based keys, inverse CDF, the logprob it had.

A token's key is a function of (run seed, stream, group index, member,
position) and of nothing else: not of slot, batch or time. With the versions
recorded per token that is what a replay needs.
"""

import dataclasses
import enum

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


class Stream(enum.IntEnum):
  """Who a token is sampled for; keeps their randomness apart."""

  TRAIN = 0
  EVAL = 1
  SERVE = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
  """How the tokens of one sequence are drawn, and what ends it.

  Attributes:
    temperature: divides the logits; 0 takes the largest one.
    top_k: only that many of the likeliest tokens are drawn; 0 is all.
    top_p: only the smallest set of likeliest tokens whose probabilities sum
      to at least that much; 1 is all.
    min_p: only tokens at least that share as likely as the likeliest; 0 is
      all.
    min_tokens: before so many tokens nothing ends the sequence but its limit.
    end_tokens: end it besides the engine's own; at most MAX_END_TOKENS.
    ignore_eos: the engine's own end tokens are tokens like any other.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  min_tokens: int = 0
  end_tokens: tuple[int, ...] = ()
  ignore_eos: bool = False


MAX_END_TOKENS = 8


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
