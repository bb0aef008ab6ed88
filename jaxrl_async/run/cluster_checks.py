"""Checks of the settings of several processes, without any of them."""

import importlib.util
import re

from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips

# A host and a port; the host may be an IPv6 address in brackets.
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")


def has_remote_replicas(config: sections.Config) -> bool:
  """Return whether the replicas are in other processes."""
  return config.cluster.kind is sections.ClusterKind.RAY


def replicas_at_start(section: sections.ClusterSection, is_new: bool) -> int:
  """Return how many replicas have to be ready before a run begins.

  Args:
    section: of the config.
    is_new: whether the run does not continue from a checkpoint.
  """
  return section.min_replicas or section.replicas if is_new else 1


def check(config: sections.Config) -> None:
  """Check the cluster's settings.

  Raises:
    ConfigError: one line that names the field and a correct value.
  """
  section = config.cluster
  sections.require(
    section.min_replicas <= section.replicas,
    "cluster.min_replicas",
    f"{section.min_replicas} of {section.replicas} (cluster.replicas); use at"
    " most as many",
  )
  if not has_remote_replicas(config):
    sections.require(
      section.replicas == 1,
      "cluster.replicas",
      f"{section.replicas} need processes of their own; use cluster.kind=ray",
    )
    return
  sections.require(
    importlib.util.find_spec("ray") is not None,
    "cluster.kind",
    "ray is not installed; install the extra: uv sync --extra ray, or pip"
    " install 'jaxrl_async[ray]'",
  )
  sections.require(
    section.address in ("", "auto")
    or _ADDRESS.fullmatch(section.address) is not None,
    "cluster.address",
    f'{sections.shown(section.address)} is no address; use HOST:PORT, "auto",'
    ' or ""',
  )
  sections.require(
    config.transfer.channel is sections.Channel.ORBAX,
    "transfer.channel",
    "direct is for slices of one process; use orbax",
  )
  _check_devices(config)


def _check_devices(config: sections.Config) -> None:
  section, mesh = config.cluster, config.mesh
  for name in ("rollout_data", "rollout_tensor"):
    sections.require(
      getattr(mesh, name) >= 1,
      f"mesh.{name}",
      f"{getattr(mesh, name)} leaves the size open, but replicas have devices"
      " of their own; give their number",
    )
  needed = mesh.rollout_data * mesh.rollout_tensor
  processes = section.replica_processes
  sections.require(
    processes == 1 or mesh.rollout_data == 1,
    "cluster.replica_processes",
    f"{processes} share a mesh whose mesh.rollout_data is {mesh.rollout_data};"
    " make it 1, and use more replicas (cluster.replicas) instead",
  )
  sections.require(
    needed % processes == 0,
    "cluster.replica_processes",
    f"{processes} does not divide the {needed} devices of a replica's mesh"
    " (mesh.rollout_data * rollout_tensor)",
  )
  sections.require(
    section.replica_gpus * processes in (0, needed),
    "cluster.replica_gpus",
    f"{section.replica_gpus} for each of {processes} processes is not the"
    f" number of devices of a replica's mesh, {needed} (mesh.rollout_data *"
    " rollout_tensor)",
  )
  if not section.replica_tpu:
    return
  sections.require(
    not section.replica_gpus,
    "cluster.replica_tpu",
    f"{section.replica_tpu} beside cluster.replica_gpus; use one of them",
  )
  num_chips = tpu_chips.num_chips(section.replica_tpu, "cluster.replica_tpu")
  sections.require(
    num_chips == needed,
    "cluster.replica_tpu",
    f"{section.replica_tpu} has {num_chips} chips, and a replica's mesh has"
    f" {needed} (mesh.rollout_data * rollout_tensor)",
  )
