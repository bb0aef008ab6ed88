"""What is learned from the groups of a train step, and how they are packed."""

from collections.abc import Callable, Sequence
import dataclasses

from jaxtyping import Float
import numpy as np

from jaxrl_async import types
from jaxrl_async.training import packing

# Makes advantages of groups: a number for each trajectory, or for each of its
# tokens. The integer is the number of completed train steps.
Advantages = Callable[[Sequence[types.RolloutGroup], int], packing.Advantages]
# Makes further fields of a batch, by name, of the trajectories of a step. The
# integer is the same.
Fields = Callable[
  [Sequence[types.Trajectory], int], dict[str, list[Float[np.ndarray, "_"]]]
]


def reward_fields(
  trajectories: Sequence[types.Trajectory], step: int
) -> dict[str, list[Float[np.ndarray, "_"]]]:
  """Return what rewards say of single tokens, whatever the step."""
  del step
  return packing.reward_fields(trajectories)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
  """What is learned from groups, and how they are packed; see `packing.pack`.

  Attributes:
    advantages: makes advantages of rewards.
    fields: makes what else the stages and the loss need.
    overlong_filter: nothing is learned from trajectories that were cut off.
    num_epochs: passes of a train step over its minibatches.
  """

  tokens_per_row: int
  rows_per_microbatch: int
  num_minibatches: int
  min_microbatches: int
  advantages: Advantages
  fields: Fields = reward_fields
  overlong_filter: bool = False
  num_epochs: int = 1
