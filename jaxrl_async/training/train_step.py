"""The trainer's device programs, as pure functions of state and batch.

A train step runs its stages and then `update`. A stage computes something under
the weights from before the step and adds it to the batch; the proximal logprobs
are an example. `update` makes num_minibatches optimizer steps, each of which
sums the gradients of its microbatches. What is minimised is an argument, see
`objectives`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import optax

from jaxrl_async.algorithms import likelihood
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_state

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSettings:
  """What the forward pass depends on beside parameters and batch.

  Attributes:
    attention: a name of `packed_attention.IMPLEMENTATIONS`.
    layout: of the mesh it is compiled for; None leaves all to the compiler.
  """

  model: configs.ModelConfig
  compute_dtype: str
  remat: sections.Remat
  attention: str
  temperature: float
  vocab_chunk: int
  layout: mesh_lib.Layout | None = None

  def constrain(self, array: jax.Array, *axes: str | None) -> jax.Array:
    """The array with these logical axes, split as the layout says."""
    if self.layout is None:
      return array
    return self.layout.constrain(array, *axes)


def learning_rate_schedule(
  section: sections.OptimizerSection,
  *,
  total_steps: int = 0,
  decay: float = 1.0,
) -> Callable[[Any], Any]:
  """Linear warmup, then constant, or cosine to `decay` of the peak.

  Args:
    section: peak and warmup, in optimizer steps.
    total_steps: end of the cosine; 0 keeps the rate constant.
    decay: final rate over peak.
  """
  peak, warmup = section.learning_rate, section.warmup_steps
  # The first update already moves: warmup starts at peak / (warmup + 1).
  ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
  if total_steps and decay != 1.0:
    after = optax.cosine_decay_schedule(
      peak, max(total_steps - warmup, 1), alpha=decay
    )
  else:
    after = optax.constant_schedule(peak)
  return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(
  section: sections.OptimizerSection, schedule: Callable[[Any], Any]
) -> optax.GradientTransformation:
  """Global-norm clipping, then AdamW or Muon (AdamW for what is no matrix)."""
  if section.name is sections.OptimizerName.MUON:
    optimizer = optax.contrib.muon(
      schedule,
      adam_b1=section.b1,
      adam_b2=section.b2,
      weight_decay=section.weight_decay,
      consistent_rms=0.2,  # one learning rate for both, arXiv:2502.16982
      muon_weight_dimension_numbers=muon_dimensions,
      mu_dtype=section.state_dtype,
    )
  else:
    optimizer = optax.adamw(
      schedule,
      b1=section.b1,
      b2=section.b2,
      eps=section.eps,
      weight_decay=section.weight_decay,
      mu_dtype=section.state_dtype,
    )
  return optax.chain(
    optax.clip_by_global_norm(section.max_grad_norm), optimizer
  )


def make_optimizers(
  models: Mapping[str, train_state.ModelSettings],
  *,
  total_steps: int = 0,
  decay: float = 1.0,
) -> dict[str, optax.GradientTransformation]:
  """The optimizer of each model that is trained, by the model's name.

  Args:
    models: by name.
    total_steps: as of `learning_rate_schedule`.
    decay: as of `learning_rate_schedule`.
  """

  def optimizer(section: sections.OptimizerSection):
    schedule = learning_rate_schedule(
      section, total_steps=total_steps, decay=decay
    )
    return make_optimizer(section, schedule)

  return {
    name: optimizer(settings.optimizer)
    for name, settings in models.items()
    if settings.optimizer is not None
  }


def muon_dimensions(params: Any) -> Any:
  """Which axes of each parameter Muon orthogonalises; None leaves it to AdamW.

  Matrices of the blocks only, layers kept apart; heads belong to the side
  they are summed on.
  """
  axes = {
    "query": ((1,), (2, 3)),
    "key": ((1,), (2, 3)),
    "value": ((1,), (2, 3)),
    "output": ((1, 2), (3,)),
    "gate": ((1,), (2,)),
    "up": ((1,), (2,)),
    "down": ((1,), (2,)),
  }

  def dimensions(path: tuple[Any, ...], _: Any) -> Any:
    names = [entry.key for entry in path]
    if names[0] != "layers" or names[-1] not in axes:
      return None
    reduction, output = axes[names[-1]]
    return optax.contrib.MuonDimensionNumbers(reduction, output)

  return jax.tree_util.tree_map_with_path(dimensions, params)


def token_logprobs(
  settings: ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Logprobs and entropies of one packed microbatch."""
  model = transformer.bind(
    settings.model, params, is_stacked=True, remat=settings.remat
  )
  length = batch.tokens.shape[1]
  # Nothing learns from padding: each sees itself alone, and costs no block.
  start = jnp.where(
    batch.segment_ids == 0,
    jnp.arange(length, dtype=jnp.int32)[None],
    batch.segment_start,
  )
  mix = packed_attention.over_rows(
    settings.attention, start, settings.model.num_heads, settings.layout
  )

  def attend(
    layer: Any, query: Array, key: Array, value: Array
  ) -> tuple[Array, None]:
    del layer
    return mix(query, key, value), None

  hidden, _ = model.hidden(
    _embedded(settings, model, batch.tokens),
    batch.positions,
    attend,
    lambda x: settings.constrain(x, "batch", "tokens", None),
  )
  return likelihood.token_logprobs_and_entropy(
    hidden,
    model.head(),
    batch.tokens,
    batch.segment_ids,
    temperature=settings.temperature,
    vocab_chunk=settings.vocab_chunk,
    layout=settings.layout,
  )


