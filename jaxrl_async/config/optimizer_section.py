"""The settings of an optimizer."""

import dataclasses
import enum
from typing import Any

from ml_collections import config_dict

from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config.setting import setting


class OptimizerName(enum.Enum):
  """The optimizers of the warm start and of the RL stage."""

  ADAMW = "adamw"
  MUON = "muon"


def _has_schedule(section: Any, config: Any) -> str:
  del config
  return (
    "rate_schedule says how the rate changes" if section.rate_schedule else ""
  )


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerSection:
  """An Optax optimizer with linear warmup and global-norm clipping."""

  name: OptimizerName = setting(
    OptimizerName.ADAMW, fixed="the stored moments are made with it"
  )
  """Which optimizer."""
  learning_rate: float = setting(
    3e-4,
    low=0,
    high=1,
    free="scales what the optimizer makes of the stored moments, from the next"
    " update on",
  )
  """Of an update after the warmup."""
  warmup_steps: int = setting(
    0,
    low=0,
    unread=(_has_schedule,),
    free="the rate is a function of the number of updates, which goes on: a"
    " warmup that is over is not repeated",
  )
  """Updates in which the rate rises linearly from 0."""
  rate_schedule: config_dict.ConfigDict = setting(
    config_dict.ConfigDict,
    free="the rate is a function of the number of updates, which goes on: a"
    " warmup that is over is not repeated",
  )
  """The learning rate of each update, in place of warmup and decay: `schedule`,
  one of `algorithm_section.SCHEDULES`, and its arguments. It begins with
  `learning_rate`, or rises to it, by default."""
  b1: float = setting(
    0.9, low=0, below=1, fixed="the stored moments are made with it"
  )
  """Decay of the first moment."""
  b2: float = setting(
    0.99, low=0, below=1, fixed="the stored moments are made with it"
  )
  """Decay of the second moment."""
  eps: float = setting(
    1e-8, low=setting_lib.MIN_FLOAT, free=setting_lib.EACH_UPDATE
  )
  """Is added to the root of the second moment."""
  weight_decay: float = setting(0.0, low=0, free=setting_lib.EACH_UPDATE)
  """Of the matrices that tokens are multiplied by, adapters included; norms,
  biases, the embedding and scalar heads do not decay."""
  max_grad_norm: float = setting(
    1.0, low=setting_lib.MIN_FLOAT, free=setting_lib.EACH_UPDATE
  )
  """Gradients with a larger global norm are scaled down to it."""
  state_dtype: str = setting(
    "float32",
    choices=setting_lib.DTYPES,
    fixed="the stored moments are made with it",
  )
  """Dtype of the first moment, Muon's included; the second moment stays
  float32."""
  offload: bool = setting(False, free="where moments lie between updates")
  """Keep the moments in host memory between updates."""
