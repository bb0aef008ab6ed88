"""The critic's equations: its targets' normalisation, and its loss.

A critic predicts normalised returns, whatever the scale of the rewards. Values
in the unit of the rewards are computed from its predictions by the running
statistics of the returns.
"""

from collections.abc import Mapping

from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, ScalarLike

# The running statistics: exponential averages of the returns and of their
# squares, and the sum of the weights of these averages, which debiases them.
Statistics = Mapping[str, Float[Array, ""]]
STATISTICS = "mean", "square", "weight"
# Smallest variance that is divided by, as in the authors' code.
_MIN_VARIANCE = 1e-2


def before_tokens(after: Float[Array, "*rows T"]) -> Float[Array, "*rows T"]:
  """Return for each token the value of the state that it was drawn in.

  Besides `likelihood`, this is the only place where positions are shifted by
  one. The result means nothing for the first token of a trajectory, which the
  policy never writes.
  """
  return jnp.roll(after, 1, axis=-1)


def updated_statistics(
  statistics: Statistics,
  returns: Float[Array, "*shape"],
  loss_mask: Bool[Array, "*shape"],
  *,
  decay: float,
) -> dict[str, Float[Array, ""]]:
  r"""Return the statistics with the returns of one more train step.

  m' = decay m + (1 - decay) mean(R)      likewise of R^2 and of 1

  This is the normalisation of MAPPO, arXiv:2103.01955, which keeps PopArt's
  statistics (arXiv:1809.04474) and leaves the weights of the head as they are.

  Args:
    loss_mask: tokens that count. If there are none, or if their returns are
      not finite, nothing changes.
  """
  count = loss_mask.sum(dtype=jnp.float32)
  returns = jnp.where(loss_mask, returns, 0)
  of_step = {
    "mean": returns.sum() / jnp.maximum(count, 1),
    "square": (returns**2).sum() / jnp.maximum(count, 1),
    "weight": jnp.float32(1),
  }
  is_good = (count > 0) & jnp.isfinite(of_step["square"])
  return {
    name: jnp.where(
      is_good,
      decay * statistics[name] + (1 - decay) * of_step[name],
      statistics[name],
    )
    for name in STATISTICS
  }


def moments(
  statistics: Statistics,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  r"""Return the debiased mean and standard deviation of the returns.

  mean = m / w,   std = sqrt(max(q / w - mean^2, 0.01))

  m, q and w are the running averages of R, R^2 and 1. Before the first returns,
  the result is 0 and 1.
  """
  has_seen = statistics["weight"] > 0
  weight = jnp.where(has_seen, statistics["weight"], 1)
  mean = statistics["mean"] / weight
  variance = statistics["square"] / weight - mean**2
  deviation = jnp.sqrt(jnp.maximum(variance, _MIN_VARIANCE))
  return mean, jnp.where(has_seen, deviation, 1)


def normalized(
  values: Float[Array, "*shape"], statistics: Statistics
) -> Float[Array, "*shape"]:
  """Return (values - mean) / std, in the unit of a critic's predictions."""
  mean, deviation = moments(statistics)
  return (values - mean) / deviation


def denormalized(
  predictions: Float[Array, "*shape"], statistics: Statistics
) -> Float[Array, "*shape"]:
  """Return predictions in the unit of the rewards; undoes `normalized`."""
  mean, deviation = moments(statistics)
  return mean + deviation * predictions


def value_loss(
  predictions: Float[Array, "*shape"],
  predictions_before: Float[Array, "*shape"],
  targets: Float[Array, "*shape"],
  loss_mask: Bool[Array, "*shape"],
  *,
  clip: ScalarLike,
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
  r"""Return PPO's clipped loss of each value, and which are clipped.

  L_t = max((v - R)^2, (v_clip - R)^2) / 2
  v_clip = v_before + min(max(v - v_before, -clip), clip)

  This is the loss of OpenAI's PPO2 (its authors' code; the paper,
  arXiv:1707.06347 eq. 9, has the square alone).

  Args:
    loss_mask: tokens that count. The results are 0 and False elsewhere, where
      the other arrays may hold NaN.
    clip: how far a prediction may gain by moving within a train step; 0 sets
      no bound.
  """
  predictions = jnp.where(loss_mask, predictions, 0)
  before = lax.stop_gradient(jnp.where(loss_mask, predictions_before, 0))
  targets = lax.stop_gradient(jnp.where(loss_mask, targets, 0))
  error = (predictions - targets) ** 2
  if clip == 0:
    return error / 2, jnp.zeros_like(loss_mask)
  near = before + jnp.clip(predictions - before, -jnp.asarray(clip), clip)
  clipped_error = (near - targets) ** 2
  return jnp.maximum(error, clipped_error) / 2, clipped_error > error
