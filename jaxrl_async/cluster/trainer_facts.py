"""What has to be the same in all processes of a trainer.

Processes of other code would start other programs, and each would wait for the
others for ever. So all of them are compared before anything starts.
"""

from collections.abc import Iterator
import pathlib
from typing import Any

from jaxrl_async.cluster import hosts
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections


def check_size(config: sections.Config, size: int) -> None:
  """Check that there are as many processes as the run asks for.

  Raises:
    ConfigError: there are not.
  """
  wanted = config.cluster.trainer_processes
  sections.require(
    wanted == size,
    "cluster.trainer_processes",
    f"the config asks for {wanted}, and this is one of {size} (num_processes)",
  )


def check_mesh(mesh: Any, size: int) -> None:
  """Check that each process has devices of the train mesh.

  Raises:
    ConfigError: a process would have nothing to train on.
  """
  found = {device.process_index for device in mesh.devices.flat}
  sections.require(
    size == 1 or len(found) == size,
    "mesh.train_data",
    f"the train mesh of {mesh.size} devices leaves out"
    f" {size - len(found)} of {size} processes; use the devices of all"
    " processes",
  )


def facts(config: sections.Config, workdir: pathlib.Path) -> dict[str, Any]:
  """Return what has to be the same in each process, by name.

  The names of settings are those of their fields.
  """
  return {
    **hosts.versions(),
    "workdir": str(workdir),
    **dict(_fields(fields_lib.plain(config))),
  }


def shared(
  config: sections.Config, workdir: pathlib.Path
) -> dict[str, pathlib.Path]:
  """Return the directories that all processes write to, by their settings.

  Without `transfer.directory` the processes of one host use its memory, and
  those of several hosts the workdir.
  """
  directories = {"workdir": workdir}
  if config.transfer.directory:
    directories["transfer.directory"] = pathlib.Path(
      config.transfer.directory
    ).absolute()
  return directories


def _fields(
  section: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
  for name, value in section.items():
    if isinstance(value, dict) and value:
      yield from _fields(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}", value
