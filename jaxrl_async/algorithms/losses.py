"""Losses, as functions of logprobs.

Everything is float32. A loss is a sum over the loss tokens of a microbatch
divided by the number of loss tokens of the whole minibatch, so that losses and
gradients of microbatches simply add. What stands where `loss_mask` is False
changes no bit of a loss or of its gradient, even if it is NaN.
"""

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from jaxrl_async.algorithms import divergences
from jaxrl_async.config import sections


def behavior_weights(
  proximal_logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  cap: float,
  cap_mode: sections.BehaviorWeightCapMode,
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
    sections.BehaviorWeightCapMode.MASK: 0.0,
    sections.BehaviorWeightCapMode.TRUNCATE: cap,
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
  cap_mode: sections.BehaviorWeightCapMode,
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
  kl = divergences.k3(proximal_logprobs, lax.stop_gradient(logprobs))
  return loss, {
    "clip_count": is_clipped.sum(dtype=jnp.float32),
    "approx_kl_sum": divergences.masked_sum(kl, loss_mask),
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


def next_token_loss(
  logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  num_loss_tokens: ScalarLike,
) -> Float[Array, ""]:
  """Cross-entropy of the masked tokens, a microbatch's share."""
  return -divergences.masked_sum(logprobs, loss_mask) / _at_least_one(
    num_loss_tokens
  )


def _at_least_one(count: ScalarLike) -> Float[Array, ""]:
  return jnp.maximum(jnp.asarray(count, jnp.float32), 1)
