"""Checks that tokens are those that their random numbers draw.

A token is drawn from one uniform number by the inverse of the CDF
(`engine.sampling`). So given its context, the weights and the number, a forward
pass tells whether it had to be this token: the number lies between the CDF
before the token and the CDF after it. Different programs round differently, so
that a number close to a boundary may fall on its other side.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jaxrl_async import types
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_step
from jaxrl_async.training import trainer as trainer_lib

UNIFORM = "uniform"  # field of a batch: the number that drew each token
_GAP = "gap"
_CHUNK = 64  # tokens of each row whose logits are computed at a time


class DrawCheck:
  """Measures recorded tokens under the present weights of a trainer."""

  def __init__(self, trainer: trainer_lib.Trainer):
    """Set up the program, which is compiled at its first use."""
    self._trainer = trainer
    self._program = jax.jit(functools.partial(_measured, trainer.forward))

  def measure(
    self,
    trajectories: list[types.Trajectory],
    uniforms: list[Float[np.ndarray, "_"]],
  ) -> tuple[list[Float[np.ndarray, "_"]], list[Float[np.ndarray, "_"]]]:
    """Return the logprob of each token, and how far its draw is off.

    Args:
      trajectories: they may have tokens of several versions. Only those of the
        present weights are meaningful in the result.
      uniforms: the number of each token, in [0, 1).

    Returns:
      Two arrays for each trajectory: the logprobs; and the distance of the
      number to the part of the CDF that belongs to the token, which is 0 if it
      draws this token.
    """
    trainer = self._trainer
    segments = trainer.plan(
      [packing.without_prompt(trajectories)],
      np.zeros(len(trajectories), np.float32),
      {UNIFORM: uniforms},
    )
    found = self._program(trainer.state.policy.params, trainer.placed(segments))
    placement = packing.placement(segments)
    logprobs, gaps = (
      packing.unpack(jax.device_get(found[name]), placement)
      for name in (objectives.PROXIMAL, _GAP)
    )
    return logprobs, gaps


def _measured(
  settings: train_step.ForwardSettings,
  params: Any,
  batch: packing.PackedBatch,
) -> dict[str, Float[Array, "M K B T"]]:
  return {
    objectives.PROXIMAL: train_step.batch_logprobs(settings, params, batch),
    _GAP: train_step.of_batch(
      functools.partial(_gaps, settings, params), batch
    ),
  }


def _gaps(
  settings: train_step.ForwardSettings,
  params: Any,
  batch: packing.PackedBatch,
) -> Float[Array, "B T"]:
  """Return how far each number is from the part of the CDF of its token."""
  model, hidden = train_step.final_hidden(settings, params, batch)
  head = model.head()
  # Position t is drawn from the state after t - 1.
  hidden = jnp.roll(hidden, 1, axis=1)
  rows, length = batch.tokens.shape
  size = min(_CHUNK, length)
  padding = -length % size

  def chunks(x: Array) -> Array:
    x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(rows, -1, size, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def of_chunk(chunk: tuple[Array, Array, Array]) -> Array:
    states, tokens, uniforms = chunk
    logits = jnp.dot(states, head, preferred_element_type=jnp.float32)
    probs = jax.nn.softmax(logits / settings.temperature)
    index = jnp.arange(probs.shape[-1], dtype=jnp.int32)[None, None]
    before = jnp.sum(jnp.where(index < tokens[..., None], probs, 0), axis=-1)
    own = jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
    return jnp.maximum(
      0, jnp.maximum(before - uniforms, uniforms - before - own)
    )

  found = jax.lax.map(
    of_chunk,
    (chunks(hidden), chunks(batch.tokens), chunks(batch.fields[UNIFORM])),
  )
  return jnp.moveaxis(found, 0, 1).reshape(rows, -1)[:, :length]
