"""The parameters that a run starts from: stored earlier, or pretrained.

With LoRA these are first those of the base. `with_adapters` adds the adapters.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import jax

from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.models import hub
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import peft_files
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import train_state


def save(
  directory: pathlib.Path, params: transformer.Params, *, updates: int = 0
) -> None:
  """Write parameters to a directory for use as `warm_start.checkpoint`.

  Args:
    updates: by which they were trained.
  """
  checkpoint.save(directory, 0, params, {"updates": updates}, [])


def before_training(setup: setup_lib.Setup) -> transformer.Params:
  """Return the pretrained model's parameters, or random ones without one.

  Raises:
    ConfigError: as `load_pretrained`.
  """
  if setup.pretrained is not None:
    fetch_weights(setup)
    return load_pretrained("model.name", setup.pretrained, setup)
  return random(setup)


def fetch_weights(setup: setup_lib.Setup) -> None:
  """Download the weights of `model.name`, if it names a model of the hub.

  Raises:
    ConfigError: they cannot be downloaded.
  """
  try:
    hub.fetch_weights(setup.config.model.name)
  except hub.HubError as error:
    raise sections.ConfigError(f"model.name: {error}") from error


def random(setup: setup_lib.Setup) -> transformer.Params:
  """Return random parameters of the policy's base, on the training slice."""
  init = jax.jit(
    functools.partial(transformer.init_params, setup.model.base),
    out_shardings=_shardings(setup),
  )
  return init(jax.random.key(setup.config.seed))


def check(setup: setup_lib.Setup) -> None:
  """Check the files of the weights and of the adapter that a run starts from.

  Only their headers are read. A directory without any weights passes, because a
  dry run needs none; `load_pretrained` refuses it before anything is trained.
  That of a teacher does not pass: it is loaded after the warm start, the result
  of which would be lost.

  Raises:
    ConfigError: a file is damaged or missing, or the model has another
      architecture than the policy.
  """
  if setup.config.model.lora.adapter:
    _check_adapter(setup)
  if setup.teacher is not None:
    _check_teacher(setup)
  checkpoint_of_sft = setup.config.warm_start.checkpoint
  if checkpoint_of_sft:
    field, directory = "warm_start.checkpoint", pathlib.Path(checkpoint_of_sft)
  elif setup.pretrained is not None:
    field, directory = "model.name", setup.pretrained
  else:
    return
  if hf_weights.has_weights(directory):
    _check_pretrained(field, directory, setup)


def check_is_there(setup: setup_lib.Setup) -> None:
  """Check that a new run has weights to begin with; the hub's come later.

  Raises:
    ConfigError: the directory that `model.name` names has none.
  """
  name, directory = setup.config.model.name, setup.pretrained
  if directory is None or name.startswith(hub.PREFIX):
    return
  if not setup.config.warm_start.checkpoint:
    if not hf_weights.has_weights(directory):
      _check_pretrained("model.name", directory, setup)


def _check_pretrained(
  field: str, directory: pathlib.Path, setup: setup_lib.Setup
) -> None:
  """Check the headers of weights, and that they are of the policy."""
  try:
    found = hf_weights.check(directory)
    found = found.within(setup.model.longest)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"{field}: {error}") from error
  for entry in dataclasses.fields(found):
    here, wanted = (getattr(x, entry.name) for x in (found, setup.model.base))
    sections.require(
      not entry.compare or here == wanted,
      field,
      f"{directory} has {entry.name} {here}, the model of this run {wanted}",
    )


def _check_teacher(setup: setup_lib.Setup) -> None:
  """Check that there are weights of the teacher, and that they fit."""
  field, path = "algorithm.teacher", setup.config.algorithm.teacher
  directory = pathlib.Path(path)
  if not hf_weights.is_pretrained(directory):
    _check_stored(field, path, setup)
    return
  try:
    hf_weights.check(directory)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"{field}: {error}") from error


def load_pretrained(
  field: str, directory: pathlib.Path, setup: setup_lib.Setup
) -> transformer.Params:
  """Load pretrained weights, sharded like the policy's parameters.

  The weights must have exactly the architecture of the policy. Each process
  reads what its own devices hold.

  Args:
    field: the config field that names the directory, for error messages.
    directory: a model in Hugging Face's format.
    setup: of the run.

  Raises:
    ConfigError: the directory cannot be read, or its model has another
      architecture.
  """
  _check_pretrained(field, directory, setup)
  try:
    _, params = hf_weights.load(
      directory, _dtype(setup), shardings=_shardings(setup)
    )
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"{field}: {error}") from error
  return params


