"""The data that rollout and training share: prompts, trajectories, rewards.

All arrays are in host memory (numpy). Position t of every [T] array is about
token t: its id, whether it is learned from, the logprob with which it was
sampled, and the version of the weights that sampled it.

Reward processes import this module, so that it must not import jax.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import enum
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
  """

  prompt: str
  completion: str
  num_tokens: int


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
  """

  text: str
  answer: str | None = None
  turns: tuple[Turn, ...]
  tokens: Int[np.ndarray, "C"]
  finish_reason: FinishReason


class CacheBuild(NamedTuple):
  """How the cache was made with which a trajectory was continued.

  Attributes:
    length: number of tokens that the trajectory had then.
    num_prefilled: how many of them were cached by prefill. The others went
      through the decode program one by one.
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
    member: index within the group, 0 <= member < group_size.
    tokens: prompt and completion. An episode of several turns adds the prompts
      and completions of later turns.
    loss_mask: True for tokens that the policy generated.
    behavior_logprobs: logprob of each generated token under the distribution
      from which it was sampled; 0 where loss_mask is False.
    policy_versions: version of the weights that sampled each generated token;
      -1 where loss_mask is False.
    finish_reason: why the trajectory ended. None while it is being generated.
    reward: the scorer's result. None until the trajectory has been scored.
    writers: the replicas that generated the tokens, in order, each with the
      number of tokens. The coordinator fills it in.
    cache_builds: how its caches were made, by increasing length. With the
      weights, they determine the generated tokens.
  """

  member: int
  tokens: Int[np.ndarray, "T"]
  loss_mask: Bool[np.ndarray, "T"]
  behavior_logprobs: Float[np.ndarray, "T"]
  policy_versions: Int[np.ndarray, "T"]
  finish_reason: FinishReason | None = None
  reward: Reward | None = None
  writers: tuple[tuple[str, int], ...] = ()
  cache_builds: tuple[CacheBuild, ...] = ()

  @property
  def num_completion_tokens(self) -> int:
    """Number of tokens that the policy generated. The ledger counts these."""
    return int(np.count_nonzero(self.loss_mask))

  @property
  def score(self) -> float:
    """The reward's score.

    Raises:
      ValueError: the trajectory has not been scored.
    """
    if self.reward is None:
      raise ValueError(f"trajectory {self.member} has not been scored")
    return self.reward.score


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
    trajectories: those that it goes on with, at least one.
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
