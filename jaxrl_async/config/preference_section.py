"""The settings of training on preferences."""

import dataclasses
import enum

from jaxrl_async.config import optimizer_section

# The fields that name the two completions of a pair.
SIDES = ("chosen", "rejected")


class PreferenceLoss(enum.Enum):
  """What `launch/prefer.py` minimises; see `algorithms.preferences`."""

  DPO = "dpo"
  IPO = "ipo"


class RewardLoss(enum.Enum):
  """What `launch/reward_model.py` minimises; see `algorithms.preferences`.

  BRADLEY_TERRY learns a score of whole completions from pairs. STEPS learns
  from labels whether each step of a solution is right.
  """

  BRADLEY_TERRY = "bradley_terry"
  STEPS = "steps"


@dataclasses.dataclass(kw_only=True, slots=True)
class PreferenceSection:
  """Training on pairs of completions, of which one is better.

  `launch/prefer.py` trains a policy, and `launch/reward_model.py` a reward
  model. Only these two read this section. Both start from the policy of
  `warm_start.checkpoint`, or from the pretrained model of `model.name`. For
  `launch/prefer.py` that policy is also the reference.

  Attributes:
    loss: what `launch/prefer.py` minimises for each pair.
    beta: strength of the tie to the reference.
    label_smoothing: share of the pairs that DPO takes to be labelled the wrong
      way round.
    length_normalised: divide the log-ratio of a completion by its number of
      tokens.
    reward_loss: what `launch/reward_model.py` minimises.
    chosen: the better completion: field:NAME, an entry or a column of the data,
      which is a text or a chat that ends with the assistant's answer; a key of
      `worked_solutions.SOLVERS`, whose solution is then right; or
      module:function of (item, rng), which returns a text.
    rejected: the worse one, in the same way. A solver of SOLVERS makes mistakes
      as often as `warm_start.corrupted_frac` says, which must then be above 0.
      Pairs whose completions are equal are left out and counted.
    steps: column of the data with the steps of a solution, a list of texts.
    labels: column with a label for each of them: true or 1 if it is right.
    num_steps: number of updates.
    rows_per_batch: rows of `train.tokens_per_row` tokens in each.
    num_examples: number of pairs or solutions; every pass over them is
      shuffled.
    decay: final learning rate over the peak, reached on a cosine curve.
    eval_every: steps between two measurements on held-out ones; 0 measures
      none. The parameters with the least loss are the result.
    num_eval_examples: number of held-out pairs or solutions.
    patience: training ends after this many measurements in a row that are no
      better than the best; 0 never ends it early.
  """

  loss: PreferenceLoss = PreferenceLoss.DPO
  beta: float = 0.1
  label_smoothing: float = 0.0
  length_normalised: bool = False
  reward_loss: RewardLoss = RewardLoss.BRADLEY_TERRY
  chosen: str = "field:chosen"
  rejected: str = "field:rejected"
  steps: str = "steps"
  labels: str = "labels"
  num_steps: int = 200
  rows_per_batch: int = 32
  num_examples: int = 10_000
  decay: float = 0.1
  eval_every: int = 20
  num_eval_examples: int = 256
  patience: int = 0
  optimizer: optimizer_section.OptimizerSection = dataclasses.field(
    default_factory=lambda: optimizer_section.OptimizerSection(
      learning_rate=1e-6
    )
  )
