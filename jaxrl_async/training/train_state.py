"""The train state: named models, each split into trained and frozen parts.

The policy is one of the models. There may be others, for example a frozen
reference model for a KL penalty. Gradients and optimizer state exist only for
trainable parameters, so that a frozen model costs its weights and nothing else.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
import optax

from jaxrl_async.algorithms import value_functions
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer

POLICY = "policy"
REFERENCE = "reference"
TEACHER = "teacher"
CRITIC = "critic"

# The leaves of a critic that a decoder of tokens does not have: its head, and
# the running statistics of the returns, which no gradient changes.
VALUE_HEAD = "scalar_head"
RETURN_STATISTICS = "return_statistics"

# Names from the root of the parameters down to an array: ("layers", "query").
Path = tuple[str, ...]
Optimizers = Mapping[str, optax.GradientTransformation]


def everything(path: Path) -> bool:
  """Return True: every parameter is trainable."""
  del path
  return True


def is_critic_weight(path: Path) -> bool:
  """Return whether gradients change this parameter of a critic."""
  return path[0] != RETURN_STATISTICS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
  """How the train state holds one model.

  Attributes:
    optimizer: of the trainable parameters. None freezes the whole model.
    is_trainable: returns whether the parameter with this path is trained. It is
      not called if `optimizer` is None.
    frozen_dtype: dtype of the parameters that are not trained, or "int8" as in
      `quantization.frozen`. Trainable ones are always float32.
    is_on_host: keep the parameters that are not trained in host memory.
    trunk: of a critic, whose `model` has a scalar head. With SHARED its
      parameters do not include the layers. None for any other model.
  """

  model: configs.ModelConfig
  optimizer: sections.OptimizerSection | None
  is_trainable: Callable[[Path], bool] = everything
  frozen_dtype: str = "float32"
  is_on_host: bool = False
  trunk: sections.CriticTrunk | None = None

  @property
  def has_gradient_through_layers(self) -> bool:
    """Whether an update has a backward pass through layers of the model."""
    is_shared = self.trunk is sections.CriticTrunk.SHARED
    return self.optimizer is not None and not is_shared

  def init_params(self, key: jax.Array) -> transformer.Params:
    """Return fresh parameters of the whole model; call it inside jit."""
    return self._own(
      transformer.init_params(self.model, key),
      {name: jnp.zeros(()) for name in value_functions.STATISTICS},
    )

  def logical_axes(self) -> transformer.Params:
    """Return the names of the axes of every parameter, layers stacked."""
    return self._own(
      transformer.logical_axes(self.model, is_stacked=True),
      {name: () for name in value_functions.STATISTICS},
    )

  def _own(
    self, params: dict[str, Any], statistics: dict[str, Any]
  ) -> dict[str, Any]:
    """Return those of a decoder's leaves that the model has, and a critic's."""
    if self.trunk is None:
      return params
    if self.trunk is sections.CriticTrunk.SHARED:
      params = {VALUE_HEAD: params[VALUE_HEAD]}
    return {**params, RETURN_STATISTICS: statistics}

  def split(self, params: dict[str, Any]) -> tuple[dict, dict]:
    """Split a tree with the parameters' paths into (trainable, frozen)."""
    if self.optimizer is None:
      return {}, params
    return _split(params, self.is_trainable, ())

  @property
  def offload(self) -> bool:
    """Whether the optimizer's moments are kept in host memory."""
    return self.optimizer is not None and self.optimizer.offload


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["trainable", "frozen", "opt_state"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelState:
  """The parameters of one model (layers stacked) and its optimizer's state.

  Attributes:
    trainable: the trainable parameters, which are float32 master weights in a
      nested dict.
    opt_state: the optimizer's state. None for a frozen model.
  """

  trainable: transformer.Params
  frozen: transformer.Params
  opt_state: Any

  @property
  def params(self) -> transformer.Params:
    """All parameters in one tree, as the forward pass takes them."""
    return merged(self.trainable, self.frozen)


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["models"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """The state of every model by name. One of the names is `POLICY`."""

  models: dict[str, ModelState]

  @property
  def policy(self) -> ModelState:
    """The state of the model whose weights the engines generate with."""
    return self.models[POLICY]

  @property
  def params(self) -> dict[str, transformer.Params]:
    """All parameters of each model, by the model's name."""
    return {name: model.params for name, model in self.models.items()}

  @property
  def trainable(self) -> dict[str, transformer.Params]:
    """The trainable parameters of each model that has some."""
    return {
      name: model.trainable
      for name, model in self.models.items()
      if model.trainable
    }


def _split(
  tree: dict[str, Any], is_chosen: Callable[[Path], bool], path: Path
) -> tuple[dict, dict]:
  """Return the chosen part of a tree and the rest, without empty dicts."""
  chosen, rest = {}, {}
  for name, value in tree.items():
    here = (*path, name)
    if isinstance(value, dict):
      for part, values in zip(
        (chosen, rest), _split(value, is_chosen, here), strict=True
      ):
        if values:
          part[name] = values
    else:
      (chosen if is_chosen(here) else rest)[name] = value
  return chosen, rest


def merged(trainable: dict[str, Any], frozen: dict[str, Any]) -> dict[str, Any]:
  """Return the tree from which `ModelSettings.split` made these two."""
  both = dict(frozen)
  for name, value in trainable.items():
    is_in_both = isinstance(value, dict) and name in both
    both[name] = merged(value, both[name]) if is_in_both else value
  return both


def start(
  settings: ModelSettings,
  optimizer: optax.GradientTransformation | None,
  params: transformer.Params,
  sharding: ModelState | None = None,
) -> ModelState:
  """Return the state of a model before its first update.

  Args:
    sharding: the sharding of the state. None lets the compiler choose that of
      the optimizer's state.
  """
  trainable, frozen = settings.split(params)
  frozen = quantization.frozen(frozen, settings.frozen_dtype)
  if settings.is_on_host and sharding is not None:
    frozen = jax.device_put(frozen, sharding.frozen)
  opt_state = None
  if optimizer is not None:
    placement = sharding and sharding.opt_state
    opt_state = jax.jit(optimizer.init, out_shardings=placement)(trainable)
  return ModelState(trainable=trainable, frozen=frozen, opt_state=opt_state)


def shapes(
  models: Mapping[str, ModelSettings], optimizers: Optimizers
) -> TrainState:
  """Return the shapes and dtypes of the train state without allocating it."""

  def init(name: str, settings: ModelSettings) -> ModelState:
    params = settings.init_params(jax.random.key(0))
    return start(settings, optimizers.get(name), params)

  return TrainState(
    models={
      name: jax.eval_shape(functools.partial(init, name, settings))
      for name, settings in models.items()
    }
  )


def params_sharding(
  mesh: Mesh, rules: sections.ShardingRules, model: configs.ModelConfig
) -> transformer.Params:
  """Return the sharding of each parameter of a model, layers stacked."""
  axes = transformer.logical_axes(model, is_stacked=True)
  return mesh_lib.shardings(mesh, rules, axes)


def shardings(
  mesh: Mesh,
  rules: sections.ShardingRules,
  models: Mapping[str, ModelSettings],
  optimizers: Optimizers,
) -> TrainState:
  """Return the sharding of every array of the train state.

  Optimizer moments are sharded like their parameters. They and frozen
  parameters are in host memory if the settings say so. The rest of an
  optimizer's state is replicated.
  """
  state = shapes(models, optimizers)

  def of_model(settings: ModelSettings, model: ModelState) -> ModelState:
    trainable_axes, frozen_axes = settings.split(settings.logical_axes())
    if frozen_axes:
      frozen_axes = quantization.frozen_axes(frozen_axes, settings.frozen_dtype)
    trainable, frozen = (
      mesh_lib.shardings(mesh, rules, part)
      for part in (trainable_axes, frozen_axes)
    )
    if settings.is_on_host:
      frozen = jax.tree.map(lambda x: x.with_memory_kind("pinned_host"), frozen)
    return ModelState(
      trainable=trainable,
      frozen=frozen,
      opt_state=_moments_sharding(mesh, settings, model, trainable),
    )

  return TrainState(
    models={
      name: of_model(settings, state.models[name])
      for name, settings in models.items()
    }
  )


def _moments_sharding(
  mesh: Mesh,
  settings: ModelSettings,
  model: ModelState,
  trainable_sharding: dict[str, Any],
) -> Any:
  """Return the sharding of each array of an optimizer's state.

  A leaf is a moment of a parameter if its path ends in the parameter's path and
  their shapes are equal.
  """
  params = {
    tuple(map(str, path)): (x.shape, sharding)
    for (path, x), sharding in zip(
      jax.tree_util.tree_leaves_with_path(model.trainable),
      jax.tree.leaves(trainable_sharding),
      strict=True,
    )
  }

  def like_param(path: tuple[Any, ...], leaf: Any) -> Any:
    keys = tuple(map(str, path))
    for start in range(len(keys)):
      shape, sharding = params.get(keys[start:], (None, None))
      if shape == leaf.shape:
        if settings.offload:
          return sharding.with_memory_kind("pinned_host")
        return sharding
    return mesh_lib.replicated(mesh)

  return jax.tree_util.tree_map_with_path(like_param, model.opt_state)


def in_memory_of(tree: Any, like: Any) -> Any:
  """Move each array to the memory space of its counterpart in `like`."""
  return jax.tree.map(
    lambda x, y: jax.device_put(x, jax.typeof(y).memory_space), tree, like
  )


def on_device(params: Any) -> Any:
  """Return parameters that may be in host memory, in that of the device."""
  return jax.device_put(params, jax.memory.Space.Device)


def with_moved_reference(state: TrainState, *, decay: float) -> TrainState:
  r"""Return the state with its reference moved towards the policy.

  reference = decay * reference + (1 - decay) * policy

  With decay 0, of [0, 1), the reference is replaced, which is the hard update
  of TR-DPO (arXiv:2404.09656). With a decay it is its soft update, a moving
  average.
  """

  def mixed(old: jax.Array, new: jax.Array) -> jax.Array:
    total = decay * old.astype(jnp.float32) + (1 - decay) * new
    return total.astype(old.dtype)

  reference = state.models[REFERENCE]
  frozen = jax.tree.map(mixed, on_device(reference.frozen), state.policy.params)
  frozen = in_memory_of(frozen, reference.frozen)
  after = dataclasses.replace(reference, frozen=frozen)
  return TrainState(models={**state.models, REFERENCE: after})


def check_models(models: Mapping[str, ModelSettings]) -> None:
  """Check that a trainer can train these models."""
  policy = models.get(POLICY)
  if policy is None or policy.optimizer is None:
    raise ValueError("the policy has to be one of the models, and be trained")
  trainable, _ = policy.split(policy.logical_axes())
  if not trainable:
    raise ValueError("policy: no parameter is trainable")
  for name, settings in models.items():
    can_learn = name == POLICY or (name == CRITIC and settings.trunk)
    if settings.optimizer is not None and not can_learn:
      raise ValueError(f"{name}: only the policy and a critic can be trained")
