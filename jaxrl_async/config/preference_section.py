"""The settings of training on preferences."""

import dataclasses
import enum

from jaxrl_async.config import optimizer_section


class PreferenceLoss(enum.Enum):
  """What `launch/prefer.py` minimises; see `algorithms.preferences`."""

  DPO = "dpo"
  IPO = "ipo"


@dataclasses.dataclass(kw_only=True, slots=True)
class PreferenceSection:
  """Training on pairs of completions, of which one is better.

  `launch/prefer.py` trains a policy. Only it reads this section. The policy
  that it starts from, `warm_start.checkpoint` or the pretrained model of
  `model.name`, is also the reference.

  Attributes:
    loss: of a pair.
    beta: strength of the tie to the reference.
    label_smoothing: share of the pairs that DPO takes to be labelled the wrong
      way round.
    length_normalised: divide the log-ratio of a completion by its number of
      tokens.
    chosen: the better completion: field:NAME, an entry or a column of the data,
      which is a text or a chat that ends with the assistant's answer; a key of
      `worked_solutions.SOLVERS`, whose solution is then right; or
      module:function of (item, rng), which returns a text.
    rejected: the worse one, in the same way. A solver of SOLVERS makes mistakes
      as often as `warm_start.corrupted_frac` says. Pairs whose completions are
      equal are left out and counted.
    num_steps: number of updates.
    rows_per_batch: rows of `train.tokens_per_row` tokens in each.
    num_examples: number of pairs; every pass over them is shuffled.
    decay: final learning rate over the peak, reached on a cosine curve.
    eval_every: steps between two measurements on held-out pairs; 0 measures
      none. The parameters with the least loss are the result.
    num_eval_examples: number of held-out pairs.
    patience: training ends after this many measurements in a row that are no
      better than the best; 0 never ends it early.
  """

  loss: PreferenceLoss = PreferenceLoss.DPO
  beta: float = 0.1
  label_smoothing: float = 0.0
  length_normalised: bool = False
  chosen: str = "field:chosen"
  rejected: str = "field:rejected"
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
