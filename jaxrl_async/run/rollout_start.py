"""Builds the rollout side of a run: in this process, or in a cluster."""

import dataclasses
from typing import Any

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.cluster import environment as environment_lib
from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import ray_replicas
from jaxrl_async.cluster import replica_spec
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.planning import aot
from jaxrl_async.planning import memory_estimate
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import client_requests
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.rollout import worker as worker_lib
from jaxrl_async.run import session as session_lib
from jaxrl_async.storage import disk
from jaxrl_async.training import trainer as trainer_lib
from jaxrl_async.weights import transfer_directory
from jaxrl_async.weights import weight_transfer

_HEARTBEATS_PER_TIMEOUT = 4
_MAX_HEARTBEAT_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remote:
  """What is there of replicas in other processes before they are started.

  Attributes:
    channels: to the replicas, that of the versions last.
    spec: what every replica will be attached with.
    num_needed: how many of them the run begins with.
  """

  cluster: ray_replicas.Cluster
  channels: list[weight_transfer.OrbaxChannel]
  spec: replica_spec.ReplicaSpec
  num_needed: int


def generator(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  *,
  trainer: trainer_lib.Trainer,
  is_new: bool,
) -> engine_lib.Engine | Remote:
  """Return the engine in this process, or connect to the cluster of the run.

  This comes before the first stage, so that a host that does not fit is told at
  once.

  Args:
    setup: of the run.
    session: of this start.
    trainer: that publishes the weights.
    is_new: whether the run does not continue from a checkpoint.

  Raises:
    ConfigError: Ray cannot be used, or the hosts of the cluster are too few or
      do not fit.
    Interrupted: the run was asked to end.
  """
  if not config_checks.has_remote_replicas(setup.config):
    return assembly.make_engine(setup)
  channels = _channels(setup, session, trainer)
  spec = _spec(setup, channels)
  hosts.write_probe(spec.probe)
  session.shutdown.closes(spec.probe[0].unlink, True)
  cluster = ray_replicas.Cluster(
    setup.config.cluster,
    run_name=ray_replicas.run_name(session.workdir),
    environment=environment_lib.of_replicas(setup.config),
  )
  session.shutdown.closes(cluster.close)
  section = setup.config.cluster
  # Hosts may have been lost since a run has begun.
  num_needed = (section.min_replicas or section.replicas) if is_new else 1

  def check() -> None:
    session.stop.check("stopped while the hosts were checked")

  # Nobody joins a cluster that was started here.
  wait_s = section.start_timeout_s if section.address else 0.0
  cluster.hosts.wait_for(num_needed, wait_s, check, session.progress.note)
  cluster.hosts.check(spec.versions, spec.probe, check)
  return Remote(
    cluster=cluster, channels=channels, spec=spec, num_needed=num_needed
  )


