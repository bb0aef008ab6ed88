"""Sampling of one token per row, with counter-based keys and an inverse CDF.

The key of a token is a function of (run seed, stream, group index, member,
position) and of nothing else. In particular it does not depend on slot, batch
or time. Together with the policy version recorded for each token, this makes it
possible to replay a trajectory.

Filters are applied in the order of transformers: forbidden tokens, temperature,
top_k, top_p of the tokens that top_k left, and min_p. The last three keep the
tokens whose probability reaches a threshold. The threshold is searched bit by
bit, which needs no sort. Tokens of the same float32 probability are therefore
kept or removed together, and a tie at the threshold keeps more than top_k
tokens.
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

from jaxrl_async.config import setting as setting_lib


class Stream(enum.IntEnum):
  """The purpose of a sequence; each purpose has its own random numbers."""

  TRAIN = 0
  EVAL = 1
  SERVE = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSettings:
  """How the tokens of one sequence are drawn, and which tokens end it.

  Attributes:
    temperature: divisor of the logits; 0 takes the largest logit.
    top_k: number of most likely tokens among which is drawn; 0 keeps all.
    top_p: the smallest set of most likely tokens is kept whose probabilities
      sum to at least this; 1 keeps all.
    min_p: tokens are kept whose probability is at least this fraction of the
      largest one; 0 keeps all.
    min_tokens: number of tokens of a completion before which nothing but its
      limit ends it.
    end_tokens: tokens that end the sequence in addition to the engine's own; at
      most MAX_END_TOKENS.
    ignore_eos: whether the engine's own end tokens are treated like any other
      token.
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
    """Whether sampling needs more than a temperature."""
    is_cut = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
    return is_cut or self.min_tokens > 0

  def check(self, vocab_size: int) -> None:
    """Check that a sequence can be drawn with these settings.

    Args:
      vocab_size: number of tokens of the model's vocabulary.

    Raises:
      ValueError: a field has a value that is not allowed; the message is one
        line that names the field.
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


MAX_END_TOKENS = setting_lib.MAX_STOP_TOKENS
# A guide that leaves out no more than this of the probability of all tokens
# leaves the distribution as it is.
MAX_LEFT_OUT = 1e-3
_BLOCK = 64  # tokens whose weights are summed before the sums are
_STEP = 2.0**-23  # of the numbers that `jax.random.uniform` draws
MIN_TEMPERATURE = 1e-30  # logits / temperature must fit into a float32


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["top_k", "top_p", "min_p", "is_allowed"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Filters:
  """The tokens that may be drawn in each row.

  The leaves are arrays, or in other uses of the same class their shardings.
  They are therefore annotated as `Any`.

  Attributes:
    top_k: [B] int32, as in `SamplingSettings`; 0 keeps all.
    top_p: [B] float32, as in `SamplingSettings`; 1 keeps all.
    min_p: [B] float32, as in `SamplingSettings`; 0 keeps all.
    is_allowed: [B V] bool. The logit of a token that is not allowed becomes
      -inf. Every row must allow a token. None allows all.
  """

  top_k: Any
  top_p: Any
  min_p: Any
  is_allowed: Any = None


def unpacked(bits: Int[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
  """Return truth values from their bits, the lowest bit of each word first."""
  places = jnp.arange(32, dtype=jnp.int32)[None, None]
  ones = (bits[:, :, None] >> places) & 1
  return ones.reshape(len(bits), -1)[:, :vocab_size].astype(bool)


def is_steered(
  logits: Float[Array, "B V"],
  temperature: Float[Array, "B"],
  is_allowed: Bool[Array, "B V"],
) -> Bool[Array, "B"]:
  """Return whether a guide changes the distribution of each row.

  It does if the tokens that it forbids have more than `MAX_LEFT_OUT` of the
  probability. Otherwise the logprob of a token is larger under the distribution
  that is drawn from by at most -log(1 - MAX_LEFT_OUT), which is 1.0005e-3.

  Args:
    logits: float32, as for `sample`.
    temperature: as for `sample`.
    is_allowed: tokens that the guide allows.
  """
  divisor = jnp.where(temperature == 0.0, jnp.float32(1.0), temperature)
  probabilities = jax.nn.softmax(logits / divisor[:, None], axis=-1)
  left_out = jnp.where(is_allowed, jnp.float32(0.0), probabilities)
  return jnp.sum(left_out, axis=-1) > jnp.float32(MAX_LEFT_OUT)


def row_keys(
  seed: Int[Array, ""],
  streams: Int[Array, "B"],
  groups: Int[Array, "B"],
  members: Int[Array, "B"],
) -> UInt32[Array, "B 2"]:
  """Return the part of the key that is the same for a whole trajectory.

  Args:
    seed: seed of the run.
    streams: a `Stream` for each row.
    groups: index of the rollout group.
    members: index of the trajectory within its group.
  """

  def one(stream: jax.Array, group: jax.Array, member: jax.Array) -> jax.Array:
    key = jax.random.key(seed)
    for counter in (stream, group, member):
      key = jax.random.fold_in(key, counter)
    return jax.random.key_data(key)

  return jax.vmap(one)(streams, groups, members)


def uniforms(
  keys: UInt32[Array, "B 2"], positions: Int[Array, "*N B"]
) -> Float[Array, "*N B"]:
  """Return the number in [0, 1) that draws the token at each position.

  Args:
    keys: result of `row_keys`.
    positions: of the tokens of each row, from the beginning of their
      trajectories.
  """
  return _uniforms(keys, positions, 0)


def fractions(
  keys: UInt32[Array, "B 2"], positions: Int[Array, "*N B"]
) -> Float[Array, "*N B"]:
  """Return what continues the numbers of `uniforms`, as a part of their step.

  Args:
    keys: as for `uniforms`.
    positions: likewise.
  """
  return _uniforms(keys, positions, 1)


def _uniforms(
  keys: UInt32[Array, "B 2"], positions: Int[Array, "*N B"], which: int
) -> Float[Array, "*N B"]:
  """Return the first or the second random number of each position."""

  def one(key: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
    return jax.random.uniform(key, (2,), jnp.float32)[which]

  of_rows = jax.vmap(one)
  for _ in range(positions.ndim - 1):
    of_rows = jax.vmap(of_rows, in_axes=(None, 0))
  return of_rows(keys, positions)


def sample(
  logits: Float[Array, "B V"],
  quantiles: Float[Array, "B"],
  temperature: Float[Array, "B"],
  filters: Filters | None = None,
  fractions: Float[Array, "B"] | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
  """Draw one token per row from one uniform number, by the inverse CDF.

  Args:
    logits: float32.
    quantiles: the numbers that draw the tokens, see `uniforms`.
    temperature: the distribution is softmax(logits / temperature). 0 takes the
      largest logit and reports its logprob at temperature 1.
    filters: which tokens may be drawn. A row for which all filters are off gets
      exactly the token and logprob that it gets without filters. At temperature
      0 only `is_allowed` matters, because the largest logit passes the others.
    fractions: further digits of the quantiles, see the function of that name. A
      float32 in [0, 1) has 23 bits. With these alone, 45 % of a vocabulary of
      152,000 tokens are never drawn under normal logits of deviation 3, and the
      KL divergence of the draws from the recorded distribution is 2e-3 nats.
      With fractions it is 3e-8. None is 0.

  Returns:
    The tokens, and the logprob of each under the distribution that it was drawn
    from, which is filtered and then normalised again.
  """
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
  # At temperature 0 only the largest logits have any density, and the quantile
  # 0 is the first of them. Nothing here depends on whether there is such a row.
  is_largest = (scaled == 0.0).astype(jnp.float32)
  density = jnp.where(is_greedy[:, None], is_largest, weights)
  if fractions is None:
    fractions = jnp.zeros_like(quantiles)
  tokens = _at_quantile(
    density,
    jnp.where(is_greedy, 0.0, quantiles),
    jnp.where(is_greedy, 0.0, fractions),
  )
  if is_kept is not None:
    tokens = _nearest_kept(tokens, is_kept)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  return tokens, chosen - jnp.log(jnp.sum(weights, axis=-1))


def _at_quantile(
  weights: Float[Array, "B V"],
  quantiles: Float[Array, "B"],
  fractions: Float[Array, "B"],
) -> Int[Array, "B"]:
  """Return the token of each row at which the CDF passes a quantile.

  The CDF is that of blocks of tokens, and within one block that of its tokens:
  a running sum over the whole vocabulary takes XLA much longer.

  Args:
    weights: the density times any number; a token of weight 0 is never drawn. A
      row without any weight, or with a NaN, gets its first token.
    quantiles: multiples of _STEP in [0, 1).
    fractions: further digits of the quantiles, in units of _STEP.
  """
  padded = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % _BLOCK)))
  blocks = padded.reshape(len(weights), -1, _BLOCK)
  sums = jnp.sum(blocks, axis=-1)
  ends = jnp.cumsum(sums, axis=-1)
  # What is sought is a float32 and a rest that is smaller than its last digit.
  sought, rest = _product(quantiles, ends[:, -1])
  rest = rest + fractions * (ends[:, -1] * jnp.float32(_STEP))
  passed = ends - sought[:, None] <= rest[:, None]
  block = _last_weight(sums, jnp.sum(passed, axis=-1, dtype=jnp.int32))
  before = jnp.take_along_axis(
    ends, jnp.maximum(block - 1, 0)[:, None], axis=-1
  )[:, 0]
  before = jnp.where(block > 0, before, 0)
  width = jnp.take_along_axis(ends, block[:, None], axis=-1)[:, 0] - before
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  cdf = jnp.cumsum(inside, axis=-1)
  # The tokens of a block sum to something else than the block's step in `ends`,
  # which is rounded to the size of the whole sum.
  here = (sought - before + rest) * (cdf[:, -1] / width)
  place = jnp.sum(cdf <= here[:, None], axis=-1, dtype=jnp.int32)
  return block * _BLOCK + _last_weight(inside, place)


def _last_weight(
  weights: Float[Array, "B N"], index: Int[Array, "B"]
) -> Int[Array, "B"]:
  """Return an index, or the last one with a weight if that is smaller."""
  indices = jnp.arange(weights.shape[-1], dtype=jnp.int32)[None]
  return jnp.minimum(index, jnp.max(jnp.where(weights > 0, indices, 0), -1))


def _product(
  x: Float[Array, "B"], y: Float[Array, "B"]
) -> tuple[Float[Array, "B"], Float[Array, "B"]]:
  """Return a product rounded to float32, and what the rounding took off it.

  Both are exact (T. J. Dekker, Numer. Math. 18, 1971): products of halves of
  the digits need no rounding.
  """

  def halves(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    bits = jax.lax.bitcast_convert_type(value, jnp.int32) & ~0xFFF
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return high, value - high

  (a, b), (c, d) = halves(x), halves(y)
  product = x * y
  return product, ((a * c - product) + a * d + b * c) + b * d


def passing(
  weights: Float[Array, "B V"],
  filters: Filters,
  is_greedy: Bool[Array, "B"],
) -> Bool[Array, "B V"]:
  """Return which tokens pass top_k, then top_p of what is left, and min_p.

  Args:
    weights: probabilities divided by the largest one of the row; 0 for tokens
      that are not allowed.
    filters: the filters of each row.
    is_greedy: rows to which only `is_allowed` applies.
  """
  # Non-negative floats are ordered like the integers with the same bits.
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
  # A row with a filter must not draw a token of probability 0. A row without
  # one keeps all tokens, so that its result is the same as without `filters`.
  is_filtered = by_k | by_p | by_min
  if filters.is_allowed is not None:
    is_filtered |= ~jnp.all(filters.is_allowed, axis=-1)
  least = jnp.maximum(least, is_filtered.astype(jnp.int32))
  # The most likely token is always kept.
  least = jnp.minimum(least, jnp.max(bits, axis=-1))
  return bits >= least[:, None]


def _largest_threshold(
  is_enough: Callable[[jax.Array], jax.Array], is_asked: Bool[Array, "B"]
) -> Int[Array, "B"]:
  """Return the bits of the largest float <= 1 for which `is_enough` holds.

  The result is exact. The search takes one pass over the vocabulary for each of
  30 bits, as the bits of 1.0 are below 2**30. It takes no pass if no row needs
  the threshold. (The largest 1,024 weights would do in most cases, but finding
  them takes longer: on a CPU seven times as long as the passes, and on a GPU a
  sort of all.)

  Args:
    is_enough: a function from thresholds [B] to truth values [B]. It is True up
      to some threshold and False above it.
    is_asked: [B] the rows that need a threshold; the others get 0.
  """

  def set_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
    tried = threshold | (jnp.int32(1) << (29 - i))
    return jnp.where(is_asked & is_enough(tried), tried, threshold)

  nothing = jnp.zeros(is_asked.shape, jnp.int32)
  # A GPU would ask the host at every turn of a loop of unknown length.
  return jax.lax.cond(
    jnp.any(is_asked),
    lambda: jax.lax.fori_loop(0, 30, set_bit, nothing),
    lambda: nothing,
  )


def _nearest_kept(
  drawn: Int[Array, "B"], is_kept: Bool[Array, "B V"]
) -> Int[Array, "B"]:
  """Return the first kept token from the drawn one on, or the last kept one.

  A token of weight 0 should have no step in the CDF. But partial sums are
  rounded in different orders, so 1.6 % of these steps are one ulp up or down
  (measured on a CPU), and a uniform number may fall into such a step.
  """
  index = jnp.arange(is_kept.shape[-1], dtype=jnp.int32)[None]
  end = is_kept.shape[-1]
  after = is_kept & (index >= drawn[:, None])
  following = jnp.min(jnp.where(after, index, end), axis=-1)
  last = jnp.max(jnp.where(is_kept, index, 0), axis=-1)
  return jnp.where(following < end, following, last)
