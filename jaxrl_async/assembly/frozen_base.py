"""Where the base of a run with LoRA is kept, and how a checkpoint finds it.

Checkpoints of such a run hold the adapters and their moments. The base never
changes, so that it is on the disk once. There are two cases:

- It was read from a directory, and no warm start trained it. It stays there.
- Otherwise the run writes it to WORKDIR/base before the first checkpoint.

In both cases each checkpoint names the directory, and has a digest of its
files. A base that is missing or has changed is an error.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import jax

from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import hf_weights
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.processes import world as world_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import manifest
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

STATE, BASE = "state", "base"  # what processes save and restore together
_OWN = "base"  # directory in the workdir
KEY = "base"  # of the host state

Record = dict[str, str]


def announce(
  world: world_lib.World | None, command: str, what: str
) -> checkpoint.Announce:
  """Return what tells the other processes to "save" or "restore" their parts.

  Args:
    world: the processes that train together.
    command: "save" or "restore".
    what: `STATE` or `BASE`.
  """

  def tell(path: pathlib.Path) -> None:
    if world is not None:
      world.tell(command, what=what, path=path)

  return tell


def keep(
  setup: setup_lib.Setup,
  workdir: pathlib.Path,
  state: train_state.TrainState,
  *,
  is_given: bool,
  world: world_lib.World | None = None,
) -> Record:
  """Make sure that a new run's base is on the disk, and say where.

  Args:
    setup: of the run, whose model has adapters.
    workdir: of the run.
    state: holds the base.
    is_given: whether the caller of the run provided the parameters.
    world: the processes that train, all of which write it.

  Returns:
    What a checkpoint stores about the base: its "path", which is empty for
    WORKDIR/base, and its "digest".

  Raises:
    StorageError: the base could not be written.
  """
  directory = None if is_given else _directory(setup)
  if directory is None:
    checkpoint.save(
      workdir / _OWN,
      0,
      state.policy.frozen,
      {},
      [],
      announce=announce(world, "save", BASE),
    )
    return {"path": "", "digest": _digest(workdir / _OWN)}
  return {"path": str(directory.absolute()), "digest": _digest(directory)}


def _directory(setup: setup_lib.Setup) -> pathlib.Path | None:
  """Return the directory that the base was read from, and left as it was."""
  section = setup.config.warm_start
  if section.checkpoint:
    return pathlib.Path(section.checkpoint)
  return None if section.num_steps else setup.pretrained


def _digest(directory: pathlib.Path) -> str:
  """Return a digest of the files of a model or of stored parameters."""
  if not hf_weights.is_pretrained(directory):
    # The manifest has a digest of each file, which is checked when it is read.
    return _hash(directory / "0" / manifest.NAME)
  files = {
    path.name: _hash(path)
    for path in sorted(directory.iterdir())
    if path.name.endswith((".safetensors", "config.json"))
  }
  return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def _hash(path: pathlib.Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def without_base(state: train_state.TrainState) -> train_state.TrainState:
  """Return the part of a train state that a checkpoint holds."""
  policy = dataclasses.replace(state.policy, frozen={})
  return train_state.TrainState(
    models={**state.models, train_state.POLICY: policy}
  )


def restore(
  setup: setup_lib.Setup,
  workdir: pathlib.Path,
  step: int,
  abstract_state: train_state.TrainState,
  world: world_lib.World | None = None,
  verified: checkpoint.Verified | None = None,
) -> tuple[train_state.TrainState, dict[str, Any], list[Any]]:
  """Do what `checkpoint.restore` does, with the base of a run with LoRA.

  Args:
    setup: of the run.
    workdir: of the run.
    step: of the checkpoint.
    abstract_state: the shapes and shardings of the whole train state.
    world: the processes that train. Each reads its part.
    verified: as for `checkpoint.restore`.

  Raises:
    CheckpointError: the checkpoint or the base is damaged, or is not there.
  """
  directory = workdir / workdir_lib.CHECKPOINTS
  if setup.model.lora is None:
    return checkpoint.restore(
      directory,
      step,
      abstract_state,
      verified=verified,
      announce=announce(world, "restore", STATE),
    )
  state, host_state, groups = checkpoint.restore(
    directory,
    step,
    without_base(abstract_state),
    verified=verified,
    announce=announce(world, "restore", STATE),
  )
  base = _load(
    setup,
    workdir,
    host_state[KEY],
    abstract_state.policy.frozen,
    announce(world, "restore", BASE),
  )
  return with_base(state, base), host_state, groups


def with_base(
  state: train_state.TrainState, base: Any
) -> train_state.TrainState:
  """Return a train state with this base under its adapters."""
  policy = dataclasses.replace(state.policy, frozen=base)
  return train_state.TrainState(
    models={**state.models, train_state.POLICY: policy}
  )


def restore_arrays(
  what: str,
  path: pathlib.Path,
  setup: setup_lib.Setup,
  abstract_state: train_state.TrainState,
) -> Any:
  """Read this process's part of what process 0 restores at the same time.

  Args:
    what: `STATE` or `BASE`.
    path: where it is.
    setup: of the run.
    abstract_state: the shapes and shardings of the whole train state.

  Returns:
    The train state, without a base where there are adapters, or the base.
  """
  if what == BASE:
    abstract = abstract_state.policy.frozen
    if (path / manifest.NAME).exists():
      return checkpoint.restore_arrays(path, abstract)
    return _read(path, setup, abstract)
  if setup.model.lora is not None:
    abstract_state = without_base(abstract_state)
  return checkpoint.restore_arrays(path, abstract_state)


def restore_params(
  setup: setup_lib.Setup, workdir: pathlib.Path, step: int
) -> transformer.Params:
  """Return the policy's parameters alone, without the optimizer's state.

  With LoRA they are the base, in its own dtype, and the adapters.

  Args:
    setup: of the run.
    workdir: of the run.
    step: of the checkpoint.

  Raises:
    CheckpointError: the checkpoint or the base is damaged, or is not there.
  """
  directory = workdir / workdir_lib.CHECKPOINTS
  if setup.model.lora is None:
    target = initial_params.abstract(setup)
    return checkpoint.restore_params(directory, step, target)
  policy = _abstract_policy(setup)
  verified = checkpoint.verify(directory, step)
  adapters = checkpoint.restore_params(
    directory, step, policy.trainable, verified=verified
  )
  record = checkpoint.host_state(directory, step, verified)[KEY]
  base = _load(setup, workdir, record, policy.frozen)
  return lora_lib.joined(base, adapters)


def _abstract_policy(setup: setup_lib.Setup) -> train_state.ModelState:
  """Return the shapes of the policy's base and adapters, with shardings."""
  optimizers = train_step.make_optimizers(setup.models)
  shardings = train_state.shardings(
    setup.train_mesh, setup.config.mesh.train_rules, setup.models, optimizers
  )
  shapes = train_state.shapes(setup.models, optimizers)
  return aot.placed(shapes, shardings).policy


