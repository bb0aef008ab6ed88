"""The trainer's device programs, as pure functions of state and batch.

A train step runs its stages and then `update`. A stage computes arrays with the
weights from before the step, for example the proximal logprobs, and adds them
to the batch. `update` makes num_minibatches optimizer steps, each of which sums
the gradients of its microbatches. The loss is an argument; see `objectives`.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import optax

from jaxrl_async.algorithms import likelihood
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import experts as experts_lib
from jaxrl_async.models import gated_delta
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.training import gradients as gradients_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import optax_schedules
from jaxrl_async.training import packing
from jaxrl_async.training import train_state

Metrics = gradients_lib.Metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForwardSettings:
  """The settings of the forward pass.

  Attributes:
    attention: a name of `packed_attention.IMPLEMENTATIONS`.
    layout: the mesh to compile for, and its sharding rules. None leaves all
      shardings to the compiler.
  """

  model: configs.ModelConfig
  compute_dtype: str
  remat: sections.Remat
  attention: str
  temperature: float
  vocab_chunk: int
  layout: mesh_lib.Layout | None = None

  def constrain(self, array: jax.Array, *axes: str | None) -> jax.Array:
    """Return the array, sharded by its logical axes as the layout says."""
    if self.layout is None:
      return array
    return self.layout.constrain(array, *axes)

  def in_data_parallel(self) -> "ForwardSettings":
    """Return the settings for a loss that `gradients.accumulate` is given."""
    if self.layout is None:
      return self
    return dataclasses.replace(self, layout=self.layout.in_data_parallel())


def learning_rate_schedule(
  section: sections.OptimizerSection,
  *,
  total_steps: int = 0,
  decay: float = 1.0,
) -> Callable[[Any], Any]:
  """Return a schedule of linear warmup, then a constant or a cosine decay.

  A section with a `rate_schedule` has that in place of it.

  Args:
    total_steps: the optimizer step at which the cosine ends. 0 keeps the rate
      constant.
  """
  peak, warmup = section.learning_rate, section.warmup_steps
  if section.rate_schedule:
    return optax_schedules.of_entry(
      "rate_schedule", peak, section.rate_schedule.to_dict()
    )
  # Warmup starts at peak / (warmup + 1), so that the first update has an
  # effect.
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
  """Return clipping by global norm followed by AdamW or Muon.

  Muon applies to the matrices of the blocks; all other parameters use AdamW.
  Weights decay as in AdamW (arXiv:1711.05101), those of `decayed` only.
  """
  if section.name is sections.OptimizerName.MUON:
    direction = optax.contrib.muon(
      1.0,
      adam_b1=section.b1,
      adam_b2=section.b2,
      eps=section.eps,
      consistent_rms=0.2,  # one learning rate for both, arXiv:2502.16982
      muon_weight_dimension_numbers=muon_dimensions,
      mu_dtype=section.state_dtype,
    )
  else:
    direction = optax.adam(
      1.0,
      b1=section.b1,
      b2=section.b2,
      eps=section.eps,
      mu_dtype=section.state_dtype,
    )
  return optax.chain(
    optax.clip_by_global_norm(section.max_grad_norm),
    direction,
    # The direction is downhill, and so is that of the decay.
    optax.add_decayed_weights(-section.weight_decay, decayed),
    optax.scale_by_schedule(schedule),
  )


def decayed(params: Any) -> Any:
  """Return for each parameter whether weight decay applies to it.

  It does to the matrices that tokens are multiplied by: those of the blocks,
  of adapters, and an output head. Norms, biases, the embedding and scalar heads
  do not decay.
  """

  def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
    names = [entry.key for entry in path]
    is_kernel = names[-1] in (*quantization.NUM_CONTRACTED, "router")
    return is_kernel or lora_lib.is_adapter(names)

  return jax.tree_util.tree_map_with_path(is_matrix, params)


def make_optimizers(
  models: Mapping[str, train_state.ModelSettings],
  *,
  total_steps: int = 0,
  decay: float = 1.0,
) -> dict[str, optax.GradientTransformation]:
  """Return the optimizer of each trained model by the model's name."""

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
  """Return the axes of each parameter that Muon orthogonalises.

  Muon gets only the matrices of the blocks, each layer by itself. The head axes
  of a projection count to its output for queries, keys and values, and to its
  input for the output projection. All other parameters get None and are left to
  AdamW, routers included. Each expert is a matrix of its own.
  """
  kernels = configs.PROJECTIONS | configs.EXPERT_KERNELS

  def dimensions(path: tuple[Any, ...], _: Any) -> Any:
    names = [entry.key for entry in path]
    found = kernels.get(names[-1])
    if names[0] != "layers" or found is None:
      return None
    first = 1 + len(found.groups)  # 0 is the axis of layers
    order = tuple(range(first, 1 + len(found.axes)))
    inputs = len(found.inputs)
    return optax.contrib.MuonDimensionNumbers(order[:inputs], order[inputs:])

  return jax.tree_util.tree_map_with_path(dimensions, params)


