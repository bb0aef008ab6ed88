"""What travels between the two sides: prompts, trajectories, groups.

Everything here is host memory (numpy). Position t of every [T] array is about
token t: its id, whether it is learned from, the logprob it was drawn with, the
version of the weights that drew it.
"""

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
    prompt_id: "<dataset>/<split>/<source index>", stable over runs.
    tokens: token ids of the filled-in template.
    item: what the reward needs to score an answer (picklable, no jax).
  """

  prompt_id: str
  tokens: Int[np.ndarray, "T"]
  item: dict[str, Any]


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
  reward: float | None = None

  @property
  def num_completion_tokens(self) -> int:
    """Tokens the policy wrote; what the ledger counts."""
    return int(self.loss_mask.sum())


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
