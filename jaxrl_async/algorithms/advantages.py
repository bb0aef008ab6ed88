"""Advantages: how a trajectory compares with the others of its prompt."""

from jaxtyping import Float, Int
import numpy as np

from jaxrl_async.config import sections


def group_relative_advantages(
  rewards: Float[np.ndarray, "trajectories"],
  group_ids: Int[np.ndarray, "trajectories"],
  num_groups: int,
  *,
  scale: sections.AdvantageScale,
) -> Float[np.ndarray, "trajectories"]:
  r"""Return each reward minus its group's mean, optionally over its deviation.

  A_i = (r_i - mean(r_g)) / (std(r_g) + 1e-6)   GRPO, arXiv:2402.03300
  with scale "none" the division is left out    Dr. GRPO, arXiv:2503.20783

  The deviation is that of the population, so a group of one trajectory has
  advantage 0. The computation is in float64 and the result is float32.

  Args:
    rewards: one per trajectory.
    group_ids: which group each trajectory belongs to. Groups may differ in
      size: one that lost a trajectory is normalised over those that are left.
    num_groups: ids run from 0 to num_groups - 1; some may be absent.
    scale: what the centred rewards are divided by.

  Raises:
    ValueError: a reward is not finite, or an id is out of range.
  """
  if not np.isfinite(rewards).all():
    raise ValueError("rewards must be finite; a failed score is not a reward")
  if (
    len(group_ids) and not 0 <= group_ids.min() <= group_ids.max() < num_groups
  ):
    raise ValueError(f"group_ids must lie in [0, num_groups = {num_groups})")

  def group_mean(values: np.ndarray) -> np.ndarray:
    return np.bincount(group_ids, values, num_groups) / sizes

  sizes = np.maximum(np.bincount(group_ids, minlength=num_groups), 1)
  centred = rewards - group_mean(rewards)[group_ids]
  if scale is sections.AdvantageScale.STD:
    centred /= np.sqrt(group_mean(centred**2))[group_ids] + 1e-6
  return centred.astype(np.float32)