def _load(
  setup: setup_lib.Setup,
  workdir: pathlib.Path,
  record: Record,
  abstract: Any,
  told: checkpoint.Announce = lambda path: None,
) -> Any:
  """Return the base that a checkpoint names."""
  own = workdir / _OWN
  directory = pathlib.Path(record["path"]) if record["path"] else own
  try:
    found = _digest(directory)
  except OSError as error:
    raise checkpoint.CheckpointError(
      f"the base of the adapters was {directory}, which cannot be read"
      f" ({error.strerror}); put it back"
    ) from error
  if found != record["digest"]:
    raise checkpoint.CheckpointError(
      f"the base of the adapters in {directory} has changed; put back the files"
      " that the run began with"
    )
  if directory == own:
    return checkpoint.restore(own, 0, abstract, announce=told)[0]
  told(directory)
  return _read(directory, setup, abstract)


def _read(
  directory: pathlib.Path, setup: setup_lib.Setup, abstract: Any
) -> Any:
  """Read a base from where the run found it."""
  try:
    params = initial_params.load(str(directory), setup)
  except sections.ConfigError as error:
    raise checkpoint.CheckpointError(str(error)) from error
  dtype = setup.models[train_state.POLICY].frozen_dtype
  shardings = jax.tree.map(lambda x: x.sharding, abstract)
  return mesh_lib.put(quantization.frozen(params, dtype), shardings)
