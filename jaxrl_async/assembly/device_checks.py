"""Checks of a setup against its devices, made before anything is compiled."""

import math
from typing import Any

import jax

from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import mesh_shape
from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import topology
from jaxrl_async.devices import xla_flags
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.planning import memory_estimate
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import publishing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step


def check_repeats(config: sections.Config, platform: str) -> None:
  """Check that devices repeat their bits, if the run promises that.

  Args:
    config: of the run.
    platform: of the devices of this process.

  Raises:
    ConfigError: XLA was started without the flag that a GPU needs.
  """
  has_gpus = platform == "gpu" or bool(config.cluster.replica_gpus)
  sections.require(
    not (config.run.exact_resume and has_gpus)
    or xla_flags.REPEATS_ON_GPU in xla_flags.current(),
    "run.exact_resume",
    "a GPU repeats its bits only with a flag of XLA; set"
    f" XLA_FLAGS={xla_flags.REPEATS_ON_GPU}",
  )


def check_replicas(config: sections.Config, platform: str) -> None:
  """Check that replicas do not generate on a CPU while a GPU or TPU trains.

  Args:
    config: of the run.
    platform: of the devices that train.

  Raises:
    ConfigError: replicas in other processes ask for no accelerator.
  """
  section = config.cluster
  if platform == "cpu" or not config_checks.has_remote_replicas(config):
    return
  needed = config.mesh.rollout_data * config.mesh.rollout_tensor
  name, wanted = "replica_gpus", f"{needed // section.replica_processes}"
  if platform == "tpu":
    name, wanted = "replica_tpu", "a slice such as v5e:2x2"
  sections.require(
    bool(section.replica_gpus or section.replica_tpu),
    f"cluster.{name}",
    f"missing; replicas would generate on a CPU while a {platform.upper()}"
    f" trains; use {wanted}",
  )


def check_sharding(setup: setup_lib.Setup) -> None:
  """Check that the mesh axes divide every array of the model.

  Raises:
    ConfigError: one line that names the sharding rule or the mesh axis that
      does not fit.
  """
  config, model = setup.config, setup.model
  meshes = setup.train_mesh, setup.rollout_mesh
  for side, mesh in zip(("train", "rollout"), meshes, strict=True):
    shape = mesh_lib.shape_of(mesh)
    rules = getattr(config.mesh, f"{side}_rules")
    is_stacked = side == "train"
    arrays = transformer.logical_axes(model, is_stacked=is_stacked)
    arrays = jax.tree.leaves(arrays, is_leaf=lambda x: isinstance(x, tuple))
    for axes in (*arrays, *transformer.ACTIVATION_AXES):
      try:
        mesh_lib.spec(rules, axes)
      except ValueError as error:
        raise sections.ConfigError(f"mesh.{side}_rules.{error}") from error
    divided = {config.model.name: model}
    if is_stacked and setup.teacher is not None:
      divided[config.algorithm.teacher] = setup.teacher
    for whose, each in divided.items():
      _check_divided(side, shape, rules, whose, each, is_stacked)
      sections.require(
        each.delta is None or not is_stacked or shape.parts(rules.tokens) == 1,
        "mesh.train_context",
        f"{whose} has layers with states (the gated delta rule), which are not"
        " passed on between the parts of a row; use 1",
      )
  sections.require(
    model.delta is None or not config.rollout.kept_tokens,
    "rollout.kept_tokens",
    f"{config.model.name} has layers with states (the gated delta rule), which"
    " are not in pages; use 0",
  )


def _check_divided(
  side: str,
  shape: MeshShape,
  rules: sections.ShardingRules,
  whose: str,
  model: configs.ModelConfig,
  is_stacked: bool,
) -> None:
  """Check that the mesh axes of a side divide the sizes of a model."""
  sizes = {
    "vocab": (model.vocab_size, "vocabulary"),
    "embed": (model.model_dim, "model dimension"),
    "heads": (model.num_heads, "number of heads"),
    "kv_heads": (model.num_kv_heads, "number of key-value heads"),
    "head": (model.head_dim, "head size"),
    "mlp": (model.mlp_dim, "MLP dimension"),
    "layers": (model.num_layers, "number of layers"),
  }
  if model.experts is not None:
    sizes["experts"] = model.experts.num_experts, "number of experts"
  checked = [*sizes.items()]
  if model.delta is not None:
    own, either = model.delta, len(model.layers_with("query"))
    checked += [
      ("heads", (own.num_key_heads, "key heads of the gated delta rule")),
      ("heads", (own.num_value_heads, "value heads of the gated delta rule")),
      ("head", (own.key_dim, "key size of the gated delta rule")),
      ("head", (own.value_dim, "value size of the gated delta rule")),
      ("layers", (either, "number of layers with attention")),
    ]
  for name, (size, what) in checked:
    if name == "layers" and not is_stacked:
      continue
    mesh_shape.require_divides(
      *(side, shape, getattr(rules, name), size, f"({what} of {whose})"),
      otherwise=f", or mesh.{side}_rules.{name}=()",
    )


def check_weights(setup: setup_lib.Setup) -> None:
  """Try out quantised weights on a rollout device, if it is present.

  Raises:
    ConfigError: the device cannot use weights of that type.
  """
  weights = setup.config.rollout.weights
  device = setup.rollout_mesh.devices.flat[0]
  if topology.is_described(device):
    return
  reason = quantization.unsupported(weights, device)
  sections.require(
    not reason,
    "rollout.weights",
    f"{device.device_kind} cannot use {weights.value} ({reason}); use float",
  )


