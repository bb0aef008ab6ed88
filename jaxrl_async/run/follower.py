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
| published, published base | makes the weights in the engines' format |
| write version | writes its part of what was made last |
| logprobs | computes those of other trajectories |
| save | begins to write its part of a checkpoint |
"""

import collections
import dataclasses
import pathlib
import threading
from typing import Any

import numpy as np

from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import version_files
from jaxrl_async.coordination import world as world_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.run import assembly
from jaxrl_async.run import frozen_base
from jaxrl_async.run import initial_params
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.run import trainer_facts
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import segments as segments_lib


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
    world.ask_to_stop()

  with stop.on_signals(lambda message: None):
    supervisor_lib.start_thread("stop request", pass_on, lambda error: None)
    for message, made in world.follow(follower.receive):
      follower.do(message, made)


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
    self, message: dict[str, Any], arrays: dict[str, np.ndarray]
  ) -> packing.PackedBatch:
    """Pack the rows that a message brings."""
    self._begun.wait()
    return self._trainer.placed(segments_lib.from_message(message, arrays))

  def do(self, message: dict[str, Any], made: Any) -> None:
    """Do what a message says."""
    if message["command"] == "begin":
      self._begin(message["attention"])
      return
    trainer = self._trainer
    match message["command"]:
      case "start":
        self._start(frozenset(message["evaluated"]))
      case "restore":
        self._restore(message["what"], pathlib.Path(message["path"]))
      case "batch":
        self._batches.append(made)
      case "step":
        # No groups: metrics are made of them in process 0.
        trainer.run_programs(message["step"], self._batches.popleft())
      case "published":
        self._published = trainer.published()
      case "published base":
        self._published = trainer.published_base()
      case "write version":
        published, self._published = self._published, None
        version_files.write_part(pathlib.Path(message["path"]), published)
      case "logprobs":
        trainer.logprobs_of(made)
      case "save":
        self._save(message["what"], pathlib.Path(message["path"]))
      case unknown:
        raise ValueError(f"unknown command {unknown}")

  def _begin(self, attention: str) -> None:
    self._setup = dataclasses.replace(self._setup, attention=attention)
    self._trainer = assembly.make_trainer(
      self._setup, metrics_lib.BusyClock(), loss=self._loss, world=self._world
    )
    self._begun.set()

  def _start(self, evaluated: frozenset[str]) -> None:
    setup = dataclasses.replace(self._setup, evaluated=evaluated)
    params = assembly.warm_start(setup, lambda step, loss: None)
    if setup.model.lora is not None:
      params = initial_params.with_adapters(params, setup)
    self._trainer.start(initial_params.of_models(setup, params))

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
