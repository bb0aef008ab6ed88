"""Several passes over the minibatches of one train step."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Int

from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

# `train_step.update` with its first argument.
Pass = Callable[..., tuple[train_state.TrainState, train_step.Metrics]]


def update(
  num_epochs: int,
  one_pass: Pass,
  loss: objectives.Loss,
  diagnostic: objectives.Diagnostic,
  optimizers: train_state.Optimizers,
  state: train_state.TrainState,
  batch: packing.PackedBatch,
  policy_version: Int[Any, ""],
) -> tuple[train_state.TrainState, train_step.Metrics]:
  """Do what `train_step.update` does, num_epochs times over the same batch.

  What the stages have added to the batch stays the same in all passes. With one
  epoch this is `train_step.update` itself.

  Args:
    num_epochs: the number of passes.
    one_pass: makes a pass over the batch.
    loss: as in `train_step.update`.
    diagnostic: as in `train_step.update`.
    optimizers: as in `train_step.update`.
    state: the state before the step.
    batch: as in `train_step.update`.
    policy_version: the version of the weights in `state`.

  Returns:
    The new state, and metrics with one value per update, [num_epochs * M], in
    the order of the updates.
  """
  if num_epochs == 1:
    return one_pass(loss, diagnostic, optimizers, state, batch, policy_version)
  num_minibatches = len(batch.tokens)

  def epoch(
    state: train_state.TrainState, index: Int[Array, ""]
  ) -> tuple[train_state.TrainState, train_step.Metrics]:
    def counted(micro: objectives.Microbatch) -> objectives.Microbatch:
      count = micro.minibatch + index * num_minibatches
      return dataclasses.replace(micro, minibatch=count)

    return one_pass(
      lambda micro: loss(counted(micro)),
      lambda micro: diagnostic(counted(micro)),
      optimizers,
      state,
      batch,
      policy_version,
    )

  indices = jnp.arange(num_epochs, dtype=jnp.int32)
  # The batch is no input of the scan, which would copy a part of it each time.
  state, metrics = jax.lax.scan(epoch, state, indices)
  return state, {name: values.ravel() for name, values in metrics.items()}
