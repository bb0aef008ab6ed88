"""The parameters a run begins with: an earlier run's, or pretrained ones."""

import dataclasses
import pathlib

import jax

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import train_state


def save(directory: pathlib.Path, params: transformer.Params) -> None:
  """Writes parameters where `warm_start.checkpoint` can name them."""
  checkpoint.save(directory, 0, params, {}, [])


def load_pretrained(
  field: str, directory: pathlib.Path, setup: setup_lib.Setup
) -> transformer.Params:
  """Pretrained weights of exactly the policy's architecture, sharded for it.

  Args:
    field: that names the directory, for errors.
    directory: in Hugging Face's format.
    setup: of the run.

  Raises:
    ConfigError: the directory holds something else.
  """
  try:
    found, params = hf_weights.load(directory)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"{field}: {error}") from error
  for name, wanted in dataclasses.asdict(setup.model).items():
    here = dataclasses.asdict(found)[name]
    sections.require(
      here == wanted,
      field,
      f"{directory} has {name} {here}, the model of this run {wanted}",
    )
  return mesh_lib.put(params, _shardings(setup))


def _shardings(setup: setup_lib.Setup) -> transformer.Params:
  """The shardings of the policy's parameters on the training slice."""
  return train_state.params_sharding(
    setup.train_mesh, setup.config.mesh.train_rules, setup.model
  )


def load(directory: str, setup: setup_lib.Setup) -> transformer.Params:
  """Reads what `save` wrote, or pretrained weights.

  Args:
    directory: that `warm_start.checkpoint` names.
    setup: of the run.

  Raises:
    ConfigError: there is nothing of that shape.
  """
  path = pathlib.Path(directory)
  if hf_weights.is_pretrained(path):
    return load_pretrained("warm_start.checkpoint", path, setup)
  shapes = jax.eval_shape(
    lambda: transformer.init_params(setup.model, jax.random.key(0))
  )
  if checkpoint.latest(path) is None:
    raise sections.ConfigError(
      f"warm_start.checkpoint: {directory} holds no parameters; launch/sft.py"
      " writes them to WORKDIR/params"
    )
  try:
    params, _, _ = checkpoint.restore(
      path, 0, aot.placed(shapes, _shardings(setup))
    )
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"warm_start.checkpoint: {error}") from error
  return params
