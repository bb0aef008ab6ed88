"""Advantages: how a trajectory compares with others, without a critic."""

from collections.abc import Mapping, Sequence

from jaxtyping import Bool, Float, Int
import numpy as np

from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections

# Standard deviations are divided by after this was added.
_EPSILON = 1e-6


def shaped(
  rewards: Float[np.ndarray, "*rewards"],
  *,
  bias: float,
  scale: float,
  clip: float,
) -> Float[np.ndarray, "*rewards"]:
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
    group_ids: which group each trajectory belongs to. Groups may differ in
      size: one that lost a trajectory is normalised over those that are left.
    num_groups: ids run from 0 to num_groups - 1; some may be absent.

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
  # The mean of equal numbers is exact if they are 0.
  lowest = np.full(num_groups, np.inf)
  np.minimum.at(lowest, group_ids, rewards)
  above = rewards - lowest[group_ids]
  centred = above - group_mean(above)[group_ids]
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


def segment_advantages(
  rewards: Float[np.ndarray, "trajectories"],
  token_scores: Sequence[Mapping[int, float]],
  loss_masks: Sequence[Bool[np.ndarray, "_"]],
  group_ids: Int[np.ndarray, "trajectories"],
  num_groups: int,
  *,
  scale: sections.AdvantageScale,
) -> list[Float[np.ndarray, "_"]]:
  r"""Return the advantage of each token, with a baseline for each segment.

  A completion of an episode, which is loss tokens without others between them,
  is a segment. It is several if tokens in it have scores: a segment ends after
  each of these. Segment k of trajectory i has the return of what comes from its
  first token on, and is compared with the same segment of the same completion
  of the others of its group:

    R_ik = r_i + sum of the scores of tokens in the segments k, k + 1, ...
    A_ik = (R_ik - mean_j R_jk) / (s_ik + 1e-6)

  where j runs over the trajectories of the group that have this segment. With
  one segment and no scores of tokens this is the baseline "group" of
  `relative_advantages`. GTPO (arXiv:2511.14846) compares the returns of turns,
  which it discounts; they are not discounted here. With scores at the ends of
  steps this is like process supervision with GRPO, arXiv:2402.03300, section
  4.1.3, which normalises scores before it sums them.

  Args:
    rewards: one per trajectory, for its end.
    token_scores: of each trajectory, by position among its loss tokens. A score
      of 0 ends a segment too.
    scale: STD is the deviation of the R_jk, BATCH_STD that of R_ik - mean_j
      R_jk over all segments of the batch.

  Returns:
    For each trajectory an array with one number per token, 0 where nothing is
    learned.
  """
  scored = [
    _scored_tokens(mask, scores)
    for mask, scores in zip(loss_masks, token_scores, strict=True)
  ]
  segments = [
    _segments(mask, ends)
    for mask, (_, ends) in zip(loss_masks, scored, strict=True)
  ]
  numbers = [number for number, _ in segments]
  counts = [len(places) for _, places in segments]
  owners = np.repeat(np.arange(len(rewards)), counts)
  returns = np.concatenate(
    [
      np.zeros(0),
      *(
        reward
        + np.cumsum(np.bincount(number[mask], scores[mask], count)[::-1])[::-1]
        for reward, number, mask, (scores, _), count in zip(
          rewards, numbers, loss_masks, scored, counts, strict=True
        )
      ),
    ]
  )
  # The same part of the same turn of a group is a group of its own.
  places = np.concatenate(
    [np.zeros((0, 2), np.int64), *(x for _, x in segments)]
  )
  keys, mates = np.unique(
    np.column_stack([group_ids[owners], places]), axis=0, return_inverse=True
  )
  compared = relative_advantages(
    returns, mates.reshape(-1), len(keys), baseline="group", scale=scale
  )
  ends = np.cumsum(counts)
  return [
    np.where(mask, compared[end - count : end][number], 0)
    if count
    else np.zeros(len(mask), np.float32)
    for mask, number, end, count in zip(
      loss_masks, numbers, ends, counts, strict=True
    )
  ]


def budget_advantages(
  scores: Float[np.ndarray, "trajectories budgets"],
  weights: Float[np.ndarray, "budgets"],
  group_ids: Int[np.ndarray, "trajectories"],
  num_groups: int,
) -> Float[np.ndarray, "trajectories budgets"]:
  r"""Return the advantage of each part of a thought between two budgets.

  r_i is the score of the answer after L_i tokens of the thought, and counts for
  the tokens up to L_i. Part j has those after L_{j-1} up to L_j, so that its
  return is what is weighed from there on (REO-RL, arXiv:2506.07104):

    R_j = sum of c_i r_i over i >= j
    A_j = R_j - mean of the others' R_j

  The mean is over all other trajectories of the group, also those that ended
  before: their r_i is the score of their own answer. It is the baseline
  "leave_one_out" of `relative_advantages` for each part. Nothing is divided by
  a deviation: one of each part would undo the weights, and one of the batch
  would count parts that have no token.

  Args:
    scores: r_i, with a column for each budget and a last one for no cut.
    weights: c_i.
  """
  weighted = scores * weights
  returns = np.cumsum(weighted[:, ::-1], axis=1)[:, ::-1]
  num_parts = len(weights)
  mates = group_ids[:, None] * num_parts + np.arange(num_parts)
  return relative_advantages(
    returns.ravel(),
    mates.ravel(),
    num_groups * num_parts,
    baseline="leave_one_out",
    scale=sections.AdvantageScale.NONE,
  ).reshape(scores.shape)


def _scored_tokens(
  mask: Bool[np.ndarray, "T"], scores: Mapping[int, float]
) -> tuple[Float[np.ndarray, "T"], Bool[np.ndarray, "T"]]:
  """Return the score of each token, or 0, and which tokens have one."""
  values, has_score = np.zeros(len(mask)), np.zeros(len(mask), bool)
  places = np.flatnonzero(mask)[[*scores]]
  values[places], has_score[places] = [*scores.values()], True
  return values, has_score


def _segments(
  mask: Bool[np.ndarray, "T"], ends: Bool[np.ndarray, "T"]
) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "K 2"]]:
  """Return where the segments of a trajectory are.

  Args:
    ends: True at tokens after which another segment begins.

  Returns:
    The number of each loss token's segment, from 0; -1 elsewhere. And of each
    segment the number of its turn, and of itself within the turn.
  """
  new_turn = mask & ~np.append(False, mask[:-1])
  begins = new_turn | (mask & np.append(False, ends[:-1])[: len(mask)])
  numbers = np.cumsum(begins) - 1
  turns = (np.cumsum(new_turn) - 1)[begins]
  parts = np.arange(len(turns)) - numbers[new_turn][turns]
  return np.where(mask, numbers, -1), np.column_stack([turns, parts])
