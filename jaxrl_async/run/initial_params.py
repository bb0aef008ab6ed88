"""Parameters a run begins with: of an earlier one, or published."""

import dataclasses
import pathlib
from typing import Any

import jax

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.storage import checkpoint


def save(directory: pathlib.Path, params: Any) -> None:
  """Writes parameters where `warm_start.checkpoint` can name them."""
  checkpoint.save(directory, 0, params, {}, [])


def load_published(
  field: str,
  directory: pathlib.Path,
  model: configs.ModelConfig,
  placement: Any,
) -> Any:
  """Published weights of exactly this architecture, in these shardings.

  Raises:
    ConfigError: `field` names something else.
  """
  try:
    found, params = hf_weights.load(directory)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"{field}: {error}") from error
  for name, wanted in dataclasses.asdict(model).items():
    here = dataclasses.asdict(found)[name]
    sections.require(
      here == wanted,
      field,
      f"{directory} has {name} {here}, the model of this run {wanted}",
    )
  return mesh_lib.put(params, placement)


def shardings(
  config: sections.Config,
  model: configs.ModelConfig,
  mesh: jax.sharding.Mesh,
) -> Any:
  """Of the trainer's parameters."""
  axes = transformer.logical_axes(model, is_stacked=True)
  return mesh_lib.shardings(mesh, config.mesh.train_rules, axes)


def load(directory: str, model: configs.ModelConfig, placement: Any) -> Any:
  """Reads what `save` wrote, or published weights.

  Raises:
    ConfigError: there is nothing of that shape.
  """
  path = pathlib.Path(directory)
  if hf_weights.is_pretrained(path):
    return load_published("warm_start.checkpoint", path, model, placement)
  shapes = jax.eval_shape(
    lambda: transformer.init_params(model, jax.random.key(0))
  )
  target = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    shapes,
    placement,
  )
  if checkpoint.latest(path) is None:
    raise sections.ConfigError(
      f"warm_start.checkpoint: {directory} holds no parameters; launch/sft.py"
      " writes them to WORKDIR/params"
    )
  try:
    params, _, _ = checkpoint.restore(path, 0, target)
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"warm_start.checkpoint: {error}") from error
  return params
