"""A process of the trainer other than process 0: it does what that one says.

It has the same train state on devices of its own, and starts the same programs
in the same order. It has no buffer, no ledger and no metrics, and prints
nothing unless something fails.

| command | what a follower does |
| --- | --- |
| begin | sets up its trainer, with the attention that works |
| start | makes or reads the first parameters |
| restore | reads its part of a checkpoint |
| batch | packs its rows of the next batch, while it trains on this one |
| step | trains on the oldest batch that it has |
| publish, publish_base | makes the weights in the engines' format |
| write_version | writes its part of what was made last |
| logprobs | computes those of other trajectories |
| save | begins to write its part of a checkpoint |
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import threading
from typing import Any

from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.cluster import trainer_facts
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.processes import world as world_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.weights import weight_transfer


def follow(
  setup: setup_lib.Setup,
  world: world_lib.World,
  *,
  loss: objectives.Loss | None = None,
) -> None:
  """Train with the others until process 0 ends the run.

  Args:
    setup: of the run. It is the same in all processes.
    world: the processes.
    loss: the loss to minimise; None is the config's.
  """
  trainer_facts.check_mesh(setup.train_mesh, world.size)
  follower = _Follower(setup, world, loss)
  stop = supervisor_lib.StopRequest()

  def pass_on() -> None:
    stop.wait(threading.TIMEOUT_MAX)
    world.report(world_lib.STOP)

  with stop.on_signals(lambda message: None):
    supervisor_lib.start_thread("stop request", pass_on, lambda error: None)
    for command, arguments in world.follow(follower.receive):
      follower.do(command, arguments)


class _Follower:
  """The trainer of one process, and what it holds between two commands.

  Threads: `receive` belongs to the thread that reads commands, and `do` to the
  main thread.
  """

  def __init__(
    self,
    setup: setup_lib.Setup,
    world: world_lib.World,
    loss: objectives.Loss | None,
  ):
    self._setup = setup
    self._world = world
    self._loss = loss
    self._begun = threading.Event()
    self._batches: collections.deque[packing.PackedBatch] = collections.deque()
    self._published: Any = None

  def receive(
    self, command: str, arguments: Mapping[str, Any]
  ) -> Mapping[str, Any]:
    """Pack the rows that a command brings."""
    if "segments" not in arguments:
      return arguments
    self._begun.wait()
    return {"batch": self._trainer.placed(arguments["segments"])}

  def do(self, command: str, arguments: Mapping[str, Any]) -> None:
    """Do what a command says."""
    getattr(self, f"_{command}")(**arguments)

  def _begin(self, attention: str) -> None:
    self._setup = dataclasses.replace(self._setup, attention=attention)
    self._trainer = assembly.make_trainer(
      self._setup, metrics_lib.BusyClock(), loss=self._loss, world=self._world
    )
    self._begun.set()

  def _start(self, evaluated: Sequence[str]) -> None:
    setup = dataclasses.replace(self._setup, evaluated=frozenset(evaluated))
    params = assembly.warm_start(setup, lambda step, loss: None)
    params = initial_params.with_adapters(params, setup)
    self._trainer.start(initial_params.of_models(setup, params))

  def _batch(self, batch: packing.PackedBatch) -> None:
    self._batches.append(batch)

  def _step(self, step: int) -> None:
    # No groups: metrics are made of them in process 0.
    self._trainer.run_programs(step, self._batches.popleft())

  def _publish(self) -> None:
    self._published = self._trainer.published()

  def _publish_base(self) -> None:
    self._published = self._trainer.published_base()

  def _write_version(self, path: pathlib.Path) -> None:
    published, self._published = self._published, None
    weight_transfer.write_part(path, published)

  def _logprobs(self, batch: packing.PackedBatch) -> None:
    self._trainer.logprobs_of(batch)

  def _restore(self, what: str, path: pathlib.Path) -> None:
    trainer = self._trainer
    found = frozen_base.restore_arrays(
      what, path, self._setup, trainer.abstract_state()
    )
    if what == frozen_base.BASE:
      found = frozen_base.with_base(trainer.state, found)
    trainer.state = found

  def _save(self, what: str, path: pathlib.Path) -> None:
    state = self._trainer.state
    if what == frozen_base.BASE:
      checkpoint.begin_arrays(path, state.policy.frozen)
    elif self._trainer.has_base:
      checkpoint.begin_arrays(path, frozen_base.without_base(state))
    else:
      checkpoint.begin_arrays(path, state)
