"""The data that rollout and training share: prompts, trajectories, rewards.

All arrays are in host memory (numpy). Position t of every [T] array is about
token t: its id, whether it is learned from, the logprob with which it was
sampled, and the version of the weights that sampled it.

Reward processes import this module, so that it must not import jax.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import enum
import json
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np


class FinishReason(enum.StrEnum):
  """Why a trajectory ended."""

  EOS = "eos"
  STOP = "stop"
  LENGTH = "length"
  ABORTED = "aborted"


class Fate(enum.StrEnum):
  """Why a group left the buffer. The ledger records one line per group."""

  TRAINED = "trained"
  FILTERED = "filtered"
  FAILED = "failed"


class EventKind(enum.StrEnum):
  """What an episode did besides showing tokens to the policy."""

  RESULT = "result"
  ERROR = "error"
  REWARD = "reward"
  PARTS = "parts"


class Event(NamedTuple):
  """A call that an episode made, or a reward that it gave.

  Attributes:
    kind: whether a call returned or failed, or a reward or its parts were
      given.
    turn: of a call, the turns that were written before it; of a reward and its
      parts, the index of the turn that they are for. All branches of a member
      count.
    number: of a call in its episode, from 0 in the order in which the calls
      were begun; of a reward and its parts -1.
    text: what the call returned, the reward or the parts, as JSON; or why the
      call failed, as plain text.
  """

  kind: str
  turn: int
  number: int
  text: str

  @property
  def is_call(self) -> bool:
    """Whether it is a call."""
    return self.number >= 0


@dataclasses.dataclass(kw_only=True, slots=True)
class Prompt:
  """One question of the task, as the policy sees it.

  Attributes:
    prompt_id: "<source>/<split>/<index of the item>", the same in every run.
    tokens: token ids of the filled-in template.
    item: the source's item, which is passed to the scorer. See `data.source`.
  """

  prompt_id: str
  tokens: Int[np.ndarray, "T"]
  item: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
  """A scorer's result for one completion.

  Positions are indices into `Completion.tokens`: they count the tokens that the
  policy generated, over all turns of the trajectory, from 0.

  Attributes:
    score: the score of the whole trajectory; advantages are computed from it.
    parts: named numbers that are recorded but not learned from, such as the
      terms of which the score is the sum.
    token_scores: scores by position, which the advantages gae and segment
      and a loss of your own read. Other positions have the score 0. None if the
      scorer does not score tokens. A scorer of tokens should always return a
      mapping, even an empty one, because batches with and without token scores
      need different compiled programs.
    answer: what was taken for the completion's answer, for whoever reads
      samples. None leaves it to the reward service, which fills in
      `Completion.answer`. The service leaves out the middle of a long answer.
  """

  score: float
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  token_scores: Mapping[int, float] | None = None
  answer: str | None = None


def teach_nothing(
  rewards: Sequence[Reward], *, reads_token_scores: bool
) -> bool:
  """Return whether a group with these rewards gives nothing to learn.

  That is so if all scores are equal, which makes every advantage 0, and no
  score of a token is learned from.

  Args:
    rewards: of the trajectories of the group.
    reads_token_scores: whether the advantages or the loss read the scores of
      tokens.
  """
  if reads_token_scores and any(reward.token_scores for reward in rewards):
    return False
  return len({reward.score for reward in rewards}) == 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
  """One prompt of an episode and the completion that followed, as text.

  Attributes:
    prompt: text of the prompt.
    completion: text of the completion.
    num_tokens: number of tokens of the completion. The position of the last one
      is the sum of `num_tokens` up to and including this turn, minus one.
    reward: the sum of the rewards that the episode gave for it.
  """

  prompt: str
  completion: str
  num_tokens: int
  reward: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
  """The view of a finished trajectory that a scorer gets.

  The texts do not contain special tokens, such as the end of sequence.

  Attributes:
    text: the text that the policy generated, of all turns.
    answer: the part of the text that is the answer according to
      `task.answer_prefix`, or None if there is none. The reward service fills
      it in.
    turns: the turns of the episode, at least one.
    tokens: ids of the tokens that the policy generated, of all turns. To score
      places in the text, a scorer can find their positions with the tokenizer,
      which `text.tokenizer.load` loads.
    finish_reason: why the trajectory ended.
    parts: what the episode gave as the parts of its rewards.
  """

  text: str
  answer: str | None = None
  turns: tuple[Turn, ...]
  tokens: Int[np.ndarray, "C"]
  finish_reason: FinishReason
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


class CacheBuild(NamedTuple):
  """How the cache was made with which a trajectory was continued.

  Attributes:
    length: number of tokens that the trajectory had then.
    num_prefilled: how many of them were cached by prefill. The others went
      through the decode program one by one. With `rollout.kept_tokens`, prefill
      may have found some of them in pages that earlier programs had filled.
    version: version of the weights that cached them.
    decode_step: number of decode steps that the engine had made before the
      first call that used this cache. -1 if there was no such call yet, or if
      an earlier version of this project wrote the record.
  """

  length: int
  num_prefilled: int
  version: int
  decode_step: int = -1


# The arrays of a trajectory, each with one entry for each token.
TOKEN_ARRAYS = "tokens", "loss_mask", "behavior_logprobs", "policy_versions"


@dataclasses.dataclass(kw_only=True, slots=True)
class Trajectory:
  """A prompt and its completion, partial or finished.

  Attributes:
    member: index within the group, 0 <= member < group_size. An episode may
      begin anew (`rollout.episode.Anew`), and its member then has several
      trajectories, its branches. Branch k has k * MEMBERS more.
    tokens: prompt and completion. An episode of several turns adds the prompts
      and completions of later turns.
    loss_mask: True for tokens that the policy generated. They are learned from,
      but for `steered`.
    behavior_logprobs: logprob of each generated token under the distribution
      from which it was sampled; 0 where loss_mask is False.
    policy_versions: version of the weights that sampled each generated token;
      -1 where loss_mask is False.
    finish_reason: why the trajectory ended. None while it is being generated.
    reward: the scorer's result. None until the trajectory has been scored.
    writers: the replicas that generated the tokens, in order, each with the
      number of tokens. The coordinator fills it in.
    steered: positions in `tokens` of those generated tokens that a guide made
      the policy draw from another distribution than its own. They are written,
      and not learned from.
    cache_builds: how its caches were made, by increasing length. With the
      weights, they determine the generated tokens.
    events: the calls that its episode has made and the rewards that it gave.
      With the completions, the results of calls determine the prompts. The
      first branch of a member has those of all branches.
  """

  member: int
  tokens: Int[np.ndarray, "T"]
  loss_mask: Bool[np.ndarray, "T"]
  behavior_logprobs: Float[np.ndarray, "T"]
  policy_versions: Int[np.ndarray, "T"]
  finish_reason: FinishReason | None = None
  reward: Reward | None = None
  writers: tuple[tuple[str, int], ...] = ()
  steered: tuple[int, ...] = ()
  cache_builds: tuple[CacheBuild, ...] = ()
  events: tuple[Event, ...] = ()

  @property
  def turn_start(self) -> int:
    """The number of tokens before the completion of the last turn."""
    # As a byte: bytes are searched faster than arrays.
    return self.loss_mask.tobytes().rfind(b"\0") + 1

  @property
  def num_completion_tokens(self) -> int:
    """Number of tokens that the policy generated. The ledger counts these."""
    return int(np.count_nonzero(self.loss_mask))

  @property
  def learned_mask(self) -> Bool[np.ndarray, "T"]:
    """`loss_mask` without the steered tokens; it may be the same array."""
    if not self.steered:
      return self.loss_mask
    mask = self.loss_mask.copy()
    mask[list(self.steered)] = False
    return mask

  def turn_rewards(self) -> dict[int, float]:
    """Return the sums of the rewards that its episode gave, by turn."""
    sums: dict[int, float] = {}
    for event in self.events:
      if event.kind == EventKind.REWARD:
        sums[event.turn] = sums.get(event.turn, 0.0) + float(event.text)
    return sums

  def reward_parts(self) -> dict[str, float]:
    """Return the sums of the parts of these rewards, by name."""
    sums: dict[str, float] = {}
    for event in self.events:
      if event.kind == EventKind.PARTS:
        for name, value in json.loads(event.text).items():
          sums[name] = sums.get(name, 0.0) + value
    return sums

  @property
  def score(self) -> float:
    """The reward's score.

    Raises:
      ValueError: the trajectory has not been scored.
    """
    if self.reward is None:
      raise ValueError(f"trajectory {self.member} has not been scored")
    return self.reward.score


# Branch k of member m has the number m + k * MEMBERS, which is of no other
# trajectory of the group. No group has more members.
MEMBERS = 1 << 16


def by_member(trajectories: Iterable[Any]) -> list[list[Any]]:
  """Return the branches of each member, which are one after the other.

  Anything that has the attribute `member` of a trajectory will do.
  """
  members: list[list[Any]] = []
  for one in trajectories:
    if one.member < MEMBERS:
      members.append([one])
    else:
      members[-1].append(one)
  return members


def whole(branches: Sequence[Trajectory]) -> Trajectory:
  """Return the branches of a member as one trajectory, end to end.

  What a branch was shown again is in it again, without being learned from. The
  result has no caches. A member that has one branch is that branch.
  """
  if len(branches) == 1:
    return branches[0]
  rewards = [t.reward for t in branches]
  scores: dict[int, float] = {}
  start = 0
  for trajectory, reward in zip(branches, rewards, strict=True):
    of_tokens = (reward and reward.token_scores) or {}
    scores |= {start + at: score for at, score in of_tokens.items()}
    start += trajectory.num_completion_tokens
  reward = rewards[0]
  if reward is not None and reward.token_scores is not None:
    reward = dataclasses.replace(reward, token_scores=scores)
  arrays: dict[str, Any] = {
    name: np.concatenate([getattr(t, name) for t in branches])
    for name in TOKEN_ARRAYS
  }
  begins = np.cumsum([0, *[len(t.tokens) for t in branches[:-1]]]).tolist()
  return Trajectory(
    member=branches[0].member,
    steered=tuple(
      begin + at
      for begin, t in zip(begins, branches, strict=True)
      for at in t.steered
    ),
    finish_reason=branches[-1].finish_reason,
    reward=reward,
    writers=tuple(writer for t in branches for writer in t.writers),
    events=branches[0].events,
    **arrays,
  )


# The parts of rewards whose names begin so are those of the episode `budgets`.
# No other episode can give one (`rollout.episode.Context`).
BUDGET_PARTS = "budget/"
# The part which says that the member's first branch has a thought that was cut,
# and that the other branches are answers after the cuts.
THOUGHT_TOKENS = f"{BUDGET_PARTS}thought_tokens"


def learned(branches: Sequence[Trajectory]) -> Sequence[Trajectory]:
  """Return the branches of a member that are learned from.

  These are all, or the first where the others only measure it.
  """
  if len(branches) > 1 and THOUGHT_TOKENS in branches[0].reward_parts():
    return branches[:1]
  return branches


def completed(branches: Sequence[Trajectory]) -> Trajectory:
  """Return what counts as the completion of a member: `learned`, `whole`."""
  return whole(learned(branches))


def shares(reward: Reward, branches: Sequence[Trajectory]) -> list[Reward]:
  """Return the reward of each branch of a member that has this reward.

  Each has the score of the member, and the scores of its own tokens.
  """
  if len(branches) == 1 or reward.token_scores is None:
    return [reward] * len(branches)
  found, start = [], 0
  for trajectory in branches:
    end = start + trajectory.num_completion_tokens
    own = {
      at - start: score
      for at, score in reward.token_scores.items()
      if start <= at < end
    }
    found.append(dataclasses.replace(reward, token_scores=own))
    start = end
  return found


def mean_parts(trajectories: Iterable[Trajectory]) -> dict[str, float]:
  """Return the mean of each named part over the rewards that have it."""
  values: dict[str, list[float]] = {}
  for trajectory in trajectories:
    parts = {} if trajectory.reward is None else trajectory.reward.parts
    for name, value in parts.items():
      values.setdefault(name, []).append(value)
  return {name: sum(found) / len(found) for name, found in values.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
  """The permission to generate one group, and its deadline.

  Attributes:
    index: number of the group in the order of admission, from 0. It identifies
      the group. Together with the member it seeds the sampling.
    birth: policy version that the engine held at admission. No token of the
      group is of an older version.
    deadline: last train step that may use the group. It is birth +
      max_staleness, with the setting at admission.
  """

  index: int
  birth: int
  deadline: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
  """A member that a group goes on without, because it could not be scored.

  Attributes:
    member: index within the group.
    num_completion_tokens: number of tokens that the policy generated.
    reason: one line for the ledger.
  """

  member: int
  num_completion_tokens: int
  reason: str


@dataclasses.dataclass(kw_only=True, slots=True)
class RolloutGroup:
  """The trajectories of one prompt, with their admission.

  Attributes:
    trajectories: those that it goes on with, at least one, by member. The
      branches of a member are one after the other.
    dropped: the other members.
    times_s: when the group was "admitted", "generated" and "scored", in seconds
      since the start of the run.
  """

  admission: Admission
  prompt: Prompt
  trajectories: list[Trajectory]
  dropped: Sequence[Dropped] = ()
  times_s: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def index(self) -> int:
    """Number of the group in the order of admission, which identifies it."""
    return self.admission.index

  def branches(self) -> list[list[Trajectory]]:
    """Return the trajectories of each member, in order."""
    return by_member(self.trajectories)

  def of_members(self) -> "RolloutGroup":
    """Return the group with one trajectory for each member; see `whole`.

    Whatever is counted or compared by member reads this group.
    """
    if all(t.member < MEMBERS for t in self.trajectories):
      return self
    wholes = [whole(branches) for branches in self.branches()]
    return dataclasses.replace(self, trajectories=wholes)

  @property
  def num_completion_tokens(self) -> int:
    """Number of tokens that the policy generated in the whole group."""
    members = *self.trajectories, *self.dropped
    return sum(one.num_completion_tokens for one in members)

  def written_versions(self) -> Int[np.ndarray, "C"]:
    """Return the version of each token that the policy generated.

    The trajectories' tokens come one after the other.
    """
    members = self.trajectories
    if not members:
      return np.zeros(0, np.int32)
    # Two long arrays take a third of the time of two short ones a member.
    versions = np.concatenate([t.policy_versions for t in members])
    return versions[np.concatenate([t.loss_mask for t in members])]