def build(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  coordinator: coordinator_lib.Coordinator,
  trainer: trainer_lib.Trainer,
  generator: engine_lib.Engine | Remote,
  busy: metrics_lib.BusyClock,
  requests: client_requests.ClientRequests | None,
) -> tuple[rollout_side.RolloutSide, weight_transfer.WeightChannel]:
  """Build the rollout side and the channel through which it gets weights.

  Args:
    setup: of the run.
    session: of this start.
    coordinator: of the run.
    trainer: that publishes the weights.
    generator: an engine, or a cluster in which replicas are started. At least
      one of them is ready afterwards.
    busy: records how long the rollout side is busy.
    requests: of clients, which an engine in this process serves too.

  Raises:
    ConfigError: no replica was ready in time.
    ReplicaFailed: a replica cannot work with this process.
    Interrupted: the run was asked to end.
  """
  config, note = setup.config, session.progress.note
  if isinstance(generator, engine_lib.Engine):
    if trainer.has_base:
      _send_base(setup, session, trainer, generator)
    channel = _open_channel(
      setup, session, trainer.published_shapes(), generator
    )
    replica = replica_lib.Replica(
      "replica 0",
      coordinator,
      assembly.make_scheduler(setup, generator, busy),
      channel=channel,
      tokenizer=setup.tokenizer,
      requests=requests,
    )
    worker = worker_lib.RolloutWorker(coordinator, replica, session.seconds)
    return worker, channel
  remote = generator
  for base in remote.channels[:-1]:
    # It stays, for replicas that join late.
    base.publish(trainer.published_base(), 0)
  fleet = fleet_lib.Fleet(
    coordinator,
    remote.cluster.launch,
    remote.spec,
    num_replicas=config.cluster.replicas,
    replica_timeout_s=config.cluster.replica_timeout_s,
    start_timeout_s=_start_timeout_s(config, remote.channels),
    hang_timeout_s=config.cluster.hang_timeout_s,
    busy=busy,
    note=note,
  )
  session.shutdown.closes(fleet.close)
  try:
    fleet.start(
      lambda: session.stop.check("stopped while replicas were starting"),
      remote.num_needed,
    )
  except fleet_lib.NoReplicaError as error:
    raise sections.ConfigError(
      f"cluster.replicas: {error}; {remote.cluster.hosts.missing()}"
    ) from error
  if fleet.num_ready < config.cluster.replicas:
    note(
      f"{fleet.num_ready} of {config.cluster.replicas} replicas are ready; the"
      f" others may join later; {remote.cluster.hosts.missing()}"
    )
  return fleet, remote.channels[-1]


def _channels(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  trainer: trainer_lib.Trainer,
) -> list[weight_transfer.OrbaxChannel]:
  """Return the channels to other processes, that of the versions last.

  With LoRA there is one of the base before it.
  """
  channels = []
  for shapes in (trainer.base_shapes(), trainer.published_shapes()):
    if shapes is None:
      continue
    channel = _open_channel(setup, session, shapes, None)
    assert isinstance(channel, weight_transfer.OrbaxChannel)
    channels.append(channel)
  return channels


def stall_timeout_s(
  config: sections.Config, channel: weight_transfer.WeightChannel
) -> float:
  """Return how long nothing may move in a run.

  A version that is written to a slow disk and read from it is no standstill,
  nor is the time until a silent replica has been replaced.
  """
  limit_s, cluster = config.run.stall_timeout_s, config.cluster
  if config_checks.has_remote_replicas(config):
    limit_s = max(
      limit_s, cluster.replica_timeout_s + 2 * cluster.start_timeout_s
    )
  return round(limit_s + 2 * disk.most_s(channel.num_bytes), 0)


def _start_timeout_s(
  config: sections.Config, channels: list[weight_transfer.OrbaxChannel]
) -> float:
  """Return how long a replica may take to be attached.

  Meanwhile a base is written and read, or an earlier version is read to its
  end.
  """
  moving_s = disk.most_s(sum(channel.num_bytes for channel in channels))
  return round(config.cluster.start_timeout_s + moving_s, 0)


def _spec(
  setup: setup_lib.Setup, channels: list[weight_transfer.OrbaxChannel]
) -> replica_spec.ReplicaSpec:
  """Return what every replica of a run is attached with."""
  config = setup.config
  *bases, weights = [
    replica_spec.WeightsSpec(
      directory=channel.directory,
      incarnation=channel.incarnation,
      shapes=channel.shapes,
      coalesce=config.algorithm.max_staleness > 0,
    )
    for channel in channels
  ]
  timeout_s = config.cluster.replica_timeout_s
  return replica_spec.ReplicaSpec(
    engine=replica_spec.EngineSpec(
      model=setup.model,
      sizes=assembly.engine_sizes(config),
      mesh=mesh_lib.shape_of(setup.rollout_mesh),
      rules=config.mesh.rollout_rules,
      seed=config.seed,
      end_tokens=setup.tokenizer.end_tokens,
      dtype=config.rollout.dtype,
      weights=config.rollout.weights,
      attention=config.rollout.attention,
    ),
    kv_on_adopt=config.rollout.kv_on_adopt,
    tokenizer=setup.tokenizer,
    weights=weights,
    base=bases[0] if bases else None,
    probe=(weights.directory / "probe", weights.incarnation),
    versions=hosts.versions(),
    report_every_s=config.cluster.report_every_s,
    heartbeat_s=min(timeout_s / _HEARTBEATS_PER_TIMEOUT, _MAX_HEARTBEAT_S),
    coordinator_timeout_s=config.cluster.coordinator_timeout_s,
  )


