"""Estimates of how far two policies are apart, from tokens that were drawn."""

from typing import TypeVar

from jax import numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np


def masked_sum(
  values: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
  """Return the sum where the mask is True; elsewhere there may be NaN."""
  return jnp.where(mask, values, 0).sum()


# Arrays of a device, or arrays of the host.
Values = TypeVar("Values", Float[Array, "*shape"], Float[np.ndarray, "*shape"])


def k3(sampled_logprobs: Values, other_logprobs: Values) -> Values:
  r"""Return one estimate of KL(sampled || other) per token; never negative.

  k3 = (rho - 1) - log(rho),   rho = other / sampled

  The estimator is k3 of http://joschu.net/blog/kl-approx.html. It is unbiased
  if each token was drawn from `sampled`.
  """
  log_ratio = other_logprobs - sampled_logprobs
  return log_ratio.__array_namespace__().expm1(log_ratio) - log_ratio


def behavior_kl_sums(
  trainer_logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  is_current_version: Bool[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
  """Return sums that say how far the behavior policy was from the trainer's.

  Args:
    trainer_logprobs: computed by the trainer, under the weights it holds.
    behavior_logprobs: under the distribution that each token was drawn from.
    loss_mask: tokens that the policy wrote.
    is_current_version: tokens that were drawn with the same weights that
      `trainer_logprobs` were computed with. Over these tokens the divergence
      measures the numerical mismatch between engine and trainer, because the
      policy has not changed.

  Returns:
    behavior_kl_sum over loss_mask, and mismatch_kl_sum and mismatch_count over
    those of its tokens that are of the current version.
  """
  kl = k3(behavior_logprobs, trainer_logprobs)
  is_current = loss_mask & is_current_version
  return {
    "behavior_kl_sum": masked_sum(kl, loss_mask),
    "mismatch_kl_sum": masked_sum(kl, is_current),
    "mismatch_count": is_current.sum(dtype=jnp.float32),
  }
