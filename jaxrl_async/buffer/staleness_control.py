"""A bound on staleness that follows what a run measures.

Each step asks for a direction:

  -1  if its data is too old: its effective sample size is below a threshold, or
      the share of clipped or of left out tokens is above one
  +1  else, if training waits for a larger share of the step than is allowed,
      and the bound may be the reason
   0  else, or if a measurement is not finite

The bound may be the reason if generation waits for more than the same share of
the step, because the slices then wait for each other, or if a trained token was
as old as the bound allows, because the step may then have waited for a group at
its deadline. If only generation waits, training is the bottleneck. If only
training waits, generation is. No bound makes either of them faster.

The bound moves by one after `patience` steps in a row that ask for the same
direction, if it stays between its limits. After a move from bound a to bound b,
max(a, b) + 1 steps are not looked at. A decision from the metrics of step s
holds for groups that are admitted after step s + 1. Groups that were admitted
before are born at version s + 1 at the latest, so that steps up to s + 1 + a
may still train them. Without this rest, the bound would go on to move because
of data that the move could not reach.

The direction is a function of metrics that are written down, and the bound is a
function of the directions. So the decisions of a run can be computed again from
its metrics.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

from jaxrl_async.config import sections

# The metrics that tell the age of the data, which a loss may lack.
_OF_LOSS = ("offpolicy/ess", "policy/clip_frac", "offpolicy/left_out_frac")


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
  """What the next decision depends on, besides the metrics.

  Attributes:
    bound: the bound for groups that are admitted from now on.
    streak: how many steps in a row have asked for a direction, times that
      direction; at most the patience.
    rest: how many of the next steps are not looked at.
  """

  bound: int
  streak: int
  rest: int


class Measured(NamedTuple):
  """What a step says about the bound.

  Attributes:
    ess: effective sample size of the behavior weights.
    clip_frac: share of clipped tokens.
    left_out_frac: share of tokens that corrections left out.
    train_wait_frac: share of the step in which training waited for
      trajectories.
    rollout_wait_frac: share of the step in which there was nothing to generate.
    staleness_max: of the trained tokens, in policy versions.
  """

  ess: float
  clip_frac: float
  left_out_frac: float
  train_wait_frac: float
  rollout_wait_frac: float
  staleness_max: int


def measured(values: Mapping[str, Any]) -> Measured:
  """Return what the metrics of a step say about the bound.

  Raises:
    ConfigError: the loss does not measure the age of the data.
  """
  missing = [name for name in _OF_LOSS if name not in values]
  sections.require(
    not missing,
    "staleness_control.maximum",
    f"the loss of this run (algorithm.loss) does not report"
    f" {', '.join(missing)}; use 0, or another loss",
  )
  step_s = values["time/step_s"]
  return Measured(
    *(float(values[name]) for name in _OF_LOSS),
    train_wait_frac=values["time/wait_for_rollouts_s"] / step_s,
    rollout_wait_frac=values["rollout/wait_for_admission_s"] / step_s,
    staleness_max=values["staleness/max"],
  )


def direction(
  section: sections.StalenessControlSection,
  bound: int,
  found: Measured,
) -> tuple[int, str]:
  """Return what a step under a bound asks for, and why, for a message."""
  if not all(map(math.isfinite, found)):
    return 0, ""
  if found.ess < section.min_ess:
    return -1, f"effective sample size {found.ess:.2f}"
  if found.clip_frac > section.max_clip_frac:
    return -1, f"{found.clip_frac:.0%} of the tokens clipped"
  if found.left_out_frac > section.max_left_out_frac:
    return -1, f"{found.left_out_frac:.0%} of the tokens left out"
  both_wait = found.rollout_wait_frac > section.max_wait_frac
  may_be_reason = both_wait or found.staleness_max >= bound
  if found.train_wait_frac > section.max_wait_frac and may_be_reason:
    return 1, (
      f"training waited {found.train_wait_frac:.0%} of the step, generation"
      f" {found.rollout_wait_frac:.0%}"
    )
  return 0, ""


def decide(
  section: sections.StalenessControlSection,
  state: State,
  asked: int,
) -> State:
  """Return the state after a step that asks for a direction."""
  if state.rest:
    return dataclasses.replace(state, rest=state.rest - 1)
  is_same = state.streak * asked > 0
  streak = state.streak + asked if is_same else asked
  bound = state.bound + asked
  if abs(streak) < section.patience:
    return dataclasses.replace(state, streak=streak)
  if not section.minimum <= bound <= section.maximum:
    return dataclasses.replace(state, streak=section.patience * asked)
  return State(bound=bound, streak=0, rest=max(bound, state.bound) + 1)


class StalenessControl:
  """The control of one run.

  Threads: the thread that writes steps down calls `observe`. The other methods
  belong to the main thread, while nothing is being written down.
  """

  def __init__(
    self,
    section: sections.StalenessControlSection,
    stored: Mapping[str, int] | None,
    note: Callable[[str], None],
    *,
    oldest: int = 0,
  ):
    """Start, or continue from the `state` of a checkpoint.

    Args:
      section: limits and thresholds.
      stored: the state of a checkpoint; None if there was no control before.
      note: is called with a message when the bound moves.
      oldest: the largest bound that groups were admitted under before; 0 for
        a new run.
    """
    self._section = section
    if stored is None:
      before, bound = oldest, section.minimum
    else:
      self._state = State(**stored)
      before = self._state.bound
      bound = min(max(before, section.minimum), section.maximum)
    if stored is None or bound != before:
      # The first step of a run compiles, which no bound makes faster.
      self._state = State(bound=bound, streak=0, rest=max(bound, before) + 1)
    self._note = note

  @property
  def bound(self) -> int:
    """The bound for groups that are admitted from now on."""
    return self._state.bound

  def state(self) -> dict[str, int]:
    """Return the state as a checkpoint stores it."""
    return dataclasses.asdict(self._state)

  def observe(self, step: int, values: Mapping[str, Any]) -> dict[str, int]:
    """Decide from the metrics of a step.

    Args:
      step: completed train steps, for the message.
      values: the metrics of the step.

    Returns:
      Metrics of the decision.

    Raises:
      ConfigError: the loss does not measure the age of the data.
    """
    before = self._state.bound
    asked, reason = direction(self._section, before, measured(values))
    self._state = decide(self._section, self._state, asked)
    moved = self.bound - before
    if moved:
      self._note(
        f"step {step}: staleness bound {before} -> {self.bound} ({reason})"
      )
    return {
      "staleness/bound": self.bound,
      "staleness/asked": asked,
      "staleness/decision": moved,
    }
