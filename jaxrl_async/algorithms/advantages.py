"""Advantages: how a trajectory compares with others, without a critic."""

from jaxtyping import Float, Int
import numpy as np

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections

# Standard deviations are divided by after this was added.
_EPSILON = 1e-6


def shaped(
  rewards: Float[np.ndarray, "trajectories"],
  *,
  bias: float,
  scale: float,
  clip: float,
) -> Float[np.ndarray, "trajectories"]:
  r"""Return scale (r + bias), clipped at -clip and clip unless clip is 0."""
  rewards = scale * (rewards + bias)
  return np.clip(rewards, -clip, clip) if clip else rewards


def relative_advantages(
  rewards: Float[np.ndarray, "trajectories"],
  group_ids: Int[np.ndarray, "trajectories"],
  num_groups: int,
  *,
  baseline: str,
  scale: sections.AdvantageScale,
) -> Float[np.ndarray, "trajectories"]:
  r"""Return each reward minus a baseline, optionally over a deviation.

  A_i = (r_i - b_i) / (s_i + 1e-6), where b is

  group          mean(r_g)                   GRPO, arXiv:2402.03300
  leave_one_out  mean(r_g without r_i)       RLOO, arXiv:2402.14740
  batch          mean(r)                     REINFORCE++, arXiv:2501.03262

  and s is

  std            std(r_g)                    GRPO
  batch_std      std(r - b) over the batch   REINFORCE++
  none           the division is left out    Dr. GRPO, arXiv:2503.20783

  Deviations are those of the population. A group of one trajectory has the
  advantage 0, unless the baseline is that of the batch. The computation is in
  float64 and the result is float32.

  Args:
    rewards: one per trajectory.
    group_ids: which group each trajectory belongs to. Groups may differ in
      size: one that lost a trajectory is normalised over those that are left.
    num_groups: ids run from 0 to num_groups - 1; some may be absent.
    baseline: one of `algorithm_section.BASELINES`.
    scale: what the rewards minus their baseline are divided by.

  Raises:
    ValueError: a reward is not finite, or an id is out of range.
  """
  if not np.isfinite(rewards).all():
    raise ValueError("rewards must be finite; a failed score is not a reward")
  if (
    len(group_ids) and not 0 <= group_ids.min() <= group_ids.max() < num_groups
  ):
    raise ValueError(f"group_ids must lie in [0, num_groups = {num_groups})")
  if baseline not in algorithm_section.BASELINES:
    raise ValueError(f"there is no baseline {baseline!r}")

  def group_mean(values: np.ndarray) -> np.ndarray:
    return np.bincount(group_ids, values, num_groups) / sizes

  sizes = np.maximum(np.bincount(group_ids, minlength=num_groups), 1)
  centred = rewards - group_mean(rewards)[group_ids]
  deviations = np.sqrt(group_mean(centred**2))[group_ids]
  if baseline == "leave_one_out":
    # r_i - (n mean - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
    centred *= (sizes / np.maximum(sizes - 1, 1))[group_ids]
  elif baseline == "batch":
    centred = rewards - rewards.mean()
  if scale is sections.AdvantageScale.STD:
    centred /= deviations + _EPSILON
  elif scale is sections.AdvantageScale.BATCH_STD:
    centred /= centred.std() + _EPSILON
  return centred.astype(np.float32)
