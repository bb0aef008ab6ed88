"""Corrections for tokens that another policy drew, beside any loss.

A weight multiplies the objective of its token, and no gradient flows through
it. A token that is left out has the weight 0. It still counts where losses are
divided by numbers of tokens, so that leaving out half of them halves the
gradient.

Nothing outside `loss_mask` has an influence, even if it is NaN.
"""

from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike

from jaxrl_async.algorithms import losses
from jaxrl_async.config import sections

# Of the largest finite float32.
_LARGEST_BITS = 0x7F7FFFFF


def behavior_weights(
  proximal_logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  level: sections.BehaviorWeightLevel,
  floor: ScalarLike,
  cap: ScalarLike,
  cap_mode: sections.BehaviorWeightCapMode,
  sequence_sum: losses.SequenceSum,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
  r"""Return weights that correct for tokens being drawn by an older policy.

  token             w_t = pi_prox(t) / pi_behav(t)     arXiv:2505.24298, eq. 5
  sequence_mean     w_t = exp(1 / n sum_u log w_u)     over the trajectory of t
  sequence_product  w_t = exp(sum_u log w_u)
  none              w_t = 1

  mask              w outside of [floor, cap] becomes 0
  truncate          it becomes the nearer bound

  With mask and both bounds, the weights of tokens are those of IcePop,
  arXiv:2510.18855.

  Returns:
    The weights, which are 0 outside loss_mask, and a mask of the tokens whose
    weight was out of bounds.
  """
  if level is sections.BehaviorWeightLevel.NONE:
    return loss_mask.astype(jnp.float32), jnp.zeros_like(loss_mask)
  # Masked before `exp`, as in `losses`.
  log_ratio = lax.stop_gradient(
    jnp.where(loss_mask, proximal_logprobs - behavior_logprobs, 0)
  )
  if level is sections.BehaviorWeightLevel.SEQUENCE_MEAN:
    log_ratio = losses.sequence_mean(log_ratio, sequence_sum)
  elif level is sections.BehaviorWeightLevel.SEQUENCE_PRODUCT:
    log_ratio = sequence_sum(log_ratio)
  weights = jnp.exp(log_ratio)
  masks = cap_mode is sections.BehaviorWeightCapMode.MASK
  is_above, is_below = weights > cap, weights < floor
  weights = jnp.where(is_above, 0.0 if masks else cap, weights)
  weights = jnp.where(is_below, 0.0 if masks else floor, weights)
  is_outside = (is_above | is_below) & loss_mask
  return jnp.where(loss_mask, weights, 0), is_outside


def within_second_moment(
  proximal_logprobs: Float[Array, "*minibatch"],
  behavior_logprobs: Float[Array, "*minibatch"],
  advantages: Float[Array, "*minibatch"],
  loss_mask: Bool[Array, "*minibatch"],
  *,
  bound: ScalarLike,
) -> Bool[Array, "*minibatch"]:
  r"""Return which tokens M2PO learns from, arXiv:2510.01161.

  H  = {t : A_t log w_t > 0},   w = pi_prox / pi_behav
  M2 = mean over H of (log w_t)^2

  The tokens of H are those that a clipped ratio could stop: the policy has
  moved in the direction of their advantage. Those of H with the largest
  squares are left out until M2 of the rest is at most the bound. Tokens with
  the same square are left out together. The others stay, whatever their ratio.

  The paper takes the policy of each update in place of pi_prox. This one is
  known before the first update, so that the choice is made once in a train
  step, for each minibatch as a whole.
  """
  log_ratio = jnp.where(loss_mask, proximal_logprobs - behavior_logprobs, 0)
  advantages = jnp.where(loss_mask, advantages, 0)
  is_outward = jnp.sign(advantages) * log_ratio > 0
  squares = jnp.where(is_outward, log_ratio**2, 0)

  def refine(i: Array, largest: Array) -> Array:
    # The bits of positive floats are in the order of the floats.
    bits = jnp.minimum(largest | (1 << (30 - i)), _LARGEST_BITS)
    is_in = is_outward & (
      squares <= lax.bitcast_convert_type(bits, jnp.float32)
    )
    count = jnp.maximum(jnp.sum(is_in, dtype=jnp.float32), 1)
    mean = jnp.where(is_in, squares, 0).sum() / count
    return jnp.where(mean <= bound, bits, largest)

  # The largest square that stays, one bit after the other: a sort would bring
  # the squares of all devices together.
  largest = lax.fori_loop(0, 31, refine, jnp.int32(0))
  largest = lax.bitcast_convert_type(largest, jnp.float32)
  return loss_mask & (~is_outward | (squares <= largest))


def within_sequence_kl(
  logprobs: Float[Array, "B T"],
  behavior_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  bound: ScalarLike,
  sequence_sum: losses.SequenceSum,
) -> Bool[Array, "B T"]:
  r"""Return which tokens off-policy sequence masking keeps, arXiv:2512.02556.

  A token is left out where A_t < 0 and the mean over its trajectory of
  log(pi_behav / pi_theta) > bound.
  """
  log_ratio = jnp.where(
    loss_mask, behavior_logprobs - lax.stop_gradient(logprobs), 0
  )
  is_far = losses.sequence_mean(log_ratio, sequence_sum) > bound
  return loss_mask & ~(is_far & (advantages < 0))
