"""Rotary embeddings, with the scalings of their frequencies.

Queries and keys of a token at position p are rotated, pair by pair, by p times
the frequency of the pair (arXiv:2104.09864). The layers of a model may have
different frequencies, or none.
"""

import math

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from jaxrl_async.models import configs

# Cosines and sines, or a stack of both for several kinds of layers.
Factors = tuple[jax.Array, jax.Array]


def kinds(
  config: configs.ModelConfig,
) -> tuple[list[configs.Rope | None], list[int]]:
  """Return the different rotary embeddings, and which one each layer has."""
  ropes = list(dict.fromkeys(config.ropes))
  return ropes, [ropes.index(rope) for rope in config.ropes]


def frequencies(
  config: configs.ModelConfig, rope: configs.Rope | None
) -> Float[np.ndarray, "half"]:
  """Return the frequency of each pair of a head, in radians per token.

  theta^(-2i/H), i = 0 .. H/2 - 1   (arXiv:2104.09864)

  Without a rotary embedding, all frequencies are zero, which rotates nothing.

  The frequencies are computed in float32 on the host, with the same roundings
  as in transformers. The power function of a device may differ in the last
  digit, which is an error of 2e-3 radians at position 30,000.

  - linear divides all frequencies by `factor`.
  - llama3 keeps those that turn at least `high_freq_factor` times within the
    original context, divides those that turn at most `low_freq_factor` times by
    `factor`, and interpolates between the two.
  - yarn (arXiv:2309.00071) interpolates over the pairs between the two that
    turn `beta_fast` and `beta_slow` times.
  - dynamic raises theta with the length of the longest sequence.
  - longrope (arXiv:2402.13753) divides each frequency by a factor of its own.
    There is one list of factors for sequences within the original context, and
    another for longer ones.

  Of dynamic and longrope, transformers looks at the length of each batch. Here
  it is `max_tokens` for all sequences of a run: keys that are cached would
  otherwise belong to other frequencies than those of later queries.
  """
  dim = config.rotary_dim or config.head_dim
  if rope is None:
    return np.zeros(dim // 2, np.float32)
  one = np.float32(1.0)
  theta, scaling = np.float64(rope.theta), rope.scaling
  kind = "" if scaling is None else scaling.kind
  if scaling is not None and kind == "dynamic":
    context = scaling.original_max_tokens
    longer = max(scaling.max_tokens or 0, context) / context
    theta *= (scaling.factor * longer - (scaling.factor - 1)) ** (
      dim / (dim - 2)
    )
  exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
  # The power is computed in float64, which gives the same result everywhere.
  # NumPy's float32 power depends on the processor.
  powers = (theta ** exponents.astype(np.float64)).astype(np.float32)
  plain = one / powers
  if scaling is None or kind == "dynamic":
    return plain
  factor = np.float32(scaling.factor)
  if kind == "linear":
    return plain / factor
  if kind == "longrope":
    is_long = (scaling.max_tokens or 0) > scaling.original_max_tokens
    factors = scaling.long_factors if is_long else scaling.short_factors
    return one / (np.asarray(factors, np.float32) * powers)
  if kind == "yarn":
    kept = one - _yarn_ramp(rope.theta, scaling, dim)
    return one / (factor * powers) * (one - kept) + plain * kept
  context = np.float32(scaling.original_max_tokens)
  low = np.float32(scaling.low_freq_factor)
  high = np.float32(scaling.high_freq_factor)
  wavelengths = one / plain * np.float32(2 * np.pi)
  turns = one / wavelengths * context
  kept = np.clip((turns - low) / (high - low), np.float32(0.0), one)
  return (one - kept) * plain / factor + kept * plain


def _yarn_ramp(
  theta: float, scaling: configs.RopeScaling, dim: int
) -> Float[np.ndarray, "half"]:
  """Return 0 for pairs whose frequency stays, 1 for those that are slowed."""

  def pair(turns: float) -> float:
    """Return which pair turns that often within the original context."""
    wavelength = scaling.original_max_tokens / (turns * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(theta))

  low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
  if scaling.has_whole_bounds:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  if low == high:
    high += 0.001
  pairs = np.arange(dim // 2, dtype=np.float32)
  return np.clip(
    (pairs - np.float32(low)) / np.float32(high - low),
    np.float32(0.0),
    np.float32(1.0),
  )


def factors(
  config: configs.ModelConfig,
  rope: configs.Rope | None,
  positions: Int[Array, "*B"],
) -> tuple[Float[Array, "*B 1 half"], Float[Array, "*B 1 half"]]:
  """Return the cosine and the sine of each pair's angle.

  Args:
    config: the architecture.
    rope: of the layer.
    positions: of each token in its sequence.
  """
  of_pairs = frequencies(config, rope)
  shape = (1,) * (positions.ndim + 1) + of_pairs.shape
  angles = positions.astype(jnp.float32)[..., None, None]
  angles = angles * of_pairs.reshape(shape)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  if rope is not None and rope.scaling is not None:
    amplitude = rope.scaling.amplitude
    if amplitude != 1.0:
      cos, sin = cos * jnp.float32(amplitude), sin * jnp.float32(amplitude)
  # Otherwise XLA's CPU backend computes them again for each head of each layer.
  return jax.lax.optimization_barrier((cos, sin))


def rotated(
  x: Float[Array, "*B N H"],
  cos: Float[Array, "*B 1 half"],
  sin: Float[Array, "*B 1 half"],
  scale: float = 1.0,
) -> Float[Array, "*B N H"]:
  """Rotate the two halves of each head by position.

  Args:
    x: query or key heads. Elements past the rotated ones stay.
    cos: see `factors`.
    sin: likewise.
    scale: what the result is multiplied by.
  """
  half = cos.shape[-1]
  wide = x.astype(jnp.float32)
  if scale != 1.0:
    wide = wide * jnp.float32(scale)
  first, second = wide[..., :half], wide[..., half : 2 * half]
  parts = [first * cos - second * sin, second * cos + first * sin]
  if 2 * half < x.shape[-1]:
    parts.append(wide[..., 2 * half :])
  return jnp.concatenate(parts, axis=-1).astype(x.dtype)
