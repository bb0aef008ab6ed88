"""The settings by which a run moves its own bound on staleness."""

import dataclasses


@dataclasses.dataclass(kw_only=True, slots=True)
class StalenessControlSection:
  """The bound on staleness between two limits; maximum = 0 leaves it fixed.

  A run starts with the minimum. The bound falls by one while the data is too
  old. It rises by one while the data is not, and the slices wait because of the
  bound. `coordination.staleness_control` has the rule.

  Attributes:
    minimum: smallest bound.
    maximum: largest bound, at most `algorithm.max_staleness`; 0 switches the
      control off, and `algorithm.max_staleness` is then the bound.
    min_ess: the data is too old if the metric offpolicy/ess is below.
    max_clip_frac: it is too old if policy/clip_frac is above.
    max_left_out_frac: it is too old if offpolicy/left_out_frac is above.
    max_wait_frac: the bound rises if training waits for a larger share of the
      step, and generation does too, or trained tokens are as old as the bound.
    patience: the bound moves after so many steps in a row that ask for it.
  """

  minimum: int = 0
  maximum: int = 0
  min_ess: float = 0.8
  max_clip_frac: float = 0.2
  max_left_out_frac: float = 0.05
  max_wait_frac: float = 0.1
  patience: int = 2
