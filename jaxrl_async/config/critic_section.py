"""The settings of the critic, which `algorithm.advantage=gae` has."""

import dataclasses
import enum

from jaxrl_async.config import optimizer_section


class CriticTrunk(enum.Enum):
  """Which layers a critic's values are computed from.

  OWN is a second model, which begins as a copy of the policy. SHARED are the
  policy's own layers, which then learn from both losses.
  """

  OWN = "own"
  SHARED = "shared"


@dataclasses.dataclass(kw_only=True, slots=True)
class CriticSection:
  """The critic: a model that predicts the return of each token.

  Attributes:
    trunk: the layers under its head, which is a vector and begins at zero.
    value_clip: bound on how far a prediction gains by moving within a train
      step, in normalised units; 0 sets none.
    value_coef: coefficient of the value loss beside the policy's.
    warmup_steps: in so many train steps, the first ones of the run, only the
      critic learns. Policy versions count on, and all have the same weights.
    normalize_decay: weight of earlier train steps in the running mean and
      deviation of the returns, by which the critic's targets are normalised; 0
      normalises nothing.
    optimizer: of the critic's parameters. Its rate decays as `train.decay`
      says.
  """

  trunk: CriticTrunk = CriticTrunk.OWN
  value_clip: float = 0.2
  value_coef: float = 0.5
  warmup_steps: int = 0
  normalize_decay: float = 0.999
  optimizer: optimizer_section.OptimizerSection = dataclasses.field(
    default_factory=optimizer_section.OptimizerSection
  )
