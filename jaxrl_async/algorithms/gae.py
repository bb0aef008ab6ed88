"""Advantages of tokens: what follows a token, rewards and values included.

The steps of an episode are the tokens that the policy wrote. Tokens between two
turns, which an environment wrote, are not steps: the state before the next step
contains them. Everything is float32.
"""

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

# Added to a deviation that is divided by, as in `advantages`.
_EPSILON = 1e-6


def generalized_advantages(
  rewards: Float[Array, "*rows T"],
  values: Float[Array, "*rows T"],
  final_values: Float[Array, "*rows T"],
  loss_mask: Bool[Array, "*rows T"],
  segment_ids: Int[Array, "*rows T"],
  *,
  gamma: ScalarLike,
  gae_lambda: ScalarLike,
) -> Float[Array, "*rows T"]:
  r"""Return generalised advantages, arXiv:1506.02438 eq. 16.

  delta_t = r_t + gamma V(s_t+1) - V(s_t)
  A_t     = delta_t + gamma lambda A_t+1

  t + 1 is the next token of the same trajectory that the policy wrote. After
  the last one, A is 0 and V(s_t+1) is `final_values[t]`. With all values 0 and
  gamma = lambda = 1, A_t is the sum of the rewards from t on.

  The recurrence is computed in log2(T) parallel steps. It starts anew at each
  trajectory, so that rows may hold several of them.

  Args:
    rewards: of each token. Those outside of `loss_mask` do not count.
    final_values: of the state after a trajectory's last token. It is 0 if the
      episode ended there, and a critic's value if it was cut off.
    loss_mask: tokens that the policy wrote. The result is 0 elsewhere, where
      the other arrays may hold NaN.
    segment_ids: different for trajectories next to each other in a row.
  """
  follower, is_last = _followers(loss_mask, segment_ids)
  next_values = jnp.where(
    is_last, final_values, jnp.take_along_axis(values, follower, axis=-1)
  )
  deltas = jnp.where(loss_mask, rewards + gamma * next_values - values, 0)
  # A token that the policy did not write passes on what follows it.
  decay = jnp.where(loss_mask, jnp.where(is_last, 0, gamma * gae_lambda), 1)

  def compose(
    after: tuple[Array, Array], before: tuple[Array, Array]
  ) -> tuple[Array, Array]:
    return before[0] * after[0], before[1] + before[0] * after[1]

  _, advantages = lax.associative_scan(
    compose, (decay, deltas), reverse=True, axis=decay.ndim - 1
  )
  return jnp.where(loss_mask, advantages, 0)


def _followers(
  loss_mask: Bool[Array, "*rows T"], segment_ids: Int[Array, "*rows T"]
) -> tuple[Int[Array, "*rows T"], Bool[Array, "*rows T"]]:
  """Return the column of the next loss token, and where there is none.

  Only those of the same trajectory count. Where there is none, the column is
  any.
  """
  axis, width = loss_mask.ndim - 1, loss_mask.shape[-1]
  columns = lax.broadcasted_iota(jnp.int32, loss_mask.shape, axis)
  here_or_later = lax.cummin(
    jnp.where(loss_mask, columns, width), axis=axis, reverse=True
  )
  later = jnp.roll(here_or_later, -1, axis=axis)
  later = jnp.where(columns == width - 1, width, later)
  follower = jnp.minimum(later, width - 1)
  same = jnp.take_along_axis(segment_ids, follower, axis=axis) == segment_ids
  return follower, (later == width) | ~same


def whitened(
  advantages: Float[Array, "*shape"], loss_mask: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
  r"""Return (A - mean(A)) / (std(A) + 1e-6) over all loss tokens, else 0.

  It is eq. 10 of REINFORCE++, arXiv:2501.03262, and what implementations of PPO
  do. The deviation is that of the population.
  """
  count = jnp.maximum(loss_mask.sum(dtype=jnp.float32), 1)
  mean = jnp.where(loss_mask, advantages, 0).sum() / count
  centred = jnp.where(loss_mask, advantages - mean, 0)
  deviation = jnp.sqrt((centred**2).sum() / count)
  return centred / (deviation + _EPSILON)


def kl_rewards(
  behavior_logprobs: Float[Array, "*shape"],
  reference_logprobs: Float[Array, "*shape"],
  loss_mask: Bool[Array, "*shape"],
  *,
  coef: ScalarLike,
  clip: ScalarLike,
) -> Float[Array, "*shape"]:
  r"""Return the reward of each token for staying near a reference.

  r_t = -coef clip(log pi_behav(t) - log pi_ref(t), -clip, clip)

  This is k1 of http://joschu.net/blog/kl-approx.html, in the reward as in
  arXiv:2203.02155. It is an unbiased estimate of the divergence from the
  reference, because the behavior policy has drawn the tokens.

  Args:
    loss_mask: the result is 0 elsewhere, where the logprobs may be NaN.
  """
  estimate = jnp.where(loss_mask, behavior_logprobs - reference_logprobs, 0)
  if clip != 0:
    bound = jnp.asarray(clip, estimate.dtype)
    estimate = jnp.clip(estimate, -bound, bound)
  return -jax.lax.stop_gradient(estimate) * coef
