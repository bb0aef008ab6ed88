"""Gradients of a minibatch, and the optimizer step that they make."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int
import optax

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.training import packing
from jaxrl_async.training import train_state

Metrics = dict[str, jax.Array]


def apply(
  optimizers: train_state.Optimizers,
  state: train_state.TrainState,
  gradients: Mapping[str, transformer.Params],
  loss: Float[Array, ""],
  learns: Mapping[str, Bool[Array, ""]] | None = None,
  has_loss: Bool[Array, ""] | bool = True,
) -> tuple[train_state.TrainState, Metrics]:
  """Make one optimizer step, or none if loss or gradient is not finite.

  Args:
    learns: by name, whether a model makes the step. One that is not named does.
    has_loss: whether any token has a share of the loss. Without one no model
      makes the step: momentum and decay would move it although nothing was
      learned.

  Returns:
    The new state, and loss, the policy's gradient norm and whether the step was
    skipped. The gradient norm of any other model is `<name>_grad_norm`.
  """
  norms = {name: optax.tree.norm(own) for name, own in gradients.items()}
  is_good = jnp.isfinite(loss)
  for norm in norms.values():
    is_good &= jnp.isfinite(norm)
  learns = learns or {}
  stepped = {
    name: _stepped(
      optimizers[name],
      state.models[name],
      own,
      is_good & learns.get(name, True) & has_loss,
    )
    for name, own in gradients.items()
  }
  after = train_state.TrainState(models={**state.models, **stepped})
  return after, {
    "loss": loss,
    "bad_updates": (~is_good).astype(jnp.float32),
    "grad_norm": norms.pop(train_state.POLICY),
    **{f"{name}_grad_norm": norm for name, norm in norms.items()},
  }


def _stepped(
  optimizer: optax.GradientTransformation,
  state: train_state.ModelState,
  gradients: transformer.Params,
  is_good: Bool[Array, ""],
) -> train_state.ModelState:
  """Return one model after an optimizer step, or unchanged unless `is_good`."""
  before = train_state.on_device(state.opt_state)
  # Optax multiplies floats by its int32 step count. The strict dtype promotion
  # of the tests forbids that.
  with jax.numpy_dtype_promotion("standard"):
    updates, after = optimizer.update(gradients, before, state.trainable)
  trainable, opt_state = train_state.in_memory_of(
    jax.tree.map(
      lambda new, old: jnp.where(is_good, new, old),
      (optax.apply_updates(state.trainable, updates), after),
      (state.trainable, before),
    ),
    (state.trainable, state.opt_state),
  )
  return dataclasses.replace(state, trainable=trainable, opt_state=opt_state)


def accumulate(
  loss_fn: Callable[..., tuple[jax.Array, Metrics]],
  params: dict[str, transformer.Params],
  microbatches: packing.PackedBatch,
  num_used: Int[Array, ""],
  layout: mesh_lib.Layout | None,
) -> tuple[Float[Array, ""], dict[str, transformer.Params], Metrics]:
  """Sum loss, gradients and metrics over the first `num_used` microbatches.

  Devices along data-parallel mesh axes add up the gradients of their own rows,
  and sum the results over devices once, not at each microbatch.

  Args:
    loss_fn: takes the parameters, and a microbatch or the rows of it that such
      a device has. Returns loss and metrics, which are sums over rows. Its
      arrays are laid out by `layout.in_data_parallel()`.
    layout: of the program; None leaves it all to the compiler.
  """
  axes = () if layout is None else layout.data_parallel
  if layout is None or not axes:
    return _sums(loss_fn, params, microbatches, num_used)

  def in_data_parallel(*arguments: Any) -> Any:
    return jax.lax.psum(_sums(loss_fn, *arguments), axes)

  return jax.shard_map(
    in_data_parallel,
    mesh=layout.mesh,
    in_specs=(P(), P(None, axes), P()),
    out_specs=P(),
    axis_names=set(axes),
    check_vma=False,
  )(params, microbatches, num_used)


def _sums(
  loss_fn: Callable[..., tuple[jax.Array, Metrics]],
  params: dict[str, transformer.Params],
  microbatches: packing.PackedBatch,
  num_used: Int[Array, ""],
) -> tuple[Float[Array, ""], dict[str, transformer.Params], Metrics]:
  """Return what `accumulate` does, of the rows that are here."""
  gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
  first = jax.tree.map(lambda x: x[0], microbatches)
  shapes = jax.eval_shape(gradient_fn, params, first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  def step(k: Array, total: Any) -> Any:
    micro = jax.tree.map(lambda x: x[k], microbatches)
    return jax.tree.map(jnp.add, total, gradient_fn(params, micro))

  (loss, sums), gradients = jax.lax.fori_loop(0, num_used, step, zeros)
  return loss, gradients, sums
