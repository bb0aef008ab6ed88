"""The settings of a run that spreads over several processes or hosts."""

import dataclasses
import enum


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

  Attributes:
    address: of a Ray cluster, HOST:PORT, or "auto" for the one of this machine.
      "" starts Ray on this machine for the duration of the run.
    replicas: number of rollout replicas. Each has a mesh of its own, with
      `mesh.rollout_*` devices, and `rollout.num_slots` slots.
    min_replicas: number of replicas that have to be ready before a new run
      begins; 0 is all of them. Those that are lost later end nothing, and a run
      that continues from a checkpoint begins with one.
    replica_processes: number of processes of each replica. Several of them
      share a mesh that does not fit on one host.
    replica_cpus: processor cores that Ray reserves for each process of a
      replica.
    replica_gpus: GPUs for each process of a replica. If not 0, all of them are
      the devices of its mesh.
    replica_tpu: TPU slice for each replica, such as v5p:2x2x1, with a process
      on each of its hosts; "" is none.
    replica_timeout_s: a replica that has said nothing for so long loses its
      groups, which another replica continues.
    hang_timeout_s: a replica that answers, but whose thread has been in one
      step of its engine for so long, is killed and started again. The time in
      which it compiles does not count.
    start_timeout_s: limit of each part of the start, in seconds: Ray answers;
      the cluster has enough hosts; they have answered; a pool that scores is
      ready; as many replicas as the run begins with are ready. A process that
      has started has so long until it is a replica. Reading the base of a model
      with LoRA has time of its own.
    report_every_s: seconds between two reports of what is half-written. It is
      what is lost with a replica.
    coordinator_timeout_s: replicas wait so long for a coordinator that has
      ended, before they end too.
    trainer_processes: number of processes that train together, each with
      devices of its own, under jax.distributed.
  """

  kind: ClusterKind = ClusterKind.LOCAL
  address: str = ""
  replicas: int = 1
  min_replicas: int = 0
  replica_processes: int = 1
  replica_cpus: float = 1.0
  replica_gpus: int = 0
  replica_tpu: str = ""
  replica_timeout_s: float = 60.0
  hang_timeout_s: float = 120.0
  start_timeout_s: float = 300.0
  report_every_s: float = 2.0
  coordinator_timeout_s: float = 600.0
  trainer_processes: int = 1
