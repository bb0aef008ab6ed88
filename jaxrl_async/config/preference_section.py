"""The settings of training on preferences."""

import dataclasses
import enum

from jaxrl_async.config import optimizer_section
from jaxrl_async.config import setting as setting_lib

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
  """

  loss: PreferenceLoss = setting_lib.setting(
    PreferenceLoss.DPO,
    "what `launch/prefer.py` minimises for each pair",
  )
  beta: float = setting_lib.setting(
    0.1,
    "strength of the tie to the reference",
    low=setting_lib.MIN_FLOAT,
  )
  label_smoothing: float = setting_lib.setting(
    0.0,
    "share of the pairs that DPO takes to be labelled the wrong way round",
    low=0,
    below=0.5,
  )
  length_normalised: bool = setting_lib.setting(
    False,
    "divide the log-ratio of a completion by its number of tokens",
  )
  reward_loss: RewardLoss = setting_lib.setting(
    RewardLoss.BRADLEY_TERRY,
    "what `launch/reward_model.py` minimises",
  )
  chosen: str = setting_lib.setting(
    "field:chosen",
    "the better completion: field:NAME, an entry or a column of the data,"
    " which is a text or a chat that ends with the assistant's answer; a key"
    " of `worked_solutions.SOLVERS`, whose solution is then right; or"
    " module:function of (item, rng), which returns a text",
  )
  rejected: str = setting_lib.setting(
    "field:rejected",
    "the worse one, in the same way. A solver of SOLVERS makes mistakes as"
    " often as `warm_start.corrupted_frac` says, which must then be above 0."
    " Pairs whose completions are equal are left out and counted.",
  )
  steps: str = setting_lib.setting(
    "steps",
    "column of the data with the steps of a solution, a list of texts",
  )
  labels: str = setting_lib.setting(
    "labels",
    "column with a label for each of them: true or 1 if it is right",
  )
  num_steps: int = setting_lib.setting(
    200,
    "number of updates",
    low=1,
  )
  rows_per_batch: int = setting_lib.setting(
    32,
    "rows of `train.tokens_per_row` tokens in each",
    low=1,
    high=setting_lib.MAX_GROUP,
  )
  num_examples: int = setting_lib.setting(
    10_000,
    "number of pairs or solutions; every pass over them is shuffled",
    low=1,
    high=1000000,
  )
  decay: float = setting_lib.setting(
    0.1,
    "final learning rate over the peak, reached on a cosine curve",
    low=0,
    high=1,
  )
  eval_every: int = setting_lib.setting(
    20,
    "steps between two measurements on held-out ones; 0 measures none. The"
    " parameters with the least loss are the result.",
    low=0,
  )
  num_eval_examples: int = setting_lib.setting(
    256,
    "number of held-out pairs or solutions",
    low=1,
    high=1000000,
  )
  patience: int = setting_lib.setting(
    0,
    "training ends after this many measurements in a row that are no better"
    " than the best; 0 never ends it early",
    low=0,
  )
  optimizer: optimizer_section.OptimizerSection = setting_lib.section(
    lambda: optimizer_section.OptimizerSection(learning_rate=1e-6),
  )