def _embedded(
  settings: ForwardSettings,
  model: transformer.Decoder,
  tokens: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
  """Looks up tokens in a table whose columns lie where other rows are.

  Each device looks up its columns of all those rows, then columns are exchanged
  for rows: the table would be more to gather, and its gradient to sum.
  """
  dtype = jnp.dtype(settings.compute_dtype)
  if settings.layout is None:
    return model.embed(tokens, dtype)
  by_columns = settings.layout.freed("batch", "tokens", of="embed")
  tokens = by_columns.constrain(tokens, "batch", "tokens")
  columns = model.embed(tokens, dtype)
  columns = by_columns.constrain(columns, "batch", "tokens", "embed")
  return settings.constrain(columns, "batch", "tokens", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """A device program of a train step that runs before its first update.

  What it returns joins the batch: arrays [M, K, B, T] by name, which are new
  fields of the batch or replace its own arrays. A stage can compute logprobs
  under the weights of any model that the trainer holds, or advantages from what
  an earlier stage has added.

  Attributes:
    name: of its time, as `time/<name>_s`, and in the picture.
    run: a function of the forward settings of each model by name, the
      parameters of each model before the step by name, and the batch.
  """

  name: str
  run: Callable[
    [
      Mapping[str, ForwardSettings],
      Mapping[str, transformer.Params],
      packing.PackedBatch,
    ],
    dict[str, Float[Array, "M K B T"]],
  ]


def batch_logprobs(
  settings: ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> Float[Array, "M K B T"]:
  """Logprobs of every token of a train step's batch under one model."""

  def minibatch_logprobs(minibatch: packing.PackedBatch) -> Array:
    def step(k: Array, logprobs: Array) -> Array:
      micro = jax.tree.map(lambda x: x[k], minibatch)
      return logprobs.at[k].set(token_logprobs(settings, params, micro)[0])

    used = packing.num_used_microbatches(minibatch.segment_ids)
    zeros = jnp.zeros(minibatch.tokens.shape, jnp.float32)
    return jax.lax.fori_loop(0, used, step, zeros)

  return jax.lax.map(minibatch_logprobs, batch)


def logprobs_stage(name: str, *, model: str, field: str) -> Stage:
  """A stage that adds the logprobs of every token under one of the models.

  Args:
    name: of the stage.
    model: name of the model in the train state.
    field: of the batch that the logprobs become.
  """

  def run(
    settings: Mapping[str, ForwardSettings],
    params: Mapping[str, transformer.Params],
    batch: packing.PackedBatch,
  ) -> dict[str, Float[Array, "M K B T"]]:
    return {field: batch_logprobs(settings[model], params[model], batch)}

  return Stage(name=name, run=run)


PROXIMAL_STAGE = logprobs_stage(
  "proximal", model=train_state.POLICY, field=objectives.PROXIMAL
)


def _in_memory_of(tree: Any, like: Any) -> Any:
  """The arrays, each in the memory (a device's or its host's) of the other."""
  return jax.tree.map(
    lambda x, y: jax.device_put(x, jax.typeof(y).memory_space), tree, like
  )


def _apply_gradients(
  optimizers: train_state.Optimizers,
  state: train_state.TrainState,
  gradients: Mapping[str, transformer.Params],
  loss: Float[Array, ""],
) -> tuple[train_state.TrainState, Metrics]:
  """One optimizer step, or none if loss or gradient is not finite.

  Args:
    optimizers: of the models that are trained, by name.
    state: before the step.
    gradients: of the trainable parameters of the same models.
    loss: that they are gradients of.
  """
  norm = optax.tree.norm(gradients)
  is_good = jnp.isfinite(loss) & jnp.isfinite(norm)
  stepped = {
    name: _stepped(optimizers[name], state.models[name], own, is_good)
    for name, own in gradients.items()
  }
  after = train_state.TrainState(models={**state.models, **stepped})
  return after, {
    "loss": loss,
    "grad_norm": norm,
    "bad_updates": (~is_good).astype(jnp.float32),
  }


def _stepped(
  optimizer: optax.GradientTransformation,
  state: train_state.ModelState,
  gradients: transformer.Params,
  is_good: Bool[Array, ""],
) -> train_state.ModelState:
  """One model after an optimizer step, or as it was unless `is_good`.

  An optimizer state that lies in the host's memory is brought to the device for
  the step and taken back afterwards.
  """
  before = jax.device_put(state.opt_state, jax.memory.Space.Device)
  # Optax multiplies by its int32 step count.
  with jax.numpy_dtype_promotion("standard"):
    updates, after = optimizer.update(gradients, before, state.trainable)
  trainable, opt_state = _in_memory_of(
    jax.tree.map(
      lambda new, old: jnp.where(is_good, new, old),
      (optax.apply_updates(state.trainable, updates), after),
      (state.trainable, before),
    ),
    (state.trainable, state.opt_state),
  )
  return dataclasses.replace(state, trainable=trainable, opt_state=opt_state)


def _accumulate(
  loss_fn: Callable[..., tuple[jax.Array, Metrics]],
  params: dict[str, transformer.Params],
  microbatches: Any,
  num_used: Int[Array, ""],
) -> tuple[Float[Array, ""], dict[str, transformer.Params], Metrics]:
  """Sums loss, gradients and metric sums over the first microbatches."""
  gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
  first = jax.tree.map(lambda x: x[0], microbatches)
  shapes = jax.eval_shape(gradient_fn, params, first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  def step(k: Array, total: Any) -> Any:
    micro = jax.tree.map(lambda x: x[k], microbatches)
    return jax.tree.map(jnp.add, total, gradient_fn(params, micro))

  (loss, sums), gradients = jax.lax.fori_loop(0, num_used, step, zeros)
  return loss, gradients, sums


def update(
  settings: ForwardSettings,
  loss: objectives.Loss,
  diagnostic: objectives.Diagnostic,
  optimizers: train_state.Optimizers,
  state: train_state.TrainState,
  batch: packing.PackedBatch,
  policy_version: Int[Any, ""],
) -> tuple[train_state.TrainState, Metrics]:
  """The optimizer steps of one train step, one for each minibatch.

  The loss is differentiated with respect to the trainable parameters of every
  model. Only the policy has a forward pass here; that of a trained critic would
  give the loss its `values`.

  Args:
    settings: of the policy's forward pass.
    loss: what is minimised.
    diagnostic: what is measured beside it.
    optimizers: of the models that are trained, by name.
    state: before the step.
    batch: [M, K, B, T] arrays: minibatches of microbatches; with the fields
      that the loss needs.
    policy_version: of `state`.

  Returns:
    The new state, and for each minibatch [M] the loss, the gradient norm,
    whether the update was skipped, the sums of loss and diagnostic, and the
    minibatch's totals.
  """

  def minibatch_step(
    state: train_state.TrainState, minibatch: tuple[packing.PackedBatch, Any]
  ) -> tuple[train_state.TrainState, Metrics]:
    packed, index = minibatch
    totals = objectives.minibatch_totals(packed)

    def loss_fn(
      trainable: Mapping[str, transformer.Params], batch: packing.PackedBatch
    ) -> tuple[Array, Metrics]:
      params = train_state.merged(
        trainable[train_state.POLICY], state.policy.frozen
      )
      logprobs, entropy = token_logprobs(settings, params, batch)
      micro = objectives.Microbatch(
        logprobs=logprobs,
        entropy=entropy,
        values=None,
        batch=batch,
        totals=totals,
        policy_version=policy_version,
        minibatch=index,
      )
      value, sums = loss(micro)
      return value, {**sums, **diagnostic(micro)}

    value, gradients, sums = _accumulate(
      loss_fn,
      state.trainable,
      packed,
      packing.num_used_microbatches(packed.segment_ids),
    )
    state, metrics = _apply_gradients(optimizers, state, gradients, value)
    return state, {**metrics, **sums, **totals}

  indices = jnp.arange(len(batch.tokens), dtype=jnp.int32)
  return jax.lax.scan(minibatch_step, state, (batch, indices))


def published_params(
  params: transformer.Params,
  num_layers: int,
  dtype: str,
  weights: sections.WeightFormat,
) -> transformer.Params:
  """What travels to the engines: layers unstacked, cast. Call it in a jit.

  Where the config asks for it the matrices are quantised.

  The outputs of the jit are fresh buffers, so that the trainer may go on to
  donate its own.
  """
  unstacked = transformer.unstack(params, num_layers)
  return quantization.quantize(unstacked, weights, dtype)


def make_publish(
  model: configs.ModelConfig,
  layout: mesh_lib.Layout,
  *,
  dtype: str,
  weights: sections.WeightFormat,
) -> Any:
  """The program `published_params`, for parameters that lie in this layout.

  Training and serving both make an engine's weights with it, so that what is
  served is what the run's own engine was given.
  """
  axes = transformer.logical_axes(model, is_stacked=False)
  return jax.jit(
    functools.partial(
      published_params,
      num_layers=model.num_layers,
      dtype=dtype,
      weights=weights,
    ),
    out_shardings=mesh_lib.shardings(
      layout.mesh, layout.rules, quantization.logical_axes(axes, weights)
    ),
  )