def num_bytes(shapes: Any) -> int:
  """Return the total size in bytes of all arrays in a tree of shapes."""
  return sum(
    math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes)
  )


def model_bytes(
  setup: setup_lib.Setup,
) -> dict[str, memory_estimate.ModelBytes]:
  """Return the bytes that each model of the train state needs on each device.

  The keys are the names of the models.
  """
  models = setup.models
  optimizers = train_step.make_optimizers(models)
  state = aot.placed(
    train_state.shapes(models, optimizers),
    train_state.shardings(
      setup.train_mesh, setup.config.mesh.train_rules, models, optimizers
    ),
  )
  return {name: bytes_of(model) for name, model in state.models.items()}


def bytes_of(model: train_state.ModelState) -> memory_estimate.ModelBytes:
  """Return the bytes that a model needs on each device.

  Args:
    model: the state of the model, as shapes with shardings.
  """
  return memory_estimate.ModelBytes(
    trainable=aot.bytes_a_device(model.trainable),
    frozen=aot.bytes_a_device(model.frozen),
    optimizer=aot.bytes_a_device(model.opt_state),
  )


def training_memory(setup: setup_lib.Setup) -> memory_estimate.Estimate:
  """Estimate the memory that training needs on each device of its slice."""
  config = setup.config
  others = model_bytes(setup)
  policy = others.pop(train_state.POLICY)
  rows = config.train.rows_per_microbatch * setup.max_microbatches
  return memory_estimate.training(
    setup.model,
    mesh_lib.shape_of(setup.train_mesh),
    config.mesh.train_rules,
    config.train,
    config.model,
    policy=policy,
    others=others.values(),
    num_trunks=sum(
      settings.has_gradient_through_layers for settings in setup.models.values()
    ),
    num_fields=critic_lib.NUM_FIELDS
    if train_state.CRITIC in setup.models
    else 0,
    tokens_per_step=rows
    * config.algorithm.num_minibatches
    * config.train.tokens_per_row,
  )


def published_bytes(setup: setup_lib.Setup) -> tuple[int, int]:
  """Return the bytes of one version, and of the base that none changes.

  Without LoRA a version holds all weights, and the base is 0.
  """
  config, model = setup.config, setup.model
  published = jax.eval_shape(
    lambda: publishing.published_params(
      transformer.init_params(model, jax.random.key(0)),
      model.num_layers,
      config.rollout.dtype,
      config.rollout.weights,
      model,
    )
  )
  if model.lora is None:
    return num_bytes(published), 0
  return (
    num_bytes(lora_lib.adapters(published)),
    num_bytes(lora_lib.base(published)),
  )


def rollout_memory(setup: setup_lib.Setup) -> dict[str, int]:
  """Estimate the bytes that generation needs on each device of its slice.

  The keys say what the memory is used for.

  Args:
    setup: of the run, or of a server.
  """
  config = setup.config
  version, base = published_bytes(setup)
  return memory_estimate.rollout(
    setup.model,
    mesh_lib.shape_of(setup.rollout_mesh),
    config.mesh.rollout_rules,
    config.rollout,
    published=version,
    base=base,
    on_cpu=_is_cpu(setup),
  )


def _is_cpu(setup: setup_lib.Setup) -> bool:
  """Return whether the rollout devices are CPUs that stand for no others."""
  is_described = setup.device_bytes is not None
  return (
    not is_described and setup.rollout_mesh.devices.flat[0].platform == "cpu"
  )


def _memory_of(
  setup: setup_lib.Setup, mesh: jax.sharding.Mesh
) -> int | float | None:
  """Return the bytes of memory of each device; None if that is not known.

  The devices of a CPU share the memory of the host.
  """
  if setup.device_bytes is not None:
    return setup.device_bytes
  device = mesh.devices.flat[0]
  if device.platform == "cpu":
    return memory_estimate.host_bytes() / mesh.size
  return topology.memory_bytes(device)


def check_rollout_memory(setup: setup_lib.Setup) -> None:
  """Check that the devices of the rollout mesh have memory for the engine.

  Args:
    setup: of the run, or of a server.

  Raises:
    ConfigError: one line that names the largest part.
  """
  memory_estimate.check_rollout(
    rollout_memory(setup),
    setup.config.rollout,
    _memory_of(setup, setup.rollout_mesh),
  )


def check_training_memory(setup: setup_lib.Setup) -> None:
  """Check that the devices of the train mesh have memory for an update.

  Raises:
    ConfigError: one line that names the largest part.
  """
  config, mesh = setup.config, setup.train_mesh
  limit = _memory_of(setup, mesh)
  memory_estimate.check(training_memory(setup), limit)
  memory_estimate.check_warm_start(
    config.warm_start,
    config.train.tokens_per_row,
    None if limit is None else limit * mesh.size,
  )


def check_shared_memory(setup: setup_lib.Setup) -> None:
  """Check that a device that both slices share can hold both.

  Raises:
    ConfigError: one line with the needs of both.
  """
  limit = _memory_of(setup, setup.train_mesh)
  if not setup.shares_a_device or limit is None:
    return
  training = training_memory(setup).at_least
  rollout = memory_estimate.least_rollout(rollout_memory(setup))
  sections.require(
    training + rollout <= limit,
    "model.name",
    f"both slices share a device of {memory_estimate.size(int(limit))}, and"
    f" need at least {memory_estimate.size(training)} to train and"
    f" {memory_estimate.size(rollout)} to generate; use a smaller model,"
    " train.optimizer.offload=True, or a second device",
  )
