"""Logprob and entropy of each token, computed from hidden states.

Everything is float32, whatever dtype the model computes in.

The logits of a batch, [B, T, V], would be its largest array by far: with 8,192
tokens and a vocabulary of 152,064 they take 5 GB, and their gradient takes as
much again. They are therefore never made as a whole. Both passes walk over the
vocabulary in chunks of entries:

- The forward pass keeps a running maximum, a running sum of exponentials and a
  running first moment. This is the online softmax of arXiv:1805.02867, extended
  by the moment, from which the entropy follows.
- The backward pass computes the logits of each chunk again. With log Z and the
  entropy known from the forward pass, the gradient of a logit needs no other
  logit, so every chunk is independent of the others.

On a mesh whose rules split the vocabulary, each device owns one contiguous part
of the entries. A chunk then takes some entries of every part, so that all
devices work on every chunk. The running values carry an axis over the parts,
and the parts are combined once, after the walk.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import products


def token_logprobs_and_entropy(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "V D"],
  tokens: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  *,
  temperature: float,
  vocab_chunk: int,
  layout: mesh_lib.Layout | None = None,
  divisor: float = 1.0,
  soft_cap: float | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  r"""Return the logprob of each token and the entropy of its distribution.

  logprobs[t] = log p_t(tokens[t])
  entropy[t]  = - sum_v p_t(v) log p_t(v)
  p_t         = softmax(head @ hidden[t - 1] / temperature)

  Only this and `value_functions.before_tokens` shift positions by one. The
  first token of a segment and padding get 0 in both results, and no gradient.
  Hidden states from which no token is predicted may hold NaN. Gradient flows to
  hidden and head from both results.

  Args:
    hidden: final hidden states, after the last norm. The product with head is
      computed in their dtype and accumulated in float32.
    head: a vector for each vocabulary entry; with tied embeddings, the
      embedding.
    temperature: the sampling temperature, which divides the logits.
    vocab_chunk: number of vocabulary entries per chunk; [B, T, vocab_chunk] is
      the largest array that is made.
    layout: of the mesh that the program is compiled for. Each chunk has at
      least one column of every part of the vocabulary.
    divisor: of the logits of the model, besides the temperature.
    soft_cap: c of c tanh(l / c), which the model's logits become before they
      are divided by the temperature. None leaves them as they are.
  """
  same = segment_ids[:, 1:] == segment_ids[:, :-1]
  draws_next = jnp.pad(same & (segment_ids[:, 1:] != 0), ((0, 0), (0, 1)))
  # Zeros in place of hidden states that predict nothing. Masking the results
  # alone would not keep their NaN out of the gradient of head, which is a
  # product of hidden states with zeros.
  logprobs, entropy = _next_logprobs_and_entropy(
    _Walk(temperature, vocab_chunk, layout, divisor, soft_cap),
    jnp.where(draws_next[..., None], hidden, 0),
    head,
    jnp.roll(tokens, -1, axis=1),
  )

  def shifted(next_values: Float[Array, "B T"]) -> Float[Array, "B T"]:
    # The roll moves the last column to the front. No token is predicted from
    # the last column, so it is 0 there, as the first token of a row must be.
    return jnp.roll(jnp.where(draws_next, next_values, 0), 1, axis=1)

  return shifted(logprobs), shifted(entropy)


@dataclasses.dataclass(frozen=True)
class _Walk:
  """A walk over the vocabulary, which consists of S parts of W entries each."""

  temperature: float
  vocab_chunk: int
  layout: mesh_lib.Layout | None
  divisor: float
  soft_cap: float | None

  def in_parts(self, head: Float[Array, "V D"]) -> Float[Array, "S W D"]:
    """Split the entries into the parts that the mesh distributes."""
    num_parts = self.layout.parts("vocab") if self.layout else 1
    return head.reshape(num_parts, -1, head.shape[1])

  def over(
    self, step: Callable, carry: Any, head: Float[Array, "S W D"]
  ) -> Any:
    """Thread carry through step(carry, start, width) over all entries."""
    num_parts, size, _ = head.shape
    width = min(size, max(1, self.vocab_chunk // num_parts))
    num_whole, rest = divmod(size, width)
    # A loop of one trip would keep XLA from fusing its body with what surrounds
    # it, so a single chunk is computed without a loop.
    if num_whole == 1:
      carry = step(carry, 0, width)
    else:
      carry = lax.fori_loop(
        0, num_whole, lambda i, c: step(c, i * width, width), carry
      )
    return step(carry, num_whole * width, rest) if rest else carry

  def chunk(
    self,
    hidden: Array,
    head: Float[Array, "S W D"],
    start: int | Array,
    width: int,
  ) -> Float[Array, "S C D"]:
    """Return the entries of one chunk, gathered over the axes that split D."""
    chunk = lax.dynamic_slice_in_dim(head, start, width, axis=1)
    # The head is split over D as well. The chunk is cut out and cast first and
    # gathered afterwards, so that a device never holds the whole head and the
    # gather moves the dtype that is computed in.
    chunk = self.split(chunk, "vocab", None, "embed").astype(hidden.dtype)
    return self.split(chunk, "vocab", None, None)

  def logits(
    self, hidden: Float[Array, "B T D"], chunk: Float[Array, "S C D"]
  ) -> Float[Array, "B T S C"]:
    """Return the scaled float32 logits of one chunk."""
    logits = products.contract(hidden, chunk, (2,), jnp.float32)
    logits = self.split(logits, "batch", "tokens", "vocab", None)
    if self.soft_cap is None:
      return logits / (self.divisor * self.temperature)
    capped = jnp.tanh(logits / (self.divisor * self.soft_cap))
    return capped * (self.soft_cap / self.temperature)

  def before_scaling(
    self, d_logits: Float[Array, "B T S C"], logits: Float[Array, "B T S C"]
  ) -> Float[Array, "B T S C"]:
    """Return the gradient of the products from that of the result of `logits`.

    d c tanh(l / c) / d l = 1 - tanh(l / c)^2
    """
    if self.soft_cap is not None:
      tanh = logits * (self.temperature / self.soft_cap)
      d_logits = d_logits * (1.0 - jnp.square(tanh))
    return d_logits / (self.divisor * self.temperature)

  def whole_logits(
    self, hidden: Float[Array, "B T D"], head: Float[Array, "S W D"]
  ) -> Float[Array, "B T S W"] | None:
    """Return all logits if they fit into one chunk, else None."""
    num_parts, width, _ = head.shape
    if self.vocab_chunk < num_parts * width:
      return None
    return self.logits(hidden, self.chunk(hidden, head, 0, width))

  def split(self, array: Array, *axes: str | None) -> Array:
    """Constrain how an array is split over the mesh, if there is one."""
    return self.layout.constrain(array, *axes) if self.layout else array


# Maximum, total, moment and the targets' logits, each [B, T, S].
_Running = tuple[Array, Array, Array, Array]


def _index(
  targets: Int[Array, "B T"], head: Float[Array, "S W D"], start: int | Array
) -> Int[Array, "B T S"]:
  """Return each target's entry, counted from `start` within each part.

  A value outside the chunk, negative ones included, means that the target is
  not among the entries of this part.
  """
  num_parts, width, _ = head.shape
  first = jnp.arange(num_parts, dtype=targets.dtype) * width
  return targets[..., None] - first[None, None] - start


def _next_logprobs_and_entropy(
  walk: _Walk,
  hidden: Float[Array, "B T D"],
  head: Float[Array, "V D"],
  targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Return the logprob of targets[t] under hidden[t], and the entropy.

  Nothing is shifted here. The function has a gradient of its own: automatic
  differentiation of the walk would keep the logits of every chunk for the
  backward pass.
  """
  function = jax.custom_vjp(lambda *arguments: _forward(walk, *arguments)[0])
  function.defvjp(
    functools.partial(_forward, walk), functools.partial(_backward, walk)
  )
  return function(hidden, head, targets)


