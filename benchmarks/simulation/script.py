"""What the policy writes in a simulated run, whoever writes it.

A trajectory is a function of the run, its group and its member: its tokens, in
which turns, and where it is cut off. It does not matter which replica writes
it, how often it was interrupted, or when. So everything that arrives anywhere
can be compared with what it has to be.

A logprob is a function of the position of its token and of the version that
wrote it. So a logprob or a version that has come to another token is found.
"""

from collections.abc import Generator
import dataclasses
import functools
import random

import numpy as np

from jaxrl_async import types
from jaxrl_async.rewards import service as service_lib

END_TOKEN = 1
PROMPT = np.arange(2, 5, dtype=np.int32)
ANSWER = np.arange(5, 7, dtype=np.int32)  # of the environment, between turns
_FIRST_TOKEN, _NUM_TOKENS = 8, 40


class Failure(RuntimeError):
  """An environment that fails in this run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
  """A trajectory that is whole.

  Attributes:
    tokens: all of them, with those of the prompt.
    is_written: which of them the policy writes.
    turn_ends: the lengths at which a turn ends.
    finish_reason: why it ends.
  """

  tokens: np.ndarray
  is_written: np.ndarray
  turn_ends: tuple[int, ...]
  finish_reason: types.FinishReason


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
  """What every trajectory of a run becomes.

  Attributes:
    seed: of the run.
    limit: the most tokens of a trajectory, at which it is cut off.
    turns_frac: share of the groups whose episodes have two turns.
    raise_frac: share of the groups one of whose episodes fails.
    fail_frac: share of the groups whose reward fails, and in the others, of
      the members after the second.
    filter_frac: share of the groups with equal rewards.
  """

  seed: int
  limit: int
  turns_frac: float
  raise_frac: float
  fail_frac: float
  filter_frac: float

  def drawn(self, what: str, *numbers: int) -> random.Random:
    return random.Random(f"{self.seed} {what} {numbers}")

  def fate(self, group: int) -> types.Fate:
    """Return how a group ends."""
    if self.drawn("raise", group).random() < self.raise_frac:
      return types.Fate.FAILED
    drawn = self.drawn("reward", group).random()
    if drawn < self.fail_frac:
      return types.Fate.FAILED
    if drawn < self.fail_frac + self.filter_frac:
      return types.Fate.FILTERED
    return types.Fate.TRAINED

  def episode(
    self, prompt: types.Prompt
  ) -> Generator[np.ndarray, np.ndarray, None]:
    """Yield the turns of a group; see `rollout.episode`."""
    group = prompt.item["number"]
    yield PROMPT
    if self.raises(group):
      raise Failure("a fault of the simulation")
    if self._num_turns(group) == 2:
      yield ANSWER

  def raises(self, group: int) -> bool:
    """Return whether the episodes of a group fail after their first turn."""
    return self.drawn("raise", group).random() < self.raise_frac

  def _num_turns(self, group: int) -> int:
    return 1 + (self.drawn("turns", group).random() < self.turns_frac)

  def expected(self, group: int, member: int) -> Expected:
    """Return what a trajectory becomes."""
    return _expected(self, group, member)

  def rewards(self, group: int, num_members: int) -> service_lib.Outcome:
    """Return the rewards of a group, some of whose members may have none."""
    fate = self.fate(group)
    failure = service_lib.RewardFailure("error: it is simulated")
    if fate is types.Fate.FAILED:
      return failure
    # Two are left, which decide whether the group is filtered.
    return [
      failure
      if i > 1 and self.drawn("lost", group, i).random() < self.fail_frac
      else types.Reward(score=float(i) if fate is types.Fate.TRAINED else 1.0)
      for i in range(num_members)
    ]

  def difference(self, group: types.RolloutGroup) -> str | None:
    """Return what is wrong with a group that is trained; None if nothing is."""
    if group.prompt.item["number"] != group.index:
      return f"it has the question {group.prompt.item['number']}"
    found = {t.member: t.reward for t in group.trajectories}
    found |= {x.member: x.reason for x in group.dropped}
    rewards = self.rewards(group.index, len(found))
    assert isinstance(rewards, list)
    if [found.get(i) for i in range(len(found))] != [
      x if isinstance(x, types.Reward) else x.reason for x in rewards
    ]:
      return f"rewards {found}"
    for trajectory in group.trajectories:
      expected = self.expected(group.index, trajectory.member)
      if not _is_as(trajectory, expected):
        return f"{trajectory} instead of {expected}"
    return None


def _is_as(trajectory: types.Trajectory, expected: Expected) -> bool:
  if not (
    np.array_equal(trajectory.tokens, expected.tokens)
    and np.array_equal(trajectory.loss_mask, expected.is_written)
    and trajectory.finish_reason is expected.finish_reason
  ):
    return False
  places = np.flatnonzero(expected.is_written)
  versions = trajectory.policy_versions[places]
  start = 0
  for _, count in trajectory.writers:
    # Another replica may be behind the one before it.
    if (np.diff(versions[start : start + count]) < 0).any():
      return False
    start += count
  return start == len(places) and np.array_equal(
    trajectory.behavior_logprobs[places], logprobs(places, versions)
  )


def logprobs(places: np.ndarray, versions: np.ndarray | int) -> np.ndarray:
  """Return the logprobs of tokens at these positions, exactly, by version."""
  return (-1.0 - versions - places / 64).astype(np.float32)


@functools.lru_cache(1024)
def _expected(script: Script, group: int, member: int) -> Expected:
  rng = script.drawn("length", group, member)
  tokens, is_written = PROMPT.tolist(), [False] * len(PROMPT)
  ends: list[int] = []
  reason = types.FinishReason.EOS
  for turn in range(script._num_turns(group)):
    if turn:
      if len(tokens) + len(ANSWER) >= script.limit:
        reason = types.FinishReason.LENGTH
        break
      tokens += ANSWER.tolist()
      is_written += [False] * len(ANSWER)
    # The minimum of two numbers: few are long.
    count = 1 + min(rng.randrange(script.limit), rng.randrange(script.limit))
    first = group * 31 + member * 17 + len(tokens) * 7
    written = [
      _FIRST_TOKEN + (first + 7 * i) % _NUM_TOKENS for i in range(count)
    ]
    written[-1] = END_TOKEN
    written = written[: script.limit - len(tokens)]
    tokens += written
    is_written += [True] * len(written)
    ends.append(len(tokens))
    if tokens[-1] != END_TOKEN:
      reason = types.FinishReason.LENGTH
  return Expected(
    tokens=np.array(tokens, np.int32),
    is_written=np.array(is_written),
    turn_ends=tuple(ends),
    finish_reason=reason,
  )
