"""One token a row: counter-based keys, inverse CDF, the logprob it had.

A token's key is a function of (run seed, stream, group index, member,
position) and of nothing else: not of slot, batch or time. With the versions
recorded per token that is what a replay needs.

Filters leave out unlikely tokens in the order of transformers: forbidden
tokens, temperature, top_k, top_p of what top_k left, min_p. Each keeps the
tokens above a threshold, which is searched bit by bit and needs no sort. So
tokens of the same float32 probability are kept or left out together: a tie at
the threshold keeps more than top_k.
"""

from collections.abc import Callable
import dataclasses
import enum
import functools
import math
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


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

  @property
  def is_filtered(self) -> bool:
    """Whether it takes more than a temperature."""
    is_cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
    return is_cut or self.min_tokens > 0

  def check(self, vocab_size: int) -> None:
    """Refuses what no sequence can be drawn with.

    Raises:
      ValueError: one line that names the field.
    """
    temperature = self.temperature
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
      raise ValueError(
        f"temperature is {temperature}; it must be 0 or at least"
        f" {MIN_TEMPERATURE}"
      )
    for name in ("top_k", "min_tokens"):
      value = getattr(self, name)
      if not 0 <= value < 2**31:
        raise ValueError(f"{name} is {value}; it must be in [0, 2**31)")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
    if not 0 <= self.min_p <= 1:
      raise ValueError(f"min_p is {self.min_p}; it must be in [0, 1]")
    if len(self.end_tokens) > MAX_END_TOKENS:
      raise ValueError(
        f"{len(self.end_tokens)} end tokens; at most {MAX_END_TOKENS} are"
        " looked for"
      )
    for token in self.end_tokens:
      if not 0 <= token < vocab_size:
        raise ValueError(
          f"end token {token} is not in the vocabulary of {vocab_size}"
        )


