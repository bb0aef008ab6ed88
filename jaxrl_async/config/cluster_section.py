"""The settings of a run that spreads over several processes or hosts."""

import dataclasses
import enum

from jaxrl_async.config import setting as setting_lib
from jaxrl_async.config.setting import setting


class ClusterKind(enum.Enum):
  """Where the rollout replicas of a run are.

  LOCAL has one replica, in the process that trains. RAY has any number of
  them, in processes that Ray starts on this machine or on a cluster.
  """

  LOCAL = "local"
  RAY = "ray"


@dataclasses.dataclass(kw_only=True, slots=True)
class ClusterSection:
  """Replicas in other processes, and a trainer of several processes.

  All fields but `trainer_processes` have an effect only with kind = RAY.
  """

  kind: ClusterKind = setting(ClusterKind.LOCAL)
  """Where the rollout replicas are."""
  address: str = setting("")
  """Of a Ray cluster, HOST:PORT, or "auto" for the one of this machine. ""
  starts Ray on this machine for the duration of the run."""
  replicas: int = setting(1, low=1, high=4096)
  """Number of rollout replicas. Each has a mesh of its own, with
  `mesh.rollout_*` devices, and `rollout.num_slots` slots."""
  min_replicas: int = setting(0, low=0, high=4096)
  """Number of replicas that have to be ready before a new run begins; 0 is all
  of them. Those that are lost later end nothing, and a run that continues from
  a checkpoint begins with one."""
  replica_processes: int = setting(1, low=1, high=4096)
  """Number of processes of each replica. Several of them share a mesh that does
  not fit on one host."""
  replica_cpus: float = setting(1.0, low=0, high=setting_lib.MAX_GROUP)
  """Processor cores that Ray reserves for each process of a replica."""
  replica_gpus: int = setting(0, low=0, high=setting_lib.MAX_GROUP)
  """GPUs for each process of a replica. If not 0, all of them are the devices
  of its mesh."""
  replica_tpu: str = setting("")
  """TPU slice for each replica, such as v5p:2x2x1, with a process on each of
  its hosts; "" is none."""
  replica_timeout_s: float = setting(
    60.0, low=1, high=setting_lib.MAX_TIMEOUT_S
  )
  """A replica that has said nothing for so long loses its groups, which another
  replica continues."""
  hang_timeout_s: float = setting(120.0, low=1, high=setting_lib.MAX_TIMEOUT_S)
  """A replica that answers, but whose thread has been in one step of its engine
  for so long, is killed and started again. The time in which it compiles does
  not count."""
  start_timeout_s: float = setting(300.0, low=1, high=setting_lib.MAX_TIMEOUT_S)
  """Limit of each part of the start, in seconds: Ray answers; the cluster has
  enough hosts; they have answered; as many replicas as the run begins with are
  ready. A process that has started has so long until it is a replica. Reading
  the base of a model with LoRA has time of its own."""
  report_every_s: float = setting(2.0, low=0.1, high=setting_lib.MAX_TIMEOUT_S)
  """Seconds between two reports of what is half-written. It is what is lost
  with a replica."""
  coordinator_timeout_s: float = setting(
    600.0, low=1, high=setting_lib.MAX_TIMEOUT_S
  )
  """Replicas wait so long for a coordinator that has ended, before they end
  too."""
  trainer_processes: int = setting(1, low=1, high=4096)
  """Number of processes that train together, each with devices of its own,
  under jax.distributed."""
