"""Trajectories as episodes: the reward of each token, and how they ended."""

from collections.abc import Callable, Sequence

from jaxtyping import Float
import numpy as np

from jaxrl_async import types
from jaxrl_async.training import packing

# The fields of a batch that `fields` makes.
REWARDS = "rewards"
CUT_OFF = "cut_off"


def fields(
  trajectories: Sequence[types.Trajectory],
  *,
  shaped: Callable[[Float[np.ndarray, "_"]], Float[np.ndarray, "_"]],
  token_scale: float,
) -> dict[str, list[Float[np.ndarray, "_"]]]:
  """Return the fields that make episodes of trajectories, for `packing.pack`.

  `REWARDS` has the score of a trajectory at the last token that the policy
  generated, and adds the scores of tokens at their positions. If such a token
  is not learned from, its rewards are at the last token before it that is. What
  comes before the first of these is left out, as nothing has led to it.
  `CUT_OFF` is 1 for the tokens of a trajectory that ended at a limit of tokens,
  and else 0.

  Args:
    shaped: makes of the scores of all trajectories what is learned from.
    token_scale: is multiplied by the scores of tokens.
  """
  scores = shaped(np.array([t.score for t in trajectories], np.float64))
  token_scores = packing.reward_fields(trajectories).get(packing.TOKEN_SCORES)
  rewards, cut_off = [], []
  for i, trajectory in enumerate(trajectories):
    size = len(trajectory.tokens)
    values = np.zeros(size, np.float32)
    if token_scores is not None:
      values += np.float32(token_scale) * token_scores[i]
    places = np.flatnonzero(trajectory.loss_mask)
    values[places[-1:]] += scores[i]
    rewards.append(_at_learned(values, trajectory))
    is_cut_off = trajectory.finish_reason is types.FinishReason.LENGTH
    cut_off.append(np.full(size, is_cut_off, np.float32))
  return {REWARDS: rewards, CUT_OFF: cut_off}


def _at_learned(
  rewards: Float[np.ndarray, "T"], trajectory: types.Trajectory
) -> Float[np.ndarray, "T"]:
  """Return rewards that are at tokens that are learned from; see `fields`."""
  if not trajectory.steered:
    return rewards
  learned = np.flatnonzero(trajectory.learned_mask)
  given = np.flatnonzero(rewards)
  before = np.searchsorted(learned, given, side="right") - 1
  moved = np.zeros_like(rewards)
  has_led = before >= 0
  np.add.at(moved, learned[before[has_led]], rewards[given[has_led]])
  return moved
