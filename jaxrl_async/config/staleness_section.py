"""The settings by which a run moves its own bound on staleness."""

import dataclasses

from jaxrl_async.config import setting as setting_lib


@dataclasses.dataclass(kw_only=True, slots=True)
class StalenessControlSection:
  """The bound on staleness between two limits; maximum = 0 leaves it fixed.

  A run starts with the minimum. The bound falls by one while the data is too
  old. It rises by one while the data is not, and the slices wait because of the
  bound. `coordination.staleness_control` has the rule.
  """

  minimum: int = setting_lib.setting(
    0,
    "smallest bound",
    low=0,
  )
  maximum: int = setting_lib.setting(
    0,
    "largest bound, at most `algorithm.max_staleness`; 0 switches the control"
    " off, and `algorithm.max_staleness` is then the bound",
    low=0,
  )
  min_ess: float = setting_lib.setting(
    0.8,
    "the data is too old if the metric offpolicy/ess is below",
    low=0,
    high=1,
  )
  max_clip_frac: float = setting_lib.setting(
    0.2,
    "it is too old if policy/clip_frac is above",
    low=0,
    high=1,
  )
  max_left_out_frac: float = setting_lib.setting(
    0.05,
    "it is too old if offpolicy/left_out_frac is above",
    low=0,
    high=1,
  )
  max_wait_frac: float = setting_lib.setting(
    0.1,
    "the bound rises if training waits for a larger share of the step, and"
    " generation does too, or trained tokens are as old as the bound",
    low=0,
    high=1,
  )
  patience: int = setting_lib.setting(
    2,
    "the bound moves after so many steps in a row that ask for it",
    low=1,
  )