def _forward(
  walk: _Walk,
  hidden: Float[Array, "B T D"],
  head: Float[Array, "V D"],
  targets: Int[Array, "B T"],
) -> tuple[tuple[Array, Array], Any]:
  """Walk over the vocabulary once, with a running maximum m per part.

  total = sum_v exp(l_v - m),   moment = sum_v exp(l_v - m) (l_v - m)
  log Z = m + log(total),       entropy = log(total) - moment / total

  Subtracting m keeps every exponential at or below 1. The entropy is computed
  from values centred on m as well: log Z - sum_v p_v l_v would subtract two
  large, nearly equal numbers.
  """
  parts = walk.in_parts(head)
  kept = walk.whole_logits(hidden, parts)

  def lowered(
    largest: Float[Array, "B T S"],
    new_largest: Float[Array, "B T #S"],
    total: Float[Array, "B T S"],
    moment: Float[Array, "B T S"],
  ) -> tuple[Float[Array, "B T S"], Float[Array, "B T S"]]:
    """Return total and moment relative to a larger maximum.

    With drop = m - m', exp(l - m') = exp(drop) exp(l - m) and l - m' = (l - m)
    + drop, and both sums follow.
    """
    drop = largest - new_largest
    return jnp.exp(drop) * total, jnp.exp(drop) * (moment + total * drop)

  def step(carry: _Running, start: int | Array, width: int) -> _Running:
    largest, total, moment, target_logits = carry
    logits = kept
    if logits is None:
      logits = walk.logits(hidden, walk.chunk(hidden, parts, start, width))
    new_largest = jnp.maximum(largest, logits.max(-1))
    centred = logits - new_largest[..., None]
    weights = jnp.exp(centred)
    total, moment = lowered(largest, new_largest, total, moment)
    total += weights.sum(-1)
    moment += (weights * centred).sum(-1)
    # A target outside the chunk reads some logit of it, which is then dropped.
    index = _index(targets, parts, start)
    found = jnp.take_along_axis(
      logits, jnp.clip(index, 0, width - 1)[..., None], axis=-1
    )[..., 0]
    is_here = (index >= 0) & (index < width)
    target_logits = jnp.where(is_here, found, target_logits)
    return new_largest, total, moment, target_logits

  zeros = jnp.zeros((*targets.shape, parts.shape[0]), jnp.float32)
  zeros = walk.split(zeros, "batch", "tokens", "vocab")
  # The initial maximum is finite. With -inf, the first step would compute
  # `total * drop` as 0 * -inf, which is NaN.
  lowest = jnp.full_like(zeros, jnp.finfo(jnp.float32).min)
  largest, total, moment, target_logits = walk.over(
    step, (lowest, zeros, zeros, zeros), parts
  )
  new_largest = largest.max(-1)
  total, moment = (
    x.sum(-1) for x in lowered(largest, new_largest[..., None], total, moment)
  )
  # The target lies in one part; in the others its logit stayed 0. The maximum
  # is subtracted first: log Z, rounded to float32 at the size of the logits,
  # would lose digits of logprobs near 0.
  logprobs = (target_logits.sum(-1) - new_largest) - jnp.log(total)
  entropy = jnp.log(total) - moment / total
  log_z = new_largest + jnp.log(total)
  return (logprobs, entropy), (hidden, head, targets, kept, log_z, entropy)


