"""Policy losses as functions of token logprobs.

Everything is float32. An objective is a number for each token, which the update
makes larger. `aggregated` makes one number of the objectives of a microbatch:
a sum that is divided by a count of the whole minibatch. The losses and
gradients of the microbatches of a minibatch therefore add up to those of the
minibatch.

The ratio of an objective is r = pi_theta / pi_anchor. The anchor is the centre
of the trust region, which is the proximal policy unless the loss is coupled
PPO's. Gradient flows to the logprobs of pi_theta only. `loss_mask` is True for
the tokens that the policy wrote, and each of them has an advantage.

Positions where `loss_mask` is False do not change a single bit of a loss or of
its gradient, even if they hold NaN. Two rules ensure this:

- Differences of logprobs are masked before `exp`. Masking the result alone
  would keep the loss finite but not its gradient: the backward pass multiplies
  the derivative of `exp`, which may be NaN or infinite, by the zero of the
  mask, and 0 * NaN is NaN.
- Masked positions are replaced with `where`, never multiplied by 0.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from jaxrl_async.algorithms import divergences
from jaxrl_async.config import sections

# The objective of each token, which is 0 outside the mask, and a mask of the
# tokens whose ratio was clipped.
Objective = tuple[Float[Array, "B T"], Bool[Array, "B T"]]
# Returns for each token the sum over the loss tokens of its trajectory.
SequenceSum = Callable[[Float[Array, "B T"]], Float[Array, "B T"]]


def sequence_mean(
  values: Float[Array, "B T"], sequence_sum: SequenceSum
) -> Float[Array, "B T"]:
  """Return for each token the mean over the loss tokens of its trajectory."""
  counts = sequence_sum(jnp.ones_like(values))
  return sequence_sum(values) / jnp.maximum(counts, 1)


def _masked(
  logprobs: Float[Array, "B T"],
  anchor_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Return log-ratios and advantages, both 0 outside the mask.

  A masked token then has ratio 1 and advantage 0, so its objective and gradient
  are exactly 0.
  """
  anchor_logprobs = lax.stop_gradient(anchor_logprobs)
  log_ratio = jnp.where(loss_mask, logprobs - anchor_logprobs, 0)
  return log_ratio, jnp.where(loss_mask, lax.stop_gradient(advantages), 0)


def _clipped_objective(
  ratio: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  clip_low: ScalarLike,
  clip_high: ScalarLike,
) -> Objective:
  """Return min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)."""
  unclipped = ratio * advantages
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
  # The minimum is the pessimistic bound of PPO: it removes the incentive to
  # move the ratio further in the direction that the advantage favours, but
  # keeps the gradient of a token whose ratio has moved in the other direction.
  return jnp.minimum(unclipped, clipped), clipped < unclipped


def ppo_objective(
  logprobs: Float[Array, "B T"],
  anchor_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  clip_low: ScalarLike,
  clip_high: ScalarLike,
  dual_clip: ScalarLike = 0.0,
) -> Objective:
  r"""Return PPO's clipped objective of each token, arXiv:1707.06347 eq. 7.

  O = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
  r = pi_theta / pi_anchor

  With dual_clip = c > 0, where A < 0 (arXiv:1912.09729, eq. 5):

  max(O, c A)
  """
  log_ratio, advantages = _masked(
    logprobs, anchor_logprobs, advantages, loss_mask
  )
  objective, is_clipped = _clipped_objective(
    jnp.exp(log_ratio), advantages, clip_low, clip_high
  )
  if dual_clip != 0:
    bound = dual_clip * advantages
    is_below = (advantages < 0) & (objective < bound)
    objective = jnp.where(is_below, bound, objective)
    is_clipped |= is_below
  return objective, is_clipped


def gspo_objective(
  logprobs: Float[Array, "B T"],
  anchor_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  clip_low: ScalarLike,
  clip_high: ScalarLike,
  sequence_sum: SequenceSum,
) -> Objective:
  r"""Return GSPO's objective of each token, arXiv:2507.18071 eq. 5, 7 and 13.

  O   = min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)
  s   = exp(mean over the trajectory of log(pi_theta / pi_anchor))

  In the form of eq. 13, which the paper calls GSPO-token, the gradient of s
  reaches each token through its own logprob:

  s_t = sg(s) pi_theta(t) / sg(pi_theta(t))

  If all tokens of a trajectory have the same advantage and weight, the gradient
  is that of eq. 5. Otherwise each token has the gradient of its own advantage.
  No gradient flows through the sum over the trajectory, which devices may
  share.
  """
  log_ratio, advantages = _masked(
    logprobs, anchor_logprobs, advantages, loss_mask
  )
  constant = lax.stop_gradient(log_ratio)
  # The difference is exactly 0, and has the gradient of the token's logprob.
  ratio = jnp.exp(
    sequence_mean(constant, sequence_sum) + (log_ratio - constant)
  )
  return _clipped_objective(ratio, advantages, clip_low, clip_high)


