"""The parameters that a run starts from: stored earlier, or pretrained."""

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
  """Write parameters to a directory for use as `warm_start.checkpoint`."""
  checkpoint.save(directory, 0, params, {}, [])


def load_pretrained(
  field: str, directory: pathlib.Path, setup: setup_lib.Setup
) -> transformer.Params:
  """Load pretrained weights, sharded like the policy's parameters.

  The weights must have exactly the architecture of the policy.

  Args:
    field: the config field that names the directory, for error messages.
    directory: a model in Hugging Face's format.
    setup: of the run.

  Raises:
    ConfigError: the directory cannot be read, or its model has another
      architecture.
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
  """Return the shardings of the policy's parameters on the training slice."""
  return train_state.params_sharding(
    setup.train_mesh, setup.config.mesh.train_rules, setup.model
  )


def load(directory: str, setup: setup_lib.Setup) -> transformer.Params:
  """Load parameters that `save` wrote, or pretrained weights.

  Args:
    directory: the value of `warm_start.checkpoint`.
    setup: of the run.

  Raises:
    ConfigError: the directory holds no parameters of the policy's shapes.
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
