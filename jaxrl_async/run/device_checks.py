"""What a config asks of the devices it is to run on, before compiling."""

import math
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import topology
from jaxrl_async.models import configs
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.planning import memory_estimate
from jaxrl_async.run import config_checks
from jaxrl_async.run import initial_params
from jaxrl_async.training import train_step
from jaxrl_async.training import trainer as trainer_lib


def check_sharding(
  config: sections.Config, model: configs.ModelConfig, num_devices: int
) -> None:
  """Checks that every array of the model divides over its mesh axes.

  Raises:
    ConfigError: names the rule, or the mesh axis, that does not fit.
  """
  sizes = {
    "vocab": (model.vocab_size, "vocabulary"),
    "embed": (model.model_dim, "model dimension"),
    "heads": (model.num_heads, "number of heads"),
    "kv_heads": (model.num_kv_heads, "number of key-value heads"),
    "head": (model.head_dim, "head size"),
    "mlp": (model.mlp_dim, "MLP dimension"),
    "layers": (model.num_layers, "number of layers"),
  }
  shapes = config_checks.slice_shapes(config.mesh, num_devices)
  for side, shape in zip(("train", "rollout"), shapes, strict=True):
    rules = getattr(config.mesh, f"{side}_rules")
    is_stacked = side == "train"
    arrays = transformer.logical_axes(model, is_stacked=is_stacked)
    arrays = jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, tuple))
    for axes in (*arrays, *transformer.ACTIVATION_AXES):
      try:
        mesh_lib.spec(rules, axes)
      except ValueError as error:
        raise sections.ConfigError(f"mesh.{side}_rules.{error}") from error
    for name, (size, what) in sizes.items():
      if name == "layers" and not is_stacked:
        continue
      axes = getattr(rules, name)
      sections.require(
        size % shape.parts(axes) == 0,
        config_checks.mesh_fields(side, shape, axes),
        f"{shape.parts(axes)} does not divide the {what} of {size} of"
        f" {config.model.name}; use a number that does, or"
        f" mesh.{side}_rules.{name}=()",
      )


def check_weights(
  weights: sections.WeightFormat, mesh: jax.sharding.Mesh
) -> None:
  """Tries quantised weights on a rollout device, if it is there.

  Raises:
    ConfigError: it cannot use them.
  """
  device = mesh.devices.flat[0]
  if topology.is_described(device):
    return
  reason = quantization.unsupported(weights, device)
  sections.require(
    not reason,
    "rollout.weights",
    f"{device.device_kind} cannot use {weights.value} ({reason}); use float",
  )


def num_bytes(shapes: Any) -> int:
  """Of all arrays of these shapes and types."""
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes)
  )


def training_memory(
  config: sections.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
  *,
  microbatches: int,
) -> memory_estimate.Estimate:
  """What the training slice needs of a device, before anything compiles.

  Args:
    config: validated.
    model: with the tokenizer's vocabulary.
    mesh: of the training slice.
    microbatches: of a minibatch, at most.
  """
  section = config.train.optimizer
  optimizer = train_step.make_optimizer(
    section, train_step.learning_rate_schedule(section)
  )
  state = aot.placed(
    trainer_lib.abstract_train_state(model, optimizer),
    trainer_lib.state_sharding(
      mesh,
      model,
      optimizer,
      initial_params.shardings(config, model, mesh),
      offload=section.offload,
    ),
  )
  rows = config.train.rows_per_microbatch * microbatches
  return memory_estimate.training(
    model,
    mesh_lib.shape_of(mesh),
    config.mesh.train_rules,
    config.train,
    config.model,
    weights=aot.bytes_a_device(state.params),
    optimizer=aot.bytes_a_device(state.opt_state),
    tokens_per_step=rows
    * config.algorithm.num_minibatches
    * config.train.tokens_per_row,
  )


def published_bytes(config: sections.Config, model: configs.ModelConfig) -> int:
  """Of the engine's weights, before they are sharded."""
  published = jax.eval_shape(
    lambda: train_step.published_params(
      transformer.init_params(model, jax.random.key(0)),
      model.num_layers,
      config.rollout.dtype,
      config.rollout.weights,
    )
  )
  return num_bytes(published)


def _memory_of(mesh: jax.sharding.Mesh) -> int | float | None:
  """Bytes of each device; those of a CPU share the host's memory."""
  device = mesh.devices.flat[0]
  if device.platform == "cpu":
    return memory_estimate.host_bytes() / mesh.size
  return topology.memory_bytes(device)


def check_rollout_memory(
  config: sections.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
) -> None:
  """Refuses an engine that the devices of its mesh cannot hold.

  Raises:
    ConfigError: one line that names the largest part.
  """
  parts = memory_estimate.rollout(
    model,
    mesh_lib.shape_of(mesh),
    config.mesh.rollout_rules,
    config.rollout,
    published=published_bytes(config, model),
  )
  memory_estimate.check_rollout(parts, config.rollout, _memory_of(mesh))


def check_training_memory(
  config: sections.Config,
  estimate: memory_estimate.Estimate,
  mesh: jax.sharding.Mesh,
) -> None:
  """Refuses an update that the devices of the training mesh cannot hold.

  Raises:
    ConfigError: one line that names the largest part.
  """
  limit = _memory_of(mesh)
  memory_estimate.check(estimate, limit)
  memory_estimate.check_warm_start(
    config.warm_start,
    config.train.tokens_per_row,
    None if limit is None else limit * mesh.size,
  )