def cispo_objective(
  logprobs: Float[Array, "B T"],
  anchor_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  clip_low: ScalarLike,
  clip_high: ScalarLike,
) -> Objective:
  r"""Return CISPO's objective of each token, arXiv:2506.13585 eq. 4 and 5.

  O = sg(clip(r, 1 - clip_low, 1 + clip_high)) A log(pi_theta)

  Every token keeps a gradient; the clip bounds its weight.

  Args:
    clip_low: r is clipped at 1 - clip_low from below. The paper sets no lower
      bound, which is 1.
  """
  log_ratio, advantages = _masked(
    logprobs, anchor_logprobs, advantages, loss_mask
  )
  ratio = jnp.exp(lax.stop_gradient(log_ratio))
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  objective = clipped * advantages * jnp.where(loss_mask, logprobs, 0)
  return objective, clipped != ratio


def sapo_objective(
  logprobs: Float[Array, "B T"],
  anchor_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
  *,
  positive: ScalarLike,
  negative: ScalarLike,
) -> Objective:
  r"""Return SAPO's objective of each token, arXiv:2511.20347.

  O   = 4 / tau sigmoid(tau (r - 1)) A
  tau = positive where A > 0, negative elsewhere

  The gate is a clip without edges: at r = 1 its slope is 1, and it falls on
  both sides. No token counts as clipped.
  """
  log_ratio, advantages = _masked(
    logprobs, anchor_logprobs, advantages, loss_mask
  )
  tau = jnp.where(advantages > 0, jnp.float32(positive), jnp.float32(negative))
  gate = 4 / tau * jax.nn.sigmoid(tau * jnp.expm1(log_ratio))
  return gate * advantages, jnp.zeros_like(loss_mask)


def reinforce_objective(
  logprobs: Float[Array, "B T"],
  anchor_logprobs: Float[Array, "B T"],
  advantages: Float[Array, "B T"],
  loss_mask: Bool[Array, "B T"],
) -> Objective:
  r"""Return the objective of REINFORCE, Williams 1992, for each token.

  O = A log(pi_theta)
  """
  del anchor_logprobs
  advantages = jnp.where(loss_mask, lax.stop_gradient(advantages), 0)
  objective = advantages * jnp.where(loss_mask, logprobs, 0)
  return objective, jnp.zeros_like(loss_mask)


def aggregated(
  values: Float[Array, "B T"],
  aggregation: sections.Aggregation,
  *,
  num_loss_tokens: ScalarLike,
  num_trajectories: ScalarLike,
  constant: int,
  sequence_sum: SequenceSum,
) -> Float[Array, ""]:
  r"""Return one microbatch's share of an average over the minibatch.

  token_mean     sum_i sum_t x_it / sum_i n_i        DAPO, arXiv:2503.14476
  sequence_mean  1 / N sum_i 1 / n_i sum_t x_it      GRPO, arXiv:2402.03300
  sequence_sum   1 / N sum_i 1 / C sum_t x_it        Dr. GRPO, arXiv:2503.20783

  Trajectory i has n_i loss tokens, and N trajectories have some.

  Args:
    values: 0 outside the mask.
    num_loss_tokens: of the whole minibatch; 0 makes the result 0.
  """
  if aggregation is sections.Aggregation.TOKEN_MEAN:
    return values.sum() / at_least_one(num_loss_tokens)
  if aggregation is sections.Aggregation.SEQUENCE_SUM:
    return values.sum() / constant / at_least_one(num_trajectories)
  counts = sequence_sum(jnp.ones_like(values))
  means = values / jnp.maximum(counts, 1)
  return means.sum() / at_least_one(num_trajectories)


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
    policy_versions: version of the weights that drew each token, at most
      policy_version. Where it is -1 the result is meaningless.
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
  """Return one microbatch's share of the cross-entropy of the masked tokens."""
  return -divergences.masked_sum(logprobs, loss_mask) / at_least_one(
    num_loss_tokens
  )


def at_least_one(count: ScalarLike) -> Float[Array, ""]:
  """Return a count as float32, with 1 in place of 0 so that it can divide."""
  return jnp.maximum(jnp.asarray(count, jnp.float32), 1)
