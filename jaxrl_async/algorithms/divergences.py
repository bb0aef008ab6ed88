"""How far two policies are apart, estimated from the tokens that were drawn."""

from typing import Any

from jax import numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_sum(
  values: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
  """Sum where the mask is True, whatever stands elsewhere."""
  return jnp.where(mask, values, 0).sum()


def k3(
  sampled_logprobs: Float[Any, "*shape"], other_logprobs: Float[Any, "*shape"]
) -> Float[Any, "*shape"]:
  r"""Estimate KL(sampled || other) from one draw of each token; never negative.

  k3 = (rho - 1) - log(rho),   rho = other / sampled

  http://joschu.net/blog/kl-approx.html; unbiased if the token was drawn from
  `sampled`. The arrays may be JAX's or NumPy's, whose float64 is exact to far
  smaller divergences.
  """
  log_ratio = other_logprobs - sampled_logprobs
  return log_ratio.__array_namespace__().expm1(log_ratio) - log_ratio


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
