"""The channels that bring weights from the trainer to the engine of a run."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.coordination import transfer_directory
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.coordination import world as world_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.planning import aot
from jaxrl_async.planning import memory_estimate
from jaxrl_async.run import device_checks
from jaxrl_async.storage import disk
from jaxrl_async.training import trainer as trainer_lib


def make_channel(
  config: sections.Config,
  workdir: pathlib.Path,
  published: Any,
  engine: engine_lib.Engine | None,
  note: Callable[[str], None],
  world: world_lib.World | None = None,
) -> weight_transfer.WeightChannel:
  """Build the channel that brings weights from the trainer to the engine.

  Args:
    config: a validated config.
    workdir: of the run.
    published: shapes and dtypes of the arrays that are published: all weights,
      or the base or the adapters of a model with LoRA.
    engine: the engine that adopts them; None if none is in this process.
    note: is called with messages about what was found in the directory of the
      channel.
    world: the processes that train together; None is this one alone.
  """
  target = published
  if engine is not None:
    shardings = engine.params_sharding.weights
    if engine.model.lora is not None:
      is_base = "embedding" in published
      shardings = (lora_lib.base if is_base else lora_lib.adapters)(shardings)
    target = aot.placed(published, shardings)
  return weight_transfer.make_channel(
    config.transfer.channel,
    directory=transfer_directory.prepare(
      _transfer_section(config.transfer, workdir, world),
      workdir,
      device_checks.num_bytes(target),
      note,
    ),
    target=target,
    coalesce=config.algorithm.max_staleness > 0,
    world=world,
    note=note,
  )


def _transfer_section(
  section: sections.TransferSection,
  workdir: pathlib.Path,
  world: world_lib.World | None,
) -> sections.TransferSection:
  """Return a section whose directory all processes of the trainer share."""
  if section.directory or world is None or world.is_one_host:
    return section
  return dataclasses.replace(section, directory=str(workdir))


def send_base(
  config: sections.Config,
  workdir: pathlib.Path,
  trainer: trainer_lib.Trainer,
  engine: engine_lib.Engine,
  note: Callable[[str], None],
) -> None:
  """Send the engine the weights that no version changes.

  They travel through a channel of the configured kind, which is closed
  afterwards. The versions that follow hold adapters only.

  Raises:
    WeightTransferError: they could not be sent.
    StorageError: the directory of the channel is full.
  """
  shapes = trainer.base_shapes()
  channel = make_channel(config, workdir, shapes, engine, note, trainer.world)
  try:
    channel.publish(trainer.published_base(), 0)
    timeout_s = config.run.stall_timeout_s + disk.most_s(channel.num_bytes)
    adopted = channel.adopt_first(timeout_s)
    if adopted is None:
      raise weight_transfer.WeightTransferError(
        f"the base did not arrive in {timeout_s:.0f} s"
      )
    engine.hold_base(adopted[0])
  finally:
    channel.close(config.run.join_timeout_s)
  adapters = device_checks.num_bytes(trainer.published_shapes())
  note(
    f"the base is in the engine ({memory_estimate.size(channel.num_bytes)});"
    f" each version brings its adapters ({memory_estimate.size(adapters)})"
  )
