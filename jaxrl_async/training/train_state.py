"""What a trainer holds: named models, each split into trained and frozen parts.

The policy is one of the models. Others can stand beside it, for example a
frozen reference that a loss measures a divergence from. Gradients and optimizer
state exist for trainable parameters only, so a frozen model costs its weights
and nothing else.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh
import optax

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import transformer

POLICY = "policy"

# Names from the root of the parameters down to an array: ("layers", "query").
Path = tuple[str, ...]
Optimizers = Mapping[str, optax.GradientTransformation]


def everything(path: Path) -> bool:
  """Chooses every parameter."""
  del path
  return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
  """What the train state holds of one model.

  Attributes:
    model: the architecture.
    optimizer: for the trainable parameters. None freezes the whole model.
    is_trainable: says of each parameter whether it is trained. It is not asked
      where `optimizer` is None.
    frozen_dtype: type of the parameters that are not trained. Trainable ones
      are always float32.
  """

  model: configs.ModelConfig
  optimizer: sections.OptimizerSection | None
  is_trainable: Callable[[Path], bool] = everything
  frozen_dtype: str = "float32"

  def split(self, params: dict[str, Any]) -> tuple[dict, dict]:
    """Splits a tree with the parameters' paths into (trainable, frozen)."""
    if self.optimizer is None:
      return {}, params
    return _split(params, self.is_trainable, ())

  @property
  def offload(self) -> bool:
    """Whether the optimizer's moments lie in the memory of the host."""
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
    trainable: float32 master weights. A nested dict that lacks the frozen
      parameters.
    frozen: the other parameters, in a nested dict of the same form.
    opt_state: of the trainable parameters. None where there are none.
  """

  trainable: transformer.Params
  frozen: transformer.Params
  opt_state: Any

  @property
  def params(self) -> transformer.Params:
    """All parameters, as the forward pass takes them."""
    return merged(self.trainable, self.frozen)


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["models"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """The state of every model, by name. There is always a `POLICY`."""

  models: dict[str, ModelState]

  @property
  def policy(self) -> ModelState:
    """The model that generates."""
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
  """Two trees that share the leaves; a dict without leaves is left out."""
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
  """The tree that `ModelSettings.split` took apart."""
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
  """The state of a model before its first update.

  Args:
    settings: say what is trained, and in which type the rest is held.
    optimizer: what `settings.optimizer` describes; None if that is None.
    params: all of the model's parameters, where they are to stay.
    sharding: of the state; None leaves the optimizer's state to the compiler.
  """
  trainable, frozen = settings.split(params)
  opt_state = None
  if optimizer is not None:
    placement = sharding and sharding.opt_state
    opt_state = jax.jit(optimizer.init, out_shardings=placement)(trainable)
  return ModelState(
    trainable=trainable,
    frozen=jax.tree.map(lambda x: x.astype(settings.frozen_dtype), frozen),
    opt_state=opt_state,
  )


def shapes(
  models: Mapping[str, ModelSettings], optimizers: Optimizers
) -> TrainState:
  """Shapes and types of the whole state, without making it.

  Args:
    models: by name.
    optimizers: of the models that are trained, by the same names.
  """

  def init(name: str, settings: ModelSettings) -> ModelState:
    params = transformer.init_params(settings.model, jax.random.key(0))
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
  """The sharding of each of a model's parameters, layers stacked."""
  axes = transformer.logical_axes(model, is_stacked=True)
  return mesh_lib.shardings(mesh, rules, axes)


def shardings(
  mesh: Mesh,
  rules: sections.ShardingRules,
  models: Mapping[str, ModelSettings],
  optimizers: Optimizers,
) -> TrainState:
  """The sharding of every array of the state.

  Optimizer moments are sharded like their parameters, and lie in the memory of
  the devices' host where the settings say so. All else is replicated.

  Args:
    mesh: of the training slice.
    rules: which mesh axes split which logical axes.
    models: by name.
    optimizers: of the models that are trained, by the same names.
  """
  state = shapes(models, optimizers)

  def of_model(settings: ModelSettings, model: ModelState) -> ModelState:
    trainable, frozen = settings.split(
      params_sharding(mesh, rules, settings.model)
    )
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
  """The sharding of each array of an optimizer's state.

  A leaf is a parameter's moment when its path ends in the parameter's path and
  their shapes agree.
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