def _dtype(setup: setup_lib.Setup) -> str:
  """Return the dtype in which pretrained weights are loaded.

  A base that LoRA freezes is not needed in float32, unless it is trained first.
  """
  config = setup.config
  is_trained = config.warm_start.num_steps and not config.warm_start.checkpoint
  if setup.model.lora is None or is_trained:
    return "float32"
  dtype = config.model.lora.base_dtype
  return "bfloat16" if dtype == "int8" else dtype


def _shardings(setup: setup_lib.Setup) -> transformer.Params:
  """Return the shardings of the base on the training slice."""
  return train_state.params_sharding(
    setup.train_mesh, setup.config.mesh.train_rules, setup.model.base
  )


def placed(params: Any, setup: setup_lib.Setup) -> transformer.Params:
  """Return parameters of the base on the training slice."""
  return mesh_lib.put(params, _shardings(setup))


def abstract(setup: setup_lib.Setup) -> transformer.Params:
  """Return the shapes of the base's parameters on the training slice."""
  shapes = jax.eval_shape(
    lambda: transformer.init_params(setup.model.base, jax.random.key(0))
  )
  return aot.placed(shapes, _shardings(setup))


def _check_adapter(setup: setup_lib.Setup) -> None:
  """Check that `model.lora.adapter` holds an adapter for this model.

  Raises:
    ConfigError: one line that names the field and the file.
  """
  try:
    peft_files.check(setup.config.model.lora.adapter, setup.model)
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"model.lora.adapter: {error}") from error


def with_adapters(
  params: transformer.Params, setup: setup_lib.Setup
) -> transformer.Params:
  """Return the parameters of a base together with those of its adapters.

  Without `model.lora` they are the base alone.

  Args:
    params: the base, with stacked layers.
    setup: of the run. Its adapters are read from `model.lora.adapter`, or new.

  Raises:
    ConfigError: there are no such adapters in the directory.
  """
  model, config = setup.model, setup.config
  if model.lora is None:
    return params
  shardings = lora_lib.adapters(
    train_state.params_sharding(
      setup.train_mesh, config.mesh.train_rules, model
    )
  )
  if config.model.lora.adapter:
    try:
      found = peft_files.read(config.model.lora.adapter, model)
    except (FileNotFoundError, ValueError) as error:
      raise sections.ConfigError(f"model.lora.adapter: {error}") from error
    return lora_lib.joined(params, mesh_lib.put(found[1], shardings))
  fresh = jax.jit(
    lambda key: lora_lib.adapters(transformer.init_params(model, key)),
    out_shardings=shardings,
  )
  return lora_lib.joined(params, fresh(jax.random.key(config.seed)))


def of_models(
  setup: setup_lib.Setup, params: transformer.Params
) -> dict[str, transformer.Params]:
  """Return the parameters of each model before the first train step.

  Args:
    setup: of the run.
    params: of the policy.

  Raises:
    ConfigError: the parameters of the teacher cannot be used.
  """
  found = setup.first_params(params)
  if setup.teacher is not None:
    found[train_state.TEACHER] = _teacher(setup, setup.teacher)
  return found


def _teacher(
  setup: setup_lib.Setup, model: configs.ModelConfig
) -> transformer.Params:
  """Load the parameters of the teacher onto the training slice."""
  field, path = "algorithm.teacher", setup.config.algorithm.teacher
  directory = pathlib.Path(path)
  if not hf_weights.is_pretrained(directory):
    return _stored(field, path, setup)
  shardings = train_state.params_sharding(
    setup.train_mesh, setup.config.mesh.train_rules, model
  )
  dtype = setup.config.model.compute_dtype
  try:
    return hf_weights.load(directory, dtype, shardings=shardings)[1]
  except (FileNotFoundError, ValueError) as error:
    raise sections.ConfigError(f"{field}: {error}") from error


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
  return _stored("warm_start.checkpoint", directory, setup)


def _stored(
  field: str, directory: str, setup: setup_lib.Setup
) -> transformer.Params:
  """Return parameters of the policy's base that `save` wrote."""
  path = pathlib.Path(directory)
  _check_stored(field, directory, setup)
  try:
    params, _, _ = checkpoint.restore(path, 0, abstract(setup))
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"{field}: {error}") from error
  return params


def _check_stored(field: str, directory: str, setup: setup_lib.Setup) -> None:
  """Check that `save` wrote parameters of the policy's base.

  Their values are not read.

  Raises:
    ConfigError: there are none, or they have another architecture.
  """
  path = pathlib.Path(directory)
  try:
    if 0 not in checkpoint.steps(path):
      raise sections.ConfigError(
        f"{field}: {directory} holds no parameters; launch/sft.py"
        " writes them to WORKDIR/params"
      )
    checkpoint.check_layout(path, 0, abstract(setup))
  except checkpoint.CheckpointError as error:
    raise sections.ConfigError(f"{field}: {error}") from error
