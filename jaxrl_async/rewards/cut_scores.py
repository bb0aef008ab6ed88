"""Scores of the answers after cuts of a thought, and a member's reward of them.

The rewards of a run see each answer as a completion of its own: the thought up
to the cut, the suffix and the forced answer, all of it as if the policy had
written it. So every term, weight, deadline and retry of `task.rewards` holds
for each answer. A member's reward then has the score of its completion, and
each forced answer's score at the last token of that answer.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from jaxrl_async import types
from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.rewards import scoring
from jaxrl_async.text import tokenizer as tokenizer_lib

THOUGHT_TRUNCATED = f"{types.BUDGET_PARTS}thought_truncated"
COMPLETION_TRUNCATED = f"{types.BUDGET_PARTS}completion_truncated"

Found = types.Reward | scoring.RewardFailure


def part(budget: int) -> str:
  """Return the name of the part with the score at a budget."""
  return f"{types.BUDGET_PARTS}{budget}"


def answers(
  member: types.Trajectory,
  budgets: budgets_lib.Budgets,
  tokenizer: tokenizer_lib.Tokenizer,
) -> list[types.Trajectory]:
  """Return each answer of a member as a trajectory: its own, then the forced.

  Args:
    member: its branches are end to end (`types.whole`). If it was not cut, it
      is the only one.
    budgets: with which it was cut.
    tokenizer: of the policy.
  """
  parts = member.reward_parts()
  if types.THOUGHT_TOKENS not in parts:
    return [member]
  edges = np.flatnonzero(np.diff(member.loss_mask.astype(np.int8))) + 1
  starts = [0, *edges[1::2]]
  found = []
  for start, end in zip(starts, [*starts[1:], len(member.tokens)], strict=True):
    tokens = member.tokens[start:end]
    if start:
      written = int(member.loss_mask[start:end].sum())
      is_full = written >= budgets.max_tokens
    else:
      is_full = parts[COMPLETION_TRUNCATED] > 0
    has_end = int(tokens[-1]) in tokenizer.end_tokens
    found.append(
      types.Trajectory(
        member=member.member,
        tokens=tokens,
        loss_mask=np.arange(len(tokens)) >= edges[0],
        behavior_logprobs=member.behavior_logprobs[start:end],
        policy_versions=member.policy_versions[start:end],
        finish_reason=types.FinishReason.LENGTH
        if is_full and not has_end
        else types.FinishReason.EOS,
      )
    )
  return found


def reward(
  member: types.Trajectory,
  found: Sequence[Found],
  budgets: budgets_lib.Budgets,
) -> Found:
  """Return the reward of a member, from those of `answers`, or its failure."""
  for one in found:
    if isinstance(one, scoring.RewardFailure):
      return one
  own, *forced = [one for one in found if isinstance(one, types.Reward)]
  parts = member.reward_parts()
  if types.THOUGHT_TOKENS not in parts:
    return own
  if any(one.token_scores for one in (own, *forced)):
    return scoring.RewardFailure(
      "error: a reward scores tokens, and the answers after budgets have scores"
      " of their own"
    )
  # The last token of each answer, among those that the policy wrote.
  mask = np.append(member.loss_mask, False)
  places = np.cumsum(mask)[:-1][mask[:-1] & ~mask[1:]] - 1
  scores = [one.score for one in forced]
  of_all = scores + [own.score] * (len(budgets.budgets) - len(forced))
  return dataclasses.replace(
    own,
    parts={
      **own.parts,
      **parts,
      **{part(x): r for x, r in zip(budgets.budgets, of_all, strict=True)},
    },
    token_scores=dict(zip(places[1:].tolist(), scores, strict=True)),
  )


def teach_nothing(
  rewards: Sequence[types.Reward], budgets: Sequence[int]
) -> bool:
  """Return whether a group with these rewards gives nothing to learn.

  That is so if the members have the same scores: of their completions, and of
  their answers after each budget. The answer after 0 tokens of a thought has no
  token before it to teach. Its score counts only if the thought of some member
  is empty, because that member's completion is this answer.

  Args:
    rewards: of the members, as `reward` returns them.
    budgets: where their thoughts were cut, in tokens.
  """
  has_empty = not all(r.parts.get(types.THOUGHT_TOKENS) for r in rewards)
  names = [part(x) for x in budgets if x or has_empty]
  scores = {
    (r.score, *(r.parts.get(name, r.score) for name in names)) for r in rewards
  }
  return len(scores) == 1