def _backward(
  walk: _Walk, residuals: Any, cotangents: Any
) -> tuple[Float[Array, "B T D"], Float[Array, "V D"], None]:
  """Walk over the vocabulary again, computing the logits of each chunk anew.

  d logprob / d l_v = [v = target] - p_v
  d entropy / d l_v = - p_v (log p_v + entropy)

  If a single chunk covers the vocabulary, the forward pass kept its logits
  instead: the backward pass follows immediately, so nothing else needs that
  memory in between.
  """
  hidden, head, targets, kept, log_z, entropy = residuals
  parts = walk.in_parts(head)
  log_z, entropy, d_logprobs, d_entropy = (
    x[..., None, None] for x in (log_z, entropy, *cotangents)
  )

  def step(
    carry: tuple[Array, Array], start: int | Array, width: int
  ) -> tuple[Array, Array]:
    d_hidden, d_parts = carry
    chunk = walk.chunk(hidden, parts, start, width)
    logits = walk.logits(hidden, chunk) if kept is None else kept
    logprobs = logits - log_z
    entries_here = lax.broadcasted_iota(targets.dtype, (1, 1, 1, width), 3)
    is_target = entries_here == _index(targets, parts, start)[..., None]
    d_logits = jnp.where(is_target, d_logprobs, 0) - jnp.exp(logprobs) * (
      d_logprobs + d_entropy * (logprobs + entropy)
    )
    d_logits = walk.before_scaling(d_logits, logits).astype(hidden.dtype)
    # XLA runs a batched product with a batch of one more slowly than the plain
    # product, so the axis of parts is left out where there is one part.
    if chunk.shape[0] > 1:
      d_hidden += jnp.einsum(
        "btsc,scd->btsd", d_logits, chunk, preferred_element_type=jnp.float32
      )
    else:
      added = products.contract(d_logits, chunk, (0, 1), jnp.float32)
      d_hidden += added[:, :, None]
    d_chunk = products.outer(d_logits, hidden, 2, jnp.float32)
    d_chunk = walk.split(d_chunk.astype(head.dtype), "vocab", None, "embed")
    d_parts = lax.dynamic_update_slice_in_dim(d_parts, d_chunk, start, axis=1)
    return d_hidden, d_parts

  b, t, d = hidden.shape
  d_hidden = jnp.zeros((b, t, parts.shape[0], d), jnp.float32)
  d_hidden = walk.split(d_hidden, "batch", "tokens", "vocab", None)
  d_parts = walk.split(jnp.zeros_like(parts), "vocab", None, "embed")
  d_hidden, d_parts = walk.over(step, (d_hidden, d_parts), parts)
  # Each part summed over its own entries during the walk. Summing over the
  # parts here takes one reduction between devices instead of one per chunk.
  d_hidden = d_hidden.sum(2).astype(hidden.dtype)
  return d_hidden, d_parts.reshape(head.shape), None
