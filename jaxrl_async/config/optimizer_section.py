"""The settings of an optimizer."""

import dataclasses
import enum

from ml_collections import config_dict


class OptimizerName(enum.Enum):
  """The optimizers of the warm start and of the RL stage."""

  ADAMW = "adamw"
  MUON = "muon"


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerSection:
  """An Optax optimizer with linear warmup and global-norm clipping.

  Attributes:
    rate_schedule: the learning rate of each update, in place of warmup and
      decay: `schedule`, one of `algorithm_section.SCHEDULES`, and its
      arguments. It begins with `learning_rate`, or rises to it, by default.
    weight_decay: of the matrices that tokens are multiplied by, adapters
      included; norms, biases, the embedding and scalar heads do not decay.
    state_dtype: dtype of the first moment, Muon's included; the second moment
      stays float32.
    offload: keep the moments in host memory between updates.
  """

  name: OptimizerName = OptimizerName.ADAMW
  learning_rate: float = 3e-4
  warmup_steps: int = 0
  rate_schedule: config_dict.ConfigDict = dataclasses.field(
    default_factory=config_dict.ConfigDict
  )
  b1: float = 0.9
  b2: float = 0.99
  eps: float = 1e-8
  weight_decay: float = 0.0
  max_grad_norm: float = 1.0
  state_dtype: str = "float32"
  offload: bool = False
