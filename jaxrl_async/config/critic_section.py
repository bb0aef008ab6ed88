"""The settings of the critic, which `algorithm.advantage=gae` has."""

import dataclasses
import enum

from jaxrl_async.config import optimizer_section
from jaxrl_async.config import setting as setting_lib


class CriticTrunk(enum.Enum):
  """Which layers a critic's values are computed from.

  OWN is a second model, which begins as a copy of the policy. SHARED are the
  policy's own layers, which then learn from both losses.
  """

  OWN = "own"
  SHARED = "shared"


@dataclasses.dataclass(kw_only=True, slots=True)
class CriticSection:
  """The critic: a model that predicts the return of each token."""

  trunk: CriticTrunk = setting_lib.setting(
    CriticTrunk.OWN,
    "the layers under its head, which is a vector and begins at zero",
    fixed="the checkpoint holds the other kind of critic",
  )
  value_clip: float = setting_lib.setting(
    0.2,
    "bound on how far a prediction gains by moving within a train step, in"
    " normalised units; 0 sets none",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.BOUND,
  )
  value_coef: float = setting_lib.setting(
    0.5,
    "coefficient of the value loss beside the policy's",
    low=0,
    free=setting_lib.IN_THE_LOSS,
    schedule=setting_lib.Schedule.FREE,
  )
  warmup_steps: int = setting_lib.setting(
    0,
    "in so many train steps, the first ones of the run, only the critic"
    " learns. Policy versions count on, and all have the same weights.",
    low=0,
    fixed="the policy's learning rate counts from its end",
  )
  normalize_decay: float = setting_lib.setting(
    0.999,
    "weight of earlier train steps in the running mean and deviation of the"
    " returns, by which the critic's targets are normalised; 0 normalises"
    " nothing",
    low=0,
    below=1,
    fixed="the stored critic predicts in units that it has made",
  )
  optimizer: optimizer_section.OptimizerSection = setting_lib.section(
    optimizer_section.OptimizerSection,
  )
