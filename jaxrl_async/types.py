"""What travels between the two sides: prompts, trajectories, rewards, groups.

Everything here is host memory (numpy). Position t of every [T] array is about
token t: its id, whether it is learned from, the logprob it was drawn with, the
version of the weights that drew it.

Reward processes import this module, so it must not import jax.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import enum
from typing import Any

from jaxtyping import Bool, Float, Int
import numpy as np


class FinishReason(enum.StrEnum):
  """Why a trajectory ended."""

  EOS = "eos"
  STOP = "stop"
  LENGTH = "length"
  ABORTED = "aborted"


class Fate(enum.StrEnum):
  """Why a group left the buffer; one ledger line each."""

  TRAINED = "trained"
  FILTERED = "filtered"
  FAILED = "failed"


@dataclasses.dataclass(kw_only=True, slots=True)
class Prompt:
  """One question of the task, ready to be generated from.

  Attributes:
    prompt_id: "<source>/<split>/<index of the item>", stable over runs.
    tokens: token ids of the filled-in template.
    item: of the source; the scorer is given it. See `data.source`.
  """

  prompt_id: str
  tokens: Int[np.ndarray, "T"]
  item: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
  """What a scorer says about one completion.

  Positions are indices into `Completion.tokens`: they count the tokens that the
  policy wrote, over all turns of the trajectory, from 0.

  Attributes:
    score: the score of the whole trajectory; advantages are computed from it.
    parts: named numbers that are recorded and not learned from, such as what
      the score is the sum of.
    token_scores: scores by position, for a loss that learns from them; 0 at
      all other positions. None if the scorer does not score tokens. One that
      does gives a mapping each time, if need be an empty one: the programs of
      a batch with such scores are others than those of a batch without.
  """

  score: float
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  token_scores: Mapping[int, float] | None = None


def teach_nothing(rewards: Sequence[Reward]) -> bool:
  """Whether a group with these rewards has nothing to learn from.

  All scores are equal, so that every advantage is 0, and no token has a score.
  """
  has_token_scores = any(reward.token_scores for reward in rewards)
  return not has_token_scores and len({r.score for r in rewards}) == 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
  """One prompt of an episode and what the policy wrote after it, as text.

  Attributes:
    prompt: what the policy was shown.
    completion: what it wrote.
    num_tokens: how many tokens it wrote. The last of them is at the position
      that is one less than the sum of `num_tokens` up to and with this turn.
  """

  prompt: str
  completion: str
  num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
  """What a scorer is shown of a finished trajectory.

  Special tokens, such as the one that ends a sequence, are not in the texts.

  Attributes:
    text: all that the policy wrote, in all turns.
    answer: the part of the text that is its answer, by `task.answer_prefix`;
      None if the text has none. The reward service fills it in.
    turns: at least one; several if the episode has several.
    tokens: ids of the tokens that the policy wrote, in all turns. A scorer that
      scores places in the text finds their positions with the tokenizer, which
      it can load with `text.tokenizer.load`.
    finish_reason: why the trajectory ended.
  """

  text: str
  answer: str | None = None
  turns: tuple[Turn, ...]
  tokens: Int[np.ndarray, "C"]
  finish_reason: FinishReason


@dataclasses.dataclass(kw_only=True, slots=True)
class Trajectory:
  """One prompt with what the policy wrote after it, partial or finished.

  Attributes:
    member: place within its group, 0 <= member < group_size.
    tokens: prompt and completion (and, in an episode of several turns, the
      tokens of later prompts).
    loss_mask: True where the policy wrote the token.
    behavior_logprobs: logprob of each written token under the distribution it
      was drawn from; 0 where loss_mask is False.
    policy_versions: version of the weights that drew each written token; -1
      where loss_mask is False.
    finish_reason: None while the trajectory is still being written.
    reward: None until scored.
  """

  member: int
  tokens: Int[np.ndarray, "T"]
  loss_mask: Bool[np.ndarray, "T"]
  behavior_logprobs: Float[np.ndarray, "T"]
  policy_versions: Int[np.ndarray, "T"]
  finish_reason: FinishReason | None = None
  reward: Reward | None = None

  @property
  def num_completion_tokens(self) -> int:
    """Tokens the policy wrote; what the ledger counts."""
    return int(self.loss_mask.sum())

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
  """The right to write one group, and until when the group may be used.

  Attributes:
    index: order of admission, from 0. It identifies the group, and together
      with the member it seeds the sampling.
    birth: policy version that the engine held at admission; no token of the
      group is older.
    deadline: last train step that may use the group: birth + max_staleness as
      it was at admission.
  """

  index: int
  birth: int
  deadline: int


@dataclasses.dataclass(kw_only=True, slots=True)
class RolloutGroup:
  """The trajectories of one prompt and the admission they were begun under.

  Attributes:
    times_s: seconds since the start of the run: "admitted", "generated",
      "scored".
  """

  admission: Admission
  prompt: Prompt
  trajectories: list[Trajectory]
  times_s: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def index(self) -> int:
    """What the group is called: its place in the order of admission."""
    return self.admission.index

  @property
  def num_completion_tokens(self) -> int:
    """Tokens the policy wrote in the whole group."""
    return sum(t.num_completion_tokens for t in self.trajectories)
