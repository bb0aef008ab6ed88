"""What a policy learns from a teacher's logprobs of its own tokens."""

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike


def advantages(
  teacher_logprobs: Float[Array, "*leading T"],
  policy_logprobs: Float[Array, "*leading T"],
  loss_mask: Bool[Array, "*leading T"],
  *,
  coef: ScalarLike,
) -> Float[Array, "*leading T"]:
  r"""Return the advantage of each token under the reverse divergence.

  A_t = coef (log pi_teacher(t) - log pi(t))

  The mean of -A_t / coef over tokens that pi drew is an estimate of the reverse
  divergence KL(pi || pi_teacher) of each token, which on-policy distillation
  minimises: arXiv:2306.13649 eq. 4 with the reverse divergence and data of the
  student alone. For tokens of an older policy, a weight of the token corrects
  the mean, but not log pi, which should therefore be of the policy before the
  train step. The advantage of a token contains its own difference, and not
  those of the tokens after it, as in
  https://thinkingmachines.ai/blog/on-policy-distillation, which is a discount
  of 0.
  """
  difference = lax.stop_gradient(teacher_logprobs - policy_logprobs)
  return jnp.where(loss_mask, difference, 0) * coef