MAX_END_TOKENS = 8
MIN_TEMPERATURE = 1e-30  # logits / temperature must fit into a float32


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["top_k", "top_p", "min_p", "is_allowed"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Filters:
  """What may be drawn; the first three as in `SamplingSettings`.

  Leaves are arrays, or in the same tree their shardings: hence `Any`.

  Attributes:
    top_k: [B] int32, 0 is all.
    top_p: [B] float32, 1 is all.
    min_p: [B] float32, 0 is all.
    is_allowed: [B V] bool: the logit of any other token is -inf; None allows
      all. Every row must allow a token.
  """

  top_k: Any
  top_p: Any
  min_p: Any
  is_allowed: Any = None


def row_keys(
  seed: Int[Array, ""],
  streams: Int[Array, "B"],
  groups: Int[Array, "B"],
  members: Int[Array, "B"],
) -> UInt32[Array, "B 2"]:
  """The part of the key that stays the same along a trajectory."""

  def one(stream: jax.Array, group: jax.Array, member: jax.Array) -> jax.Array:
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
  filters: Filters | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Draws a token a row by inverse CDF from one uniform.

  Args:
    logits: float32.
    keys: of `row_keys`.
    positions: of the tokens to be drawn.
    temperature: the distribution is softmax(logits / temperature); 0 takes the
      largest logit and reports its logprob at temperature 1.
    filters: what is left out before the draw; a row with all of them off gets
      the very token and logprob that it gets without. At temperature 0 only
      `is_allowed` counts: the largest logit passes the others.

  Returns:
    Tokens, and the logprob of each under the distribution it was drawn from:
    filtered and normalised again.
  """

  def uniform(key: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
    return jax.random.uniform(key, (), jnp.float32)

  is_greedy = temperature == 0.0
  divisor = jnp.where(is_greedy, jnp.float32(1.0), temperature)
  if filters is not None and filters.is_allowed is not None:
    logits = jnp.where(filters.is_allowed, logits, -jnp.inf)
  scaled = logits / divisor[:, None]
  scaled = scaled - jnp.max(scaled, axis=-1, keepdims=True)
  weights = jnp.exp(scaled)
  is_kept = None
  if filters is not None:
    is_kept = passing(weights, filters, is_greedy)
    weights = jnp.where(is_kept, weights, jnp.float32(0.0))
  cdf = jnp.cumsum(weights, axis=-1)
  threshold = jax.vmap(uniform)(keys, positions) * cdf[:, -1]
  drawn = jnp.sum(cdf <= threshold[:, None], axis=-1, dtype=jnp.int32)
  if is_kept is not None:
    drawn = _nearest_kept(drawn, is_kept)
  largest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  tokens = jnp.where(is_greedy, largest, drawn)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - jnp.log(jnp.sum(weights, axis=-1))


def passing(
  weights: Float[Array, "B V"],
  filters: Filters,
  is_greedy: Bool[Array, "B"],
) -> Bool[Array, "B V"]:
  """Which tokens pass top_k, then top_p of what is left, and min_p.

  Args:
    weights: probabilities over the row's largest; 0 where not allowed.
    filters: of the rows.
    is_greedy: rows for which all tokens pass, if all are allowed.
  """
  # Non-negative floats are ordered like the integers of the same bits.
  bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
  by_k = (filters.top_k > 0) & ~is_greedy
  by_p = (filters.top_p < 1.0) & ~is_greedy
  by_min = (filters.min_p > 0.0) & ~is_greedy

  def mass(least: Int[Array, "B"]) -> Float[Array, "B"]:
    kept = bits >= least[:, None]
    return jnp.sum(jnp.where(kept, weights, jnp.float32(0.0)), axis=-1)

  def is_k(least: Int[Array, "B"]) -> Bool[Array, "B"]:
    count = jnp.sum(bits >= least[:, None], axis=-1, dtype=jnp.int32)
    return count >= filters.top_k

  least = _largest_threshold(is_k, by_k)
  needed = filters.top_p * mass(least)
  least_p = _largest_threshold(lambda at: mass(at) >= needed, by_p)
  least_min = jax.lax.bitcast_convert_type(filters.min_p, jnp.int32)
  least = jnp.maximum(least, least_p)
  least = jnp.maximum(least, jnp.where(by_min, least_min, 0))
  # A row with a filter draws nothing of probability 0; a row without must be
  # the row it is without filters, and keeps all.
  is_filtered = by_k | by_p | by_min
  if filters.is_allowed is not None:
    is_filtered |= ~jnp.all(filters.is_allowed, axis=-1)
  least = jnp.maximum(least, is_filtered.astype(jnp.int32))
  least = jnp.minimum(least, jnp.max(bits, axis=-1))  # the likeliest stays
  return bits >= least[:, None]


def _largest_threshold(
  is_enough: Callable[[jax.Array], jax.Array], is_asked: Bool[Array, "B"]
) -> Int[Array, "B"]:
  """The bits of the largest float <= 1 at which `is_enough`, exactly.

  One pass over the vocabulary a bit; none where no row asks, and a row that
  does not gets 0. The bits of 1.0 are below 2**30.

  Args:
    is_enough: from thresholds [B] to [B], True up to some threshold.
    is_asked: [B].
  """

  def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
    tried = threshold | (jnp.int32(1) << (29 - i))
    return jnp.where(is_asked & is_enough(tried), tried, threshold)

  passes = jnp.where(jnp.any(is_asked), 30, 0)
  return jax.lax.fori_loop(
    0, passes, set_bit, jnp.zeros(is_asked.shape, jnp.int32)
  )


def _nearest_kept(
  drawn: Int[Array, "B"], is_kept: Bool[Array, "B V"]
) -> Int[Array, "B"]:
  """The next kept token, from the drawn one on, or the last.

  A token of weight 0 should have no step in the CDF. But partial sums are
  rounded in different orders, and 1.6 % of those steps are an ulp up or down
  (measured on a CPU), in which a uniform may fall.
  """
  index = jnp.arange(is_kept.shape[-1], dtype=jnp.int32)[None]
  end = is_kept.shape[-1]
  after = is_kept & (index >= drawn[:, None])
  following = jnp.min(jnp.where(after, index, end), axis=-1)
  last = jnp.max(jnp.where(is_kept, index, 0), axis=-1)
  return jnp.where(following < end, following, last)
