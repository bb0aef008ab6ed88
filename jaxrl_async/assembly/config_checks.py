"""All checks of a config that are made before any slow import.

`check` needs neither devices nor JAX, so that the launch scripts can report a
wrong setting within a second. `validate` also takes the number of devices into
account. Most of what is checked is in `config.rules`, or stated with the field.
"""

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import mesh_shape
from jaxrl_async.config import rules
from jaxrl_async.config import sections
from jaxrl_async.data import task_sources
from jaxrl_async.data import worked_solutions
from jaxrl_async.devices import tpu_chips
from jaxrl_async.models import configs
from jaxrl_async.models import hub
from jaxrl_async.models.attention import kernel_names
from jaxrl_async.storage import directories


def has_remote_replicas(config: sections.Config) -> bool:
  """Return whether the replicas are in other processes."""
  return config.cluster.kind is sections.ClusterKind.RAY


def check(config: sections.Config) -> None:
  """Check every field, and fields against each other, without any device.

  Checks that need a library or the files of a model are made where these are
  used, and raise the same error. Examples are the names of data sets and the
  fields of the template.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  fields_lib.check(config)
  rules.check(config)
  config = fields_lib.settled(config)
  task_sources.check(config.task)
  kernel_names.check_packed(config.train.attention)
  kernel_names.check_rollout(
    config.rollout.attention, has_pages=config.rollout.num_pages > 0
  )
  warm_start = config.warm_start
  if warm_start.num_steps and not warm_start.checkpoint:
    worked_solutions.check(warm_start.solver)
  for field in fields_lib.walk(config):
    if field.known.directory and field.value:
      directories.check_can_read(field.path, field.value, field.known.directory)
  name = config.model.name
  if name not in configs.MODELS and not name.startswith(hub.PREFIX):
    known = f"use one of {', '.join(configs.MODELS)}"
    directories.check_can_read(
      "model.name",
      name,
      f"{known}, a directory in Hugging Face's format, or hf:ORG/NAME of its"
      " hub",
    )
  if config.transfer.directory:
    directories.check_can_write("transfer.directory", config.transfer.directory)
  if has_remote_replicas(config) and config.cluster.replica_tpu:
    path, slice_name = "cluster.replica_tpu", config.cluster.replica_tpu
    chips = tpu_chips.num_chips(slice_name, path)
    needed = config.mesh.rollout_data * config.mesh.rollout_tensor
    sections.require(
      chips == needed,
      path,
      f"{slice_name} has {chips} chips, and a replica's mesh has {needed}"
      " (mesh.rollout_data * rollout_tensor)",
    )


def validate(config: sections.Config, num_devices: int) -> None:
  """Do what `check` does, and check the meshes against the devices.

  There have to be enough devices, and the axes of the meshes have to divide the
  sizes that are split over them.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  check(config)
  train, rollout = mesh_shape.of_slices(
    config.mesh, num_devices, are_apart=has_remote_replicas(config)
  )
  train_rules, section = config.mesh.train_rules, config.train
  slot_axes = config.mesh.rollout_rules.batch
  for side, shape, axes, size, of in (
    (
      *("train", train, train_rules.batch),
      *(section.rows_per_microbatch, "train.rows_per_microbatch"),
    ),
    (
      *("train", train, train_rules.tokens),
      *(section.tokens_per_row, "train.tokens_per_row"),
    ),
    (
      "rollout",
      rollout,
      slot_axes,
      config.rollout.num_slots,
      "rollout.num_slots",
    ),
  ):
    mesh_shape.require_divides(side, shape, axes, size, of)


def check_preference(config: sections.Config) -> None:
  """Check a config of `launch/prefer.py` or `launch/reward_model.py`.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  check(config)
  rules.check_preference(config)
  name = config.model.name
  sections.require(
    bool(config.warm_start.checkpoint) or name not in configs.MODELS,
    "warm_start.checkpoint",
    f"it is empty, and model.name {sections.shown(name)} has no weights; name"
    " those that launch/sft.py wrote to WORKDIR/params, or a pretrained model",
  )
  if config.preference.reward_loss is not sections.RewardLoss.STEPS:
    worked_solutions.check_pair(config.preference)
