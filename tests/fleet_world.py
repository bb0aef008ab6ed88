"""A fleet whose replicas are threads of this process, behind a fake transport.

Every message is pickled on its way, as between processes. A test can hold back
what a replica says, end it, or let it fail.
"""

import collections
from concurrent import futures
import pathlib
import pickle
import threading

import numpy as np
import tiny
import worker_world

from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import replica_process
from jaxrl_async.cluster import replica_spec
from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.planning import aot
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import remote
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.weights import transfer_directory
from jaxrl_async.weights import weight_transfer

DEADLINE_S = 60.0


class Engine(replica_spec.EngineSpec):
  """All replicas share one engine, which is compiled once."""

  def make(self):
    return tiny.engine()


ENGINE = Engine(
  model=tiny.MODEL,
  sizes=tiny.SIZES,
  mesh=MeshShape(),
  rules=mesh_lib.ROLLOUT_RULES,
  seed=7,
  end_tokens=tiny.END_TOKENS,
  dtype="float32",
  weights=sections.WeightFormat.FLOAT,
  attention="xla",
)


class Handle:
  """A replica in this process, called by threads as Ray would call it."""

  def __init__(self, place):
    self.place = place
    self.is_dead = False
    self.is_orphaned = threading.Event()
    self.can_speak = threading.Event()
    self.can_speak.set()
    self.has_host = threading.Event()
    self.has_host.set()
    self.can_attach = threading.Event()
    self.can_attach.set()
    self.process = replica_process.ReplicaProcess(
      self.is_orphaned.set, DEADLINE_S
    )
    self.delivered = []
    self.pool = futures.ThreadPoolExecutor(8)

  def _call(self, method, *arguments):
    future = futures.Future()

    def call():
      assert self.has_host.wait(DEADLINE_S)
      future.set_running_or_notify_cancel()
      try:
        result = pickle.loads(
          pickle.dumps(method(*pickle.loads(pickle.dumps(arguments))))
        )
        self.can_speak.wait(DEADLINE_S)
        if self.is_dead:
          raise remote.ReplicaLost("killed")
        future.set_result(result)
      except Exception as error:
        future.set_exception(error)

    if self.is_dead:
      future.set_exception(remote.ReplicaLost("killed"))
    else:
      self.pool.submit(call)
    return future

  def attach(self, name, spec):
    def attach(name, spec):
      assert self.can_attach.wait(DEADLINE_S)
      found = self.process.facts(spec.probe)
      why_not = hosts.difference(found, spec.probe, spec.versions)
      if why_not is not None:
        raise remote.DoesNotFit(why_not)
      self.process.attach(name, spec)

    return self._call(attach, name, spec)

  def collect(self):
    return self._call(self.process.collect)

  def deliver(self, delivery):
    self.delivered.append(delivery)
    self._call(self.process.deliver, delivery)

  def kill(self):
    self.is_dead = True
    self.process.end()


