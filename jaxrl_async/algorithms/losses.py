"""Policy losses as functions of token logprobs.

Everything is float32. Each loss is a sum over the loss tokens of one
microbatch, divided by the number of loss tokens of the whole minibatch. The
losses and gradients of the microbatches of a minibatch therefore add up to
those of the minibatch.

Positions where `loss_mask` is False do not change a single bit of a loss or of
its gradient, even if they hold NaN. Two rules ensure this:

- Differences of logprobs are masked before `exp`. Masking the result alone
  would keep the loss finite but not its gradient: the backward pass multiplies
  the derivative of `exp`, which may be NaN or infinite, by the zero of the
  mask, and 0 * NaN is NaN.
- Masked positions are replaced with `where`, never multiplied by 0.
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
  r"""Return weights that correct for tokens being drawn by an older policy.

  w = pi_prox / pi_behav    arXiv:2505.24298, eq. 5; no gradient flows
  w > cap becomes 0 (mask) or cap (truncate)

  Args:
    proximal_logprobs: under the weights before the train step.
    behavior_logprobs: under the distribution that each token was drawn from.
    loss_mask: tokens that the policy wrote.
    cap: largest weight that is used unchanged.
    cap_mode: what happens to larger weights.

  Returns:
    The weights, which are 0 outside loss_mask, and a mask of the tokens whose
    weight was above the cap.
  """
  # Masked before `exp`, see the module's docstring.
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
  r"""Return PPO's clipped objective of each token, arXiv:1707.06347 eq. 7.

  min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = pi_theta / pi_prox

  Gradient flows to logprobs only.

  Args:
    logprobs: under the policy being updated.
    proximal_logprobs: under the weights before the train step.
    advantages: one per token.
    loss_mask: tokens that the policy wrote.
    clip_low: the ratio is clipped at 1 - clip_low from below.
    clip_high: the ratio is clipped at 1 + clip_high from above.

  Returns:
    The objective, which is 0 outside loss_mask, and a mask of the tokens where
    the clipped term is the smaller one. These tokens have no gradient.
  """
  proximal_logprobs = lax.stop_gradient(proximal_logprobs)
  # Masked before `exp`, see the module's docstring. A masked token then has
  # ratio 1 and advantage 0, so its objective and gradient are exactly 0.
  log_ratio = jnp.where(loss_mask, logprobs - proximal_logprobs, 0)
  advantages = jnp.where(loss_mask, lax.stop_gradient(advantages), 0)
  ratio = jnp.exp(log_ratio)
  unclipped = ratio * advantages
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
  # The minimum is the pessimistic bound of PPO: it removes the incentive to
  # move the ratio further in the direction that the advantage favours, but
  # keeps the gradient of a token whose ratio has moved in the other direction.
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
  r"""Return one microbatch's share of the decoupled PPO loss.

  L = sum over loss_mask of -w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
      / num_loss_tokens
  r = pi_theta / pi_prox,   w = pi_prox / pi_behav, detached and capped

  This is arXiv:2505.24298, eq. 5. Gradient flows to logprobs only.

  Args:
    logprobs: under the policy being updated.
    proximal_logprobs: under the weights before the train step.
    behavior_logprobs: under the distribution that each token was drawn from.
    advantages: one per token.
    loss_mask: tokens that the policy wrote.
    clip_low: the ratio is clipped at 1 - clip_low from below.
    clip_high: the ratio is clipped at 1 + clip_high from above.
    behavior_weight_cap: largest w that is used unchanged.
    cap_mode: what happens to tokens whose w is larger.
    num_loss_tokens: of the whole minibatch; 0 makes the loss 0.

  Returns:
    The loss, and sums over loss_mask from which the metrics are computed. The
    effective sample size is weight_sum^2 / (num_loss_tokens weight_square_sum);
    every other metric is its sum divided by num_loss_tokens.
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
  r"""Approximate the proximal logprobs without a forward pass.

  log pi_prox = 1/d log pi_behav + (1 - 1/d) log pi_theta
  d           = v_theta - v_behav

  This is A-3PO, arXiv:2512.06547. The proximal policy holds the weights before
  the train step, so its version is v_prox = v_theta - 1, where v_theta is the
  version that the step produces. A token's distance d is thus its staleness
  plus 1, and v_prox lies at 1/d of the way from v_theta to v_behav. A token
  that was drawn by the proximal policy itself has d = 1, and the result is its
  behavior logprob. No gradient flows.

  Args:
    logprobs: under the policy being updated.
    behavior_logprobs: under the distribution that each token was drawn from.
    policy_versions: version of the weights that drew each token, at most
      policy_version. Where it is -1 the result is meaningless.
    policy_version: version of the weights before the train step.
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
  """Return one microbatch's share of the cross-entropy of the masked tokens.

  Args:
    logprobs: of the tokens themselves.
    loss_mask: tokens that are learned from.
    num_loss_tokens: of the whole minibatch; 0 makes the loss 0.
  """
  return -divergences.masked_sum(logprobs, loss_mask) / _at_least_one(
    num_loss_tokens
  )


def _at_least_one(count: ScalarLike) -> Float[Array, ""]:
  """Return a count as float32, with 1 in place of 0 so that it can divide."""
  return jnp.maximum(jnp.asarray(count, jnp.float32), 1)
