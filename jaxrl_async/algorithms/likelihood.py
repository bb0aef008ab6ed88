"""From hidden states to the logprob and the entropy of each token.

Everything is float32, whatever type the model computes in. The array of all
logits, [tokens, vocabulary], is never made: the forward and the backward pass
walk over the vocabulary in chunks.
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


def token_logprobs_and_entropy(
  hidden: Float[Array, "B T D"],
  head: Float[Array, "D V"],
  tokens: Int[Array, "B T"],
  segment_ids: Int[Array, "B T"],
  *,
  temperature: float,
  vocab_chunk: int,
  layout: mesh_lib.Layout | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  r"""Logprob of each token given those before it, and how open the choice was.

  logprobs[t] = log p_t(tokens[t])
  entropy[t]  = - sum_v p_t(v) log p_t(v)
  p_t         = softmax(hidden[t - 1] @ head / temperature)

  This is the one place where the shift by one happens. The first token of a
  segment and padding get 0 in both, and no gradient; hidden states that draw
  nothing may hold NaN. Gradients flow to hidden and head from both outputs.

  Args:
    hidden: what the model made of token t and those before it, after the final
      norm. The product with head is taken in its dtype, summed in float32.
    head: output projection; with tied embeddings, the embedding transposed.
    tokens: token ids.
    segment_ids: 0 is padding.
    temperature: of sampling.
    vocab_chunk: [B, T, vocab_chunk] is the largest array that is ever made.
    layout: of the mesh it is compiled for. A chunk has columns of every part
      of the vocabulary, one of each at least.
  """
  same = segment_ids[:, 1:] == segment_ids[:, :-1]
  draws_next = jnp.pad(same & (segment_ids[:, 1:] != 0), ((0, 0), (0, 1)))
  logprobs, entropy = _next_logprobs_and_entropy(
    _Walk(temperature, vocab_chunk, layout),
    jnp.where(draws_next[..., None], hidden, 0),
    head,
    jnp.roll(tokens, -1, axis=1),
  )

  def shifted(next_values):
    # The last column draws nothing, so what is rolled round to the first is 0.
    return jnp.roll(jnp.where(draws_next, next_values, 0), 1, axis=1)

  return shifted(logprobs), shifted(entropy)


@dataclasses.dataclass(frozen=True)
class _Walk:
  """How to go over the vocabulary, which is S parts of W columns."""

  temperature: float
  vocab_chunk: int
  layout: mesh_lib.Layout | None

  def in_parts(self, head: Float[Array, "D V"]) -> Float[Array, "D S W"]:
    num_parts = self.layout.parts("vocab") if self.layout else 1
    return head.reshape(head.shape[0], num_parts, -1)

  def over(
    self, step: Callable, carry: Any, head: Float[Array, "D S W"]
  ) -> Any:
    """Threads carry through step(carry, start, width) over a part's columns."""
    size = head.shape[2]
    width = min(size, max(1, self.vocab_chunk // head.shape[1]))
    num_whole, rest = divmod(size, width)
    if num_whole == 1:  # Straight code: XLA fuses what a loop would keep apart.
      carry = step(carry, 0, width)
    else:
      carry = lax.fori_loop(
        0, num_whole, lambda i, c: step(c, i * width, width), carry
      )
    return step(carry, num_whole * width, rest) if rest else carry

  def columns(
    self, hidden: Array, head: Float[Array, "D S W"], start: Any, width: int
  ) -> Float[Array, "D S C"]:
    columns = lax.dynamic_slice_in_dim(head, start, width, axis=2)
    # Cut and cast, then gathered: a chunk at a time, and not the head.
    columns = self.split(columns, "embed", "vocab", None).astype(hidden.dtype)
    return self.split(columns, None, "vocab", None)

  def logits(
    self, hidden: Float[Array, "B T D"], columns: Float[Array, "D S C"]
  ) -> Float[Array, "B T S C"]:
    logits = jnp.einsum(
      "btd,dsc->btsc", hidden, columns, preferred_element_type=jnp.float32
    )
    logits = self.split(logits, "batch", "tokens", "vocab", None)
    return logits / self.temperature

  def whole_logits(
    self, hidden: Float[Array, "B T D"], head: Float[Array, "D S W"]
  ) -> Float[Array, "B T S W"] | None:
    """All of them if one chunk is all there is."""
    width = head.shape[2]
    if self.vocab_chunk < head.shape[1] * width:
      return None
    return self.logits(hidden, self.columns(hidden, head, 0, width))

  def split(self, array: Array, *axes: str | None) -> Array:
    return self.layout.constrain(array, *axes) if self.layout else array


def _index(
  targets: Int[Array, "B T"], head: Float[Array, "D S W"], start: Any
) -> Int[Array, "B T S"]:
  """Where a token's column is, counted from `start` of each part."""
  first = jnp.arange(head.shape[1], dtype=targets.dtype) * head.shape[2]
  return targets[..., None] - first[None, None] - start


def _next_logprobs_and_entropy(
  walk: _Walk,
  hidden: Float[Array, "B T D"],
  head: Float[Array, "D V"],
  targets: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Logprob of targets[t] under hidden[t], and the entropy; no shift here."""
  function = jax.custom_vjp(lambda *arguments: _forward(walk, *arguments)[0])
  function.defvjp(
    functools.partial(_forward, walk), functools.partial(_backward, walk)
  )
  return function(hidden, head, targets)


def _forward(
  walk: _Walk,
  hidden: Float[Array, "B T D"],
  head: Float[Array, "D V"],
  targets: Int[Array, "B T"],
) -> tuple[tuple[Array, Array], Any]:
  """Walk the vocabulary once with a running maximum m, in each part.

  total = sum_v exp(l_v - m),   moment = sum_v exp(l_v - m) (l_v - m)
  log Z = m + log(total),       entropy = log(total) - moment / total
  """
  parts = walk.in_parts(head)
  kept = walk.whole_logits(hidden, parts)

  def lowered(largest, new_largest, total, moment):
    """Total and moment for a larger maximum."""
    drop = largest - new_largest
    return jnp.exp(drop) * total, jnp.exp(drop) * (moment + total * drop)

  def step(carry, start, width):
    largest, total, moment, target_logits = carry
    logits = kept
    if logits is None:
      logits = walk.logits(hidden, walk.columns(hidden, parts, start, width))
    new_largest = jnp.maximum(largest, logits.max(-1))
    centred = logits - new_largest[..., None]
    weights = jnp.exp(centred)
    total, moment = lowered(largest, new_largest, total, moment)
    total += weights.sum(-1)
    moment += (weights * centred).sum(-1)
    index = _index(targets, parts, start)
    found = jnp.take_along_axis(
      logits, jnp.clip(index, 0, width - 1)[..., None], axis=-1
    )[..., 0]
    is_here = (index >= 0) & (index < width)
    target_logits = jnp.where(is_here, found, target_logits)
    return new_largest, total, moment, target_logits

  zeros = jnp.zeros((*targets.shape, parts.shape[1]), jnp.float32)
  zeros = walk.split(zeros, "batch", "tokens", "vocab")
  # Finite, because 0 * -inf would poison the first moment.
  lowest = jnp.full_like(zeros, jnp.finfo(jnp.float32).min)
  largest, total, moment, target_logits = walk.over(
    step, (lowest, zeros, zeros, zeros), parts
  )
  new_largest = largest.max(-1)
  total, moment = (
    x.sum(-1) for x in lowered(largest, new_largest[..., None], total, moment)
  )
  logprobs = (target_logits.sum(-1) - new_largest) - jnp.log(total)
  entropy = jnp.log(total) - moment / total
  log_z = new_largest + jnp.log(total)
  return (logprobs, entropy), (hidden, head, targets, kept, log_z, entropy)


def _backward(
  walk: _Walk, residuals: Any, cotangents: Any
) -> tuple[Float[Array, "B T D"], Float[Array, "D V"], None]:
  """Walk the vocabulary again, making each chunk's logits anew.

  Those of a single chunk were kept: nothing comes between the two passes that
  would want their memory.

  d logprob / d l_v = [v = target] - p_v
  d entropy / d l_v = - p_v (log p_v + entropy)
  """
  hidden, head, targets, kept, log_z, entropy = residuals
  parts = walk.in_parts(head)
  log_z, entropy, d_logprobs, d_entropy = (
    x[..., None, None] for x in (log_z, entropy, *cotangents)
  )

  def step(carry, start, width):
    d_hidden, d_parts = carry
    columns = walk.columns(hidden, parts, start, width)
    logits = walk.logits(hidden, columns) if kept is None else kept
    logprobs = logits - log_z
    columns_here = lax.broadcasted_iota(targets.dtype, (1, 1, 1, width), 3)
    is_target = columns_here == _index(targets, parts, start)[..., None]
    d_logits = jnp.where(is_target, d_logprobs, 0) - jnp.exp(logprobs) * (
      d_logprobs + d_entropy * (logprobs + entropy)
    )
    d_logits = (d_logits / walk.temperature).astype(hidden.dtype)
    # A batch of one product is slower than the product.
    is_split = columns.shape[1] > 1
    products = jnp.einsum(
      "btsc,dsc->btsd" if is_split else "btsc,dsc->btd",
      d_logits,
      columns,
      preferred_element_type=jnp.float32,
    )
    d_hidden += products if is_split else products[:, :, None]
    d_columns = jnp.einsum(
      "btd,btsc->dsc", hidden, d_logits, preferred_element_type=jnp.float32
    )
    d_columns = walk.split(d_columns.astype(head.dtype), "embed", "vocab", None)
    d_parts = lax.dynamic_update_slice_in_dim(d_parts, d_columns, start, axis=2)
    return d_hidden, d_parts

  b, t, d = hidden.shape
  d_hidden = jnp.zeros((b, t, parts.shape[1], d), jnp.float32)
  d_hidden = walk.split(d_hidden, "batch", "tokens", "vocab", None)
  d_parts = walk.split(jnp.zeros_like(parts), "embed", "vocab", None)
  d_hidden, d_parts = walk.over(step, (d_hidden, d_parts), parts)
  # Summed over the parts once, after the walk.
  d_hidden = d_hidden.sum(2).astype(hidden.dtype)
  return d_hidden, d_parts.reshape(head.shape), None