# -- channels of weights ------------------------------------------------------


def _open_channel(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  published: Any,
  engine: engine_lib.Engine | None,
) -> weight_transfer.WeightChannel:
  """Do what `_make_channel` does, and let the end of the run close it."""
  channel = _make_channel(setup, session, published, engine)
  # The last version may still be on its way to a slow disk.
  timeout_s = setup.config.run.join_timeout_s + disk.most_s(channel.num_bytes)
  session.shutdown.closes(channel.close, timeout_s)
  return channel


def _make_channel(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  published: Any,
  engine: engine_lib.Engine | None,
) -> weight_transfer.WeightChannel:
  """Build the channel that brings weights from the trainer to the engine.

  Args:
    setup: of the run.
    session: of this start.
    published: shapes and dtypes of the arrays that are published: all weights,
      or the base or the adapters of a model with LoRA.
    engine: the engine that adopts them; None if none is in this process.
  """
  target = published
  if engine is not None:
    shardings = engine.params_sharding.weights
    if engine.model.lora is not None:
      is_base = "embedding" in published
      shardings = (lora_lib.base if is_base else lora_lib.adapters)(shardings)
    target = aot.placed(published, shardings)
  section = _transfer_section(setup.config, session)
  return weight_transfer.make_channel(
    section.channel,
    directory=transfer_directory.prepare(
      section,
      session.workdir,
      device_checks.num_bytes(target),
      session.progress.note,
    ),
    target=target,
    coalesce=setup.config.algorithm.max_staleness > 0,
    world=session.world,
    note=session.progress.note,
  )


def _transfer_section(
  config: sections.Config, session: session_lib.Session
) -> sections.TransferSection:
  """Return the section with its channel and its directory decided."""
  section = dataclasses.replace(config.transfer)
  if section.channel is sections.Channel.AUTO:
    is_apart = config_checks.has_remote_replicas(config)
    section.channel = (
      sections.Channel.ORBAX if is_apart else sections.Channel.DIRECT
    )
  if not section.directory and not session.world.is_one_host:
    # All processes of the trainer share it.
    section.directory = str(session.workdir)
  return section


def _send_base(
  setup: setup_lib.Setup,
  session: session_lib.Session,
  trainer: trainer_lib.Trainer,
  engine: engine_lib.Engine,
) -> None:
  """Send the engine the weights that no version changes.

  They travel through a channel of the configured kind, which is closed
  afterwards. The versions that follow hold adapters only.
  """
  section = setup.config.run
  channel = _make_channel(setup, session, trainer.base_shapes(), engine)
  try:
    channel.publish(trainer.published_base(), 0)
    timeout_s = section.stall_timeout_s + disk.most_s(channel.num_bytes)
    adopted = channel.adopt_first(timeout_s)
    if adopted is None:
      raise weight_transfer.WeightTransferError(
        f"the base did not arrive in {timeout_s:.0f} s"
      )
    engine.hold_base(adopted[0])
  finally:
    channel.close(section.join_timeout_s)
  adapters = device_checks.num_bytes(trainer.published_shapes())
  session.progress.note(
    f"the base is in the engine ({memory_estimate.size(channel.num_bytes)});"
    f" each version brings its adapters ({memory_estimate.size(adapters)})"
  )