def final_hidden(
  settings: ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> tuple[transformer.Decoder, Float[Array, "B T D"]]:
  """Return a decoder, and its last hidden states of one packed microbatch."""
  model = transformer.bind(
    settings.model, params, is_stacked=True, remat=settings.remat
  )
  length = batch.tokens.shape[1]
  # Nothing is learned from padding. Each padding token attends only to itself,
  # so that a kernel can skip the other blocks.
  start = jnp.where(
    batch.segment_ids == 0,
    jnp.arange(length, dtype=jnp.int32)[None],
    batch.segment_start,
  )
  attend, windows = packed_attention.over_layers(
    settings.attention,
    start,
    settings.model.num_heads,
    settings.layout,
    settings.model.windows_within(length),
    settings.model.attention_soft_cap,
  )
  ages = jnp.arange(length, dtype=jnp.int32)[None] - start
  hidden, _ = model.hidden(
    _embedded(settings, model, batch.tokens),
    batch.positions,
    attend,
    lambda x: settings.constrain(x, "batch", "tokens", None),
    per_layer=windows,
    recur=lambda _, inputs, filters, activation: gated_delta.over_rows(
      inputs, filters, activation, ages
    ),
    placement=None
    if settings.layout is None
    else experts_lib.Placement(settings.layout, ("batch", "tokens")),
  )
  return model, hidden


def token_logprobs(
  settings: ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Return the logprobs and entropies of one packed microbatch."""
  model, hidden = final_hidden(settings, params, batch)
  return _likelihood(settings, model, hidden, batch)


def _likelihood(
  settings: ForwardSettings,
  model: transformer.Decoder,
  hidden: Float[Array, "B T D"],
  batch: packing.PackedBatch,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
  """Return the logprobs and entropies that a decoder's states give."""
  return likelihood.token_logprobs_and_entropy(
    hidden,
    model.head(),
    batch.tokens,
    batch.segment_ids,
    temperature=settings.temperature,
    vocab_chunk=settings.vocab_chunk,
    layout=settings.layout,
    divisor=settings.model.logits_divisor,
    soft_cap=settings.model.logits_soft_cap,
  )


def token_scalars(
  settings: ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> Float[Array, "B T"]:
  """Return what a scalar head makes of the state after each token."""
  model, hidden = final_hidden(settings, params, batch)
  return model.scalars(hidden)


def _embedded(
  settings: ForwardSettings,
  model: transformer.Decoder,
  tokens: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
  """Look up tokens in a table whose columns are split over devices.

  The mesh axes that split the table's columns also split the rows of the batch.
  Each device looks up its columns for the rows of all these devices. The
  devices then exchange columns for tokens and for rows. This moves less data
  than gathering the table and summing its gradient.
  """
  dtype = jnp.dtype(settings.compute_dtype)
  if settings.layout is None:
    return model.embed(tokens, dtype)
  by_columns = settings.layout.freed("batch", "tokens", of="embed")
  tokens = by_columns.constrain(tokens, "batch", "tokens")
  columns = model.embed(tokens, dtype)
  columns = by_columns.constrain(columns, "batch", "tokens", "embed")
  # First for tokens, then for rows: for both at once, XLA would gather the
  # embeddings of all rows and tokens on every device.
  by_tokens = settings.layout.freed("batch", of="embed")
  by_tokens = by_tokens.freed("embed", of="tokens")
  columns = by_tokens.constrain(columns, "batch", "tokens", "embed")
  return settings.constrain(columns, "batch", "tokens", None)


Fields = dict[str, Float[Array, "M K B T"]]


class Given(NamedTuple):
  """What a stage computes from."""

  settings: Mapping[str, ForwardSettings]
  params: Mapping[str, transformer.Params]
  batch: packing.PackedBatch
  version: Int[Any, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
  """A device program that runs before the first update of a train step.

  A stage can compute logprobs under any model of the train state, or advantages
  from the fields that an earlier stage has added.

  Attributes:
    fields: returns arrays by name. They replace arrays of the batch or become
      new fields.
  """

  name: str
  fields: Callable[[Given], Fields]

  def run(self, *given: Any) -> Fields:
    """Return the fields; the arguments are those of `Given`."""
    return self.fields(Given(*given))


def batch_logprobs(
  settings: ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> Float[Array, "M K B T"]:
  """Return the logprobs of all tokens of a step's batch under one model."""
  return of_batch(
    lambda micro: token_logprobs(settings, params, micro)[0], batch
  )


def of_batch(
  of_microbatch: Callable[[packing.PackedBatch], Float[Array, "B T"]],
  batch: packing.PackedBatch,
) -> Float[Array, "M K B T"]:
  """Return what a forward pass gives for each token of a step's batch.

  Args:
    batch: [M, K, B, T] arrays. Microbatches that are not in use get 0.
  """

  def of_minibatch(minibatch: packing.PackedBatch) -> Array:
    def step(k: Array, found: Array) -> Array:
      micro = jax.tree.map(lambda x: x[k], minibatch)
      return found.at[k].set(of_microbatch(micro))

    used = packing.num_used_microbatches(minibatch.segment_ids)
    zeros = jnp.zeros(minibatch.tokens.shape, jnp.float32)
    return jax.lax.fori_loop(0, used, step, zeros)

  return jax.lax.map(of_minibatch, batch)


def logprobs_stage(name: str, *, model: str, field: str) -> Stage:
  """Return a stage that adds the logprobs of all tokens under one model."""

  def run(given: Given) -> Fields:
    settings, params, batch, _ = given
    return {field: batch_logprobs(settings[model], params[model], batch)}

  return Stage(name=name, fields=run)


PROXIMAL_STAGE = logprobs_stage(
  "proximal", model=train_state.POLICY, field=objectives.PROXIMAL
)


# Returns the critic's prediction for each token of a microbatch, from the
# critic's parameters and the policy's last hidden states.
ValueFunction = Callable[
  [transformer.Params, Float[Array, "B T D"], packing.PackedBatch],
  Float[Array, "B T"],
]


def _evaluated(
  settings: ForwardSettings,
  params_of: Callable[[str], transformer.Params],
  batch: packing.PackedBatch,
  value_function: ValueFunction | None,
) -> tuple[
  Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"] | None
]:
  """Return logprobs, entropies and values of one packed microbatch."""
  model, hidden = final_hidden(settings, params_of(train_state.POLICY), batch)
  values = None
  if settings.model.has_scalar_head:
    values = model.scalars(hidden)
    logprobs = entropy = jnp.zeros_like(values)
  else:
    logprobs, entropy = _likelihood(settings, model, hidden, batch)
  if value_function is not None:
    values = value_function(params_of(train_state.CRITIC), hidden, batch)
  return logprobs, entropy, values


def update(
  settings: ForwardSettings,
  loss: objectives.Loss,
  diagnostic: objectives.Diagnostic,
  optimizers: train_state.Optimizers,
  state: train_state.TrainState,
  batch: packing.PackedBatch,
  policy_version: Int[Any, ""],
  *,
  value_function: ValueFunction | None = None,
  learns: Mapping[str, Bool[Array, ""]] | None = None,
  num_epochs: int = 1,
) -> tuple[train_state.TrainState, Metrics]:
  """Make the optimizer steps of one train step, one for each minibatch.

  With several epochs this is done several times, with the same batch: what the
  stages have added to it stays.

  The loss is differentiated with respect to the trainable parameters of every
  model. The policy has a forward pass here, and so has a critic.

  Args:
    value_function: gives the loss its `values`. None without a critic.

  Returns:
    The new state, and metrics with one value per optimizer step in their order,
    [num_epochs * M]: the loss, the gradient norm, whether the update was
    skipped, the sums of the loss and the diagnostic, and the minibatch's
    totals.
  """

  def minibatch_step(
    state: train_state.TrainState, minibatch: tuple[packing.PackedBatch, Any]
  ) -> tuple[train_state.TrainState, Metrics]:
    packed, index = minibatch
    totals = objectives.minibatch_totals(packed)

    def loss_fn(
      trainable: Mapping[str, transformer.Params], batch: packing.PackedBatch
    ) -> tuple[Array, Metrics]:
      def params_of(name: str) -> transformer.Params:
        return train_state.merged(trainable[name], state.models[name].frozen)

      logprobs, entropy, values = _evaluated(
        settings.in_data_parallel(), params_of, batch, value_function
      )
      micro = objectives.Microbatch(
        logprobs=logprobs,
        entropy=entropy,
        values=values,
        batch=batch,
        totals=totals,
        policy_version=policy_version,
        minibatch=index,
      )
      value, sums = loss(micro)
      return value, {**sums, **diagnostic(micro)}

    value, gradients, sums = gradients_lib.accumulate(
      loss_fn,
      state.trainable,
      packed,
      packing.num_used_microbatches(packed.segment_ids),
      settings.layout,
    )
    state, metrics = gradients_lib.apply(
      optimizers,
      state,
      gradients,
      value,
      learns,
      has_loss=totals["num_loss_tokens"] > 0,
    )
    return state, {**metrics, **sums, **totals}

  indices = jnp.arange(len(batch.tokens), dtype=jnp.int32)
  if num_epochs == 1:
    return jax.lax.scan(minibatch_step, state, (batch, indices))

  def epoch(
    state: train_state.TrainState, first: Int[Array, ""]
  ) -> tuple[train_state.TrainState, Metrics]:
    return jax.lax.scan(minibatch_step, state, (batch, first + indices))

  # The batch is no input of the outer scan, which would need a copy of it for
  # each epoch.
  firsts = len(indices) * jnp.arange(num_epochs, dtype=jnp.int32)
  state, metrics = jax.lax.scan(epoch, state, firsts)
  return state, {name: values.ravel() for name, values in metrics.items()}
