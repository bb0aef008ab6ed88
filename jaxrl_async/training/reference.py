"""How the reference of a KL penalty moves while the policy is trained."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp

from jaxrl_async.training import train_state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
  """When the reference moves, and how far.

  Attributes:
    every: train steps between two moves.
    decay: share of the reference that stays.
  """

  every: int
  decay: float

  def is_due(self, num_steps: int) -> bool:
    """Return whether it moves after this many train steps."""
    return num_steps % self.every == 0


def moved(
  state: train_state.TrainState, decay: float
) -> train_state.TrainState:
  r"""Return the state with its reference moved towards the policy.

  reference = decay * reference + (1 - decay) * policy

  With decay 0 the reference is replaced, which is the hard update of TR-DPO
  (arXiv:2404.09656). With a decay it is its soft update, a moving average.
  """
  reference = state.models[train_state.REFERENCE]
  frozen = jax.tree.map(
    lambda old, new: _mixed(decay, on_device(old), new).astype(old.dtype),
    reference.frozen,
    state.policy.params,
  )
  frozen = jax.tree.map(
    lambda x, y: jax.device_put(x, jax.typeof(y).memory_space),
    frozen,
    reference.frozen,
  )
  after = dataclasses.replace(reference, frozen=frozen)
  return train_state.TrainState(
    models={**state.models, train_state.REFERENCE: after}
  )


def _mixed(decay: float, old: jax.Array, new: jax.Array) -> jax.Array:
  return decay * old.astype(jnp.float32) + (1 - decay) * new


def on_device(params: Any) -> Any:
  """Return parameters that may be in host memory, in that of the device."""
  return jax.device_put(params, jax.memory.Space.Device)


def make_program(
  movement: Movement, shardings: train_state.TrainState
) -> Callable[[train_state.TrainState], train_state.TrainState]:
  """Return `moved` compiled for a train state of these shardings.

  The memory of the state is donated.
  """
  return jax.jit(
    lambda state: moved(state, movement.decay),
    donate_argnums=0,
    out_shardings=shardings,
  )
