"""Estimates of how far two policies are apart, from tokens that were drawn."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from jaxrl_async.config import sections


def masked_sum(
  values: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
  """Return the sum where the mask is True; elsewhere there may be NaN."""
  return jnp.where(mask, values, 0).sum()


# Arrays of a device, or arrays of the host.
Values = TypeVar("Values", Float[Array, "*shape"], Float[np.ndarray, "*shape"])


def k1(sampled_logprobs: Values, other_logprobs: Values) -> Values:
  r"""Return one estimate of KL(sampled || other) per token.

  k1 = -log(rho),   rho = other / sampled

  It is unbiased if each token was drawn from `sampled`, and may be negative.
  Its gradient is that of the sampled logprob, whose mean is 0: a penalty of
  this kind moves the policy by noise alone.
  """
  return sampled_logprobs - other_logprobs


def k2(sampled_logprobs: Values, other_logprobs: Values) -> Values:
  r"""Return one estimate of KL(sampled || other) per token; never negative.

  k2 = log(rho)^2 / 2,   rho = other / sampled

  It is biased. Its gradient is unbiased if each token was drawn from `sampled`.
  """
  return (other_logprobs - sampled_logprobs) ** 2 / 2


def k3(sampled_logprobs: Values, other_logprobs: Values) -> Values:
  r"""Return one estimate of KL(sampled || other) per token; never negative.

  k3 = (rho - 1) - log(rho),   rho = other / sampled

  The estimator is k3 of http://joschu.net/blog/kl-approx.html. It is unbiased
  if each token was drawn from `sampled`.
  """
  log_ratio = other_logprobs - sampled_logprobs
  return log_ratio.__array_namespace__().expm1(log_ratio) - log_ratio


# The estimators, k1, k2 and k3 of http://joschu.net/blog/kl-approx.html.
ESTIMATORS: Mapping[sections.KlEstimator, Callable[[Any, Any], Any]] = {
  sections.KlEstimator.K1: k1,
  sections.KlEstimator.K2: k2,
  sections.KlEstimator.K3: k3,
}


def kl_penalty(
  logprobs: Float[Array, "B T"],
  reference_logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  estimator: sections.KlEstimator,
) -> Float[Array, "B T"]:
  """Return estimates of KL(theta || reference), which are 0 outside the mask.

  Gradient flows to logprobs only. Masked positions may hold NaN.
  """
  reference = lax.stop_gradient(reference_logprobs)
  # Masked before `exp`, as in `losses`.
  logprobs = jnp.where(loss_mask, logprobs, 0)
  return ESTIMATORS[estimator](logprobs, jnp.where(loss_mask, reference, 0))


def behavior_kl_sums(
  trainer_logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  is_current_version: Bool[Array, "B T"],
) -> dict[str, Float[Array, ""]]:
  """Return sums that say how far the behavior policy was from the trainer's.

  Args:
    is_current_version: tokens that were drawn with the same weights that
      `trainer_logprobs` were computed with. Over these tokens the divergence
      measures the numerical mismatch between engine and trainer, because the
      policy has not changed.

  Returns:
    Over loss_mask behavior_kl_sum, which is of k3, and those of k1 and k2. Over
    those of its tokens that are of the current version, mismatch_kl_sum and
    mismatch_count.
  """
  kl = k3(behavior_logprobs, trainer_logprobs)
  is_current = loss_mask & is_current_version
  return {
    "behavior_kl_sum": masked_sum(kl, loss_mask),
    "behavior_k1_sum": masked_sum(
      k1(behavior_logprobs, trainer_logprobs), loss_mask
    ),
    "behavior_k2_sum": masked_sum(
      k2(behavior_logprobs, trainer_logprobs), loss_mask
    ),
    "mismatch_kl_sum": masked_sum(kl, is_current),
    "mismatch_count": is_current.sum(dtype=jnp.float32),
  }
