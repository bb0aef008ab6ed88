"""The score of what an episode gave for its turns."""

from collections.abc import Mapping
import itertools
from typing import Any

from jaxrl_async.types import Completion, Reward


def episode(item: Mapping[str, Any], completion: Completion) -> Reward:
  """Score the sum of the rewards that the episode gave.

  The reward of each turn is also the score of the last token that the policy
  wrote in it, for the advantages gae and segment. The parts that the episode
  gave are those of the reward.
  """
  del item
  turns = completion.turns
  ends = itertools.accumulate(turn.num_tokens for turn in turns)
  scores: dict[int, float] = {}
  for turn, end in zip(turns, ends, strict=True):
    if turn.reward and turn.num_tokens:
      scores[end - 1] = turn.reward
  return Reward(
    score=float(sum(turn.reward for turn in turns)),
    parts=completion.parts,
    token_scores=scores,
  )