class World(worker_world.World):
  """A world of `worker_world` whose replicas are in a fleet."""

  def __init__(self, path: pathlib.Path, *, num_replicas=2, **options):
    fleet_options = {
      name: options.pop(name)
      for name in (
        *("replica_timeout_s", "start_timeout_s"),
        *("hang_timeout_s", "seconds"),
      )
      if name in options
    }
    super().__init__(path, **options)
    self.channel.close()
    self.directory = path
    self.channel = self.new_channel()
    self.thread = self.error = None
    self.handles = []
    self.notes = []
    probe = path / "probe"
    probe.write_text("here")
    self.spec = replica_spec.ReplicaSpec(
      engine=ENGINE,
      kv_on_adopt=sections.KvOnAdopt.RECOMPUTE,
      tokenizer=tokenizer_lib.character_level(),
      weights=replica_spec.WeightsSpec(
        directory=self.channel.directory,
        incarnation=self.channel.incarnation,
        shapes=self.channel.shapes,
      ),
      base=None,
      probe=(probe, "here"),
      versions=hosts.versions(),
      report_every_s=0.05,
      heartbeat_s=0.05,
      coordinator_timeout_s=DEADLINE_S,
    )
    self.fleet = fleet_lib.Fleet(
      self.coordinator,
      self.launch,
      self.spec,
      num_replicas=num_replicas,
      busy=metrics_lib.BusyClock(),
      note=self.notes.append,
      **{"replica_timeout_s": 30.0, "start_timeout_s": DEADLINE_S}
      | fleet_options,
    )

  def new_channel(self):
    engine = tiny.engine()
    weights = tiny.engine_params(0).weights
    target = aot.placed(weights, engine.params_sharding.weights)
    return weight_transfer.OrbaxChannel(
      self.directory / "weights", transfer_directory.new_incarnation(), target
    )

  def launch(self, place):
    self.handles.append(Handle(place))
    return self.handles[-1]

  def publish(self, version, seed=0):
    self.channel.publish(tiny.engine_params(0, seed).weights, version)
    self.buffer.set_policy_version(version)

  def begin(self):
    """Start the replicas, publish version 0, and begin to generate."""
    self.fleet.start()
    self.publish(0)
    self.thread = threading.Thread(target=self._run, daemon=True)
    self.thread.start()

  def _run(self):
    try:
      self.fleet.run()
    except BaseException as error:
      self.error = error
      self.buffer.close(error)

  def train(self, num_steps, first=0, seed=0):
    """Take the batches of some steps, and publish a version after each."""
    groups = []
    for step in range(first, first + num_steps):
      batch = self.buffer.get_batch(step, DEADLINE_S)
      assert batch is not None, self.fleet.status()
      groups += batch
      self.ledger.add_trained(batch, step=step, skipped_update=False)
      self.publish(step + 1, seed)
    return groups

  def check_books(self):
    with self.fleet.paused(DEADLINE_S):
      state = self.ledger.state()
      ledger_lib.check_balance(
        generated=self.fleet.generated_tokens,
        trained=state.trained_tokens,
        filtered=state.filtered_tokens,
        failed=state.failed_tokens,
        in_flight=sum(g.num_completion_tokens for g in self.in_flight()),
      )
      assert self.fleet.generated_tokens > 0

  def in_flight(self):
    return [*self.fleet.groups().values(), *self.buffer.state().finished]

  def close(self):
    self.fleet.stop()
    self.buffer.close()
    if self.thread is not None:
      self.thread.join(DEADLINE_S)
      assert not self.thread.is_alive()
    self.fleet.close()
    for handle in self.handles:
      for event in (handle.can_speak, handle.has_host, handle.can_attach):
        event.set()
      handle.process.end()
      assert handle.process.join(DEADLINE_S)
      handle.pool.shutdown(wait=False)
    self.channel.close()
    self.ledger.close()
    self.environment.close(DEADLINE_S)


def worlds(directory):
  """What the fixture `make_world` yields: makes worlds, closes them after."""
  made = []

  def make(**options):
    path = directory / str(len(made))
    path.mkdir()
    made.append(World(path, **options))
    return made[-1]

  yield make
  for world in made:
    world.close()


def expected(group):
  """What a scheduler of its own writes for each member of a group."""
  scheduler = tiny.ready()
  sequences = [
    tiny.sequence(
      group.prompt.tokens,
      group=group.index,
      member=member,
      limit=len(group.prompt.tokens) + worker_world.MAX_COMPLETION,
    )
    for member in range(worker_world.GROUP_SIZE)
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  tiny.finish(scheduler)
  return [sequence.trajectory() for sequence in sequences]


def check(world, groups):
  """Every group once, each as a single engine writes it, the books balanced."""
  assert sorted(group.index for group in groups) == list(range(len(groups)))
  world.check_books()
  for group in groups:
    for trajectory, alone in zip(
      group.trajectories, expected(group), strict=True
    ):
      assert trajectory.tokens.tolist() == alone.tokens.tolist()
      np.testing.assert_allclose(
        trajectory.behavior_logprobs, alone.behavior_logprobs, atol=1e-5
      )
      assert sum(count for _, count in trajectory.writers) == (
        trajectory.num_completion_tokens
      )
    staleness = group.admission.deadline - group.admission.birth
    assert staleness == 1


def writers(groups):
  """How many tokens each replica has written."""
  counts = collections.Counter()
  for group in groups:
    for trajectory in group.trajectories:
      for name, count in trajectory.writers:
        counts[name] += count
  return counts
