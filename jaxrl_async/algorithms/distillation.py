"""What a policy learns from a teacher's logprobs of its own tokens."""

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def advantages(
  teacher_logprobs: Float[Array, "*leading T"],
  behavior_logprobs: Float[Array, "*leading T"],
  loss_mask: Bool[Array, "*leading T"],
  *,
  coef: float,
) -> Float[Array, "*leading T"]:
  r"""Return the advantage of each token under the reverse divergence.

  A_t = coef (log pi_teacher(t) - log pi_behav(t))

  The mean of -A_t / coef over tokens that the policy drew is an estimate of the
  reverse divergence KL(pi || pi_teacher) of each token, which on-policy
  distillation minimises: arXiv:2306.13649 eq. 4 with the reverse divergence
  and data of the student alone. The advantage of a token counts its own term
  and not those of later tokens, as in
  https://thinkingmachines.ai/blog/on-policy-distillation, which is a discount
  of 0.

  Args:
    teacher_logprobs: of the policy's tokens, under the teacher.
    behavior_logprobs: of the same tokens, under the policy that drew them.
    loss_mask: tokens that the policy drew. The others get 0.
    coef: the coefficient.
  """
  difference = lax.stop_gradient(teacher_logprobs - behavior_logprobs)
  return coef * jnp.where(loss_mask, difference, 0)
