"""From hidden states to token logprobs, and from logprobs to losses.

Everything is float32 whatever the model computes in. A loss is a sum over the
loss tokens of a microbatch divided by the number of loss tokens of the whole
minibatch, so that losses and gradients of microbatches simply add. What stands
under a False of `loss_mask` has no influence on a single bit, NaN included.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from jaxrl_async import config
from jaxrl_async import mesh as mesh_lib


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


def masked_sum(
  values: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
  """Sum where the mask is True, whatever stands elsewhere."""
  return jnp.where(mask, values, 0).sum()


def k3(
  sampled_logprobs: Float[Array, "B T"], other_logprobs: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  r"""Estimate KL(sampled || other) from one draw of each token; never negative.

  k3 = (rho - 1) - log(rho),   rho = other / sampled

  http://joschu.net/blog/kl-approx.html; unbiased if the token was drawn from
  `sampled`.
  """
  log_ratio = other_logprobs - sampled_logprobs
  return jnp.expm1(log_ratio) - log_ratio


def behavior_weights(
  proximal_logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  cap: float,
  cap_mode: config.BehaviorWeightCapMode,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
  r"""Move a token from the policy that drew it to the centre of trust.

  w = pi_prox / pi_behav    arXiv:2505.24298, eq. 5; no gradient flows
  w > cap becomes 0 (mask) or cap (truncate)

  Returns:
    Weights, 0 outside loss_mask, and which of them were above the cap.
  """
  log_ratio = jnp.where(loss_mask, proximal_logprobs - behavior_logprobs, 0)
  weights = jnp.exp(lax.stop_gradient(log_ratio))
  is_capped = weights > cap
  capped = {
    config.BehaviorWeightCapMode.MASK: 0.0,
    config.BehaviorWeightCapMode.TRUNCATE: cap,
  }[cap_mode]
  weights = jnp.where(is_capped, capped, weights)
  return jnp.where(loss_mask, weights, 0), is_capped & loss_mask


def ppo_objective(
  logprobs: Float[Array, "B T"],
  proximal_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
  r"""What PPO maximises, a token each, arXiv:1707.06347 eq. 7.

  min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = pi_theta / pi_prox

  Gradient flows to logprobs only.

  Returns:
    The objective, 0 outside loss_mask, and where the clip won: those tokens
    have no gradient.
  """
  proximal_logprobs = lax.stop_gradient(proximal_logprobs)
  log_ratio = jnp.where(loss_mask, logprobs - proximal_logprobs, 0)
  advantages = jnp.where(loss_mask, lax.stop_gradient(advantages), 0)
  ratio = jnp.exp(log_ratio)
  unclipped = ratio * advantages
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
  return jnp.minimum(unclipped, clipped), clipped < unclipped


def decoupled_ppo_loss(
  logprobs: Float[Array, "B T"],
  proximal_logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  clip_low: float,
  clip_high: float,
  behavior_weight_cap: float,
  cap_mode: config.BehaviorWeightCapMode,
  num_loss_tokens: ScalarLike,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
  r"""Decoupled PPO, arXiv:2505.24298 eq. 5, a microbatch's share.

  L = sum over loss_mask of -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      / num_loss_tokens
  r = pi_theta / pi_prox,   w = pi_prox / pi_behav, detached and capped

  Gradient flows to logprobs only.

  Args:
    logprobs: under the policy being updated.
    proximal_logprobs: under the weights before the train step.
    behavior_logprobs: under the distribution each token was drawn from.
    advantages: per token.
    loss_mask: tokens the policy wrote.
    clip_low: how far below 1 the ratio pays off.
    clip_high: how far above.
    behavior_weight_cap: largest w that is used as it is.
    cap_mode: what happens to tokens above it.
    num_loss_tokens: of the whole minibatch; 0 makes the loss 0.

  Returns:
    The loss, and sums over loss_mask. `ess` is weight_sum^2 / (num_loss_tokens
    weight_square_sum); the others are divided by num_loss_tokens.
  """
  weights, is_capped = behavior_weights(
    proximal_logprobs,
    behavior_logprobs,
    loss_mask,
    cap=behavior_weight_cap,
    cap_mode=cap_mode,
  )
  objective, is_clipped = ppo_objective(
    logprobs,
    proximal_logprobs,
    advantages,
    loss_mask,
    clip_low=clip_low,
    clip_high=clip_high,
  )
  loss = -(weights * objective).sum() / _at_least_one(num_loss_tokens)
  kl = k3(proximal_logprobs, lax.stop_gradient(logprobs))
  return loss, {
    "clip_count": is_clipped.sum(dtype=jnp.float32),
    "approx_kl_sum": masked_sum(kl, loss_mask),
    "behavior_weight_sum": weights.sum(),
    "behavior_weight_square_sum": (weights**2).sum(),
    "behavior_weight_capped_count": is_capped.sum(dtype=jnp.float32),
  }


def loglinear_proximal_logprobs(
  logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  policy_versions: Int[Array, "B T"],
  policy_version: Int[Array, ""],
) -> Float[Array, "B T"]:
  r"""Guess logprobs under the weights before the train step, without a forward.

  log pi_prox = 1/d log pi_behav + (1 - 1/d) log pi_theta
  d           = v_theta - v_behav

  A-3PO, arXiv:2512.06547. The weights being made are version v_theta = v_prox +
  1, so d is a token's staleness + 1 and the line from v_behav to v_theta is cut
  at v_prox. What the weights before the step drew themselves has d = 1, and
  its behavior logprobs are the answer. No gradient flows.

  Args:
    logprobs: under the policy being updated.
    behavior_logprobs: under the distribution each token was drawn from.
    policy_versions: of the weights that drew the token, at most policy_version;
      where it is -1 the result means nothing.
    policy_version: of the weights before the train step.
  """
  distance = (policy_version + 1 - policy_versions).astype(jnp.float32)
  logprobs = lax.stop_gradient(logprobs)
  return logprobs + (behavior_logprobs - logprobs) / distance


def behavior_kl_sums(
  trainer_logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  is_current_version: Bool[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
  """Sum up how far the rollout side's distributions were from the trainer's.

  Args:
    trainer_logprobs: computed by the trainer, under weights of its own.
    behavior_logprobs: under the distribution each token was drawn from.
    loss_mask: tokens the policy wrote.
    is_current_version: tokens drawn by the very weights of trainer_logprobs.
      Over them the divergence is the engine's error, not the policy's motion.

  Returns:
    behavior_kl_sum over loss_mask; mismatch_kl_sum and mismatch_count over the
    current version's part of it.
  """
  kl = k3(behavior_logprobs, trainer_logprobs)
  is_current = loss_mask & is_current_version
  return {
    "behavior_kl_sum": masked_sum(kl, loss_mask),
    "mismatch_kl_sum": masked_sum(kl, is_current),
    "mismatch_count": is_current.sum(dtype=jnp.float32),
  }


def next_token_loss(
  logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  num_loss_tokens: ScalarLike,
) -> Float[Array, ""]:
  """Cross-entropy of the masked tokens, a microbatch's share."""
  return -masked_sum(logprobs, loss_mask) / _at_least_one(num_loss_tokens)


def _at_least_one(count: ScalarLike) -> Float[Array, ""]:
  return jnp.maximum(jnp.asarray(count, jnp.float32), 1)
