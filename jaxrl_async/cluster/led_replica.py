"""What the process that leads a replica tells the others, and what they do.

Which programs an engine runs follows from what its scheduler is told: the
sequences that enter and leave, the weights that are adopted, and when a step is
made. `LedScheduler` tells all followers each of these calls before it makes the
call itself. A follower makes the same calls on a scheduler of its own. It reads
the same results from its own devices, so its scheduler decides the same.

| command | what a follower does |
| --- | --- |
| attach | makes its engine and channels, if they differ from those it has |
| schedule | makes a scheduler without sequences |
| fetch | reads its part of a version beside decoding, and says when it has it |
| submit, cancel, adopt, step | calls its scheduler |

A follower reports while it compiles a program, for which all others wait.

Each step brings a checksum of what the steps before have written. A follower
whose own differs ends the replica, before it could train on such tokens.
"""

from collections.abc import Callable, Iterable, Mapping
import threading
import time
from typing import Any
import zlib

from jaxrl_async.cluster import replica_spec
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.processes import compile_clock
from jaxrl_async.processes import rendezvous
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.processes import world as world_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.weights import weight_transfer

_TOKENIZER = "tokenizer"
_COMPILING, _TELL_S = "compiling", 1.0


def _checksum(before: int, ended: Iterable[sequence_lib.Sequence]) -> int:
  """Return a checksum of sequences and of what ended before them."""
  for sequence in ended:
    before = zlib.crc32(sequence.written().tobytes(), before)
  return before


class Lead:
  """The followers of a replica, as the process that leads sees them.

  Threads: `tell` belongs to the replica's thread, `fetch` and `wait` to the
  thread that fetches a version. A condition guards what followers say of it.
  """

  def __init__(
    self,
    world: world_lib.World,
    before_ending: Callable[[str], None],
    on_compiling: Callable[[], None] = lambda: None,
  ):
    """Lead the processes of a replica.

    `before_ending` is that of `world.World.lead`. `on_compiling` is called
    again and again while a follower compiles.
    """
    self.world = world
    self._on_compiling = on_compiling
    self._changed = threading.Condition()
    self._fetched: dict[int, int] = {}  # followers that have a version
    world.lead(self._on_report, before_ending)

  def attach(self, spec: replica_spec.ReplicaSpec) -> None:
    """Have the followers make what a replica is made of."""
    self.world.tell("attach", spec=spec)
    self.world.common = {_TOKENIZER: spec.tokenizer}

  def fetch(self, version: int) -> None:
    """Have the followers fetch a version."""
    with self._changed:
      self._fetched = {version: 0}
    self.world.tell("fetch", version=version)

  def wait(self, version: int) -> None:
    """Wait until all followers have fetched a version."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._fetched[version] == self.world.size - 1
      )

  def _on_report(self, name: str, arguments: Mapping[str, Any]) -> None:
    if name == _COMPILING:
      self._on_compiling()
      return
    with self._changed:
      self._fetched[arguments["version"]] += 1
      self._changed.notify_all()


class LedChannel(weight_transfer.OrbaxChannel):
  """A channel whose versions all processes of a replica read together.

  Orbax lets each of them wait for the others. One that cannot read a version
  ends the replica.
  """

  lead: Lead

  def read(self, version: int) -> Any:
    # They need no locks: the version stays for as long as this one is held.
    self.lead.fetch(version)
    try:
      weights = super().read(version)
    except weight_transfer.UnreadableVersionError as error:
      # The others may wait for this process inside of Orbax.
      raise weight_transfer.WeightTransferError(str(error)) from error
    self.lead.wait(version)
    return weights


class LedScheduler(scheduler_lib.Scheduler):
  """A scheduler whose calls are made by all processes of a replica."""

  def __init__(
    self,
    engine: engine_lib.Engine,
    lead: Lead,
    *,
    busy: metrics_lib.BusyClock,
    **settings: Any,
  ):
    """Create a scheduler here and in all followers."""
    self._lead = lead
    self._checksum = 0
    self._tell("schedule", settings=settings)
    super().__init__(engine, busy=busy, **settings)

  def _tell(self, command: str, **arguments: Any) -> None:
    self._lead.world.tell(command, **arguments)

  def submit(self, sequence: sequence_lib.Sequence) -> None:
    # Nothing runs yet, and a sequence that is refused is never told.
    super().submit(sequence)
    self._tell("submit", sequence=sequence)

  def cancel(self, owner: sequence_lib.Owner) -> int:
    self._tell("cancel", owner=owner)
    return super().cancel(owner)

  def adopt(self, params: decode_state_lib.EngineParams, version: int) -> None:
    self._tell("adopt", version=version)
    super().adopt(params, version)

  def step(self) -> list[sequence_lib.Sequence]:
    self._tell("step", checksum=self._checksum)
    ended = super().step()
    self._checksum = _checksum(self._checksum, ended)
    return ended


def follow(invitation: rendezvous.Invitation, rank: int) -> None:
  """Join a replica as one of its further processes, and follow in a thread.

  Raises:
    ConfigError: the processes could not be connected.
  """
  world = rendezvous.join(invitation, rank, {})
  rendezvous.connect_jax(world, invitation.timeout_s)
  Follower(world)


class Follower:
  """A process of a replica that does what the one that leads tells.

  Threads: `_run` is a thread of its own, which owns everything but the reports.
  Another one takes the commands, one for each version reads it, and one tells
  while `_run` compiles.
  """

  def __init__(self, world: world_lib.World) -> None:
    self._world = world
    self._spec: replica_spec.ReplicaSpec | None = None
    self._engine: engine_lib.Engine | None = None
    self._channel: weight_transfer.OrbaxChannel | None = None
    self._scheduler: scheduler_lib.Scheduler | None = None
    self._checksum = 0
    self._weights: dict[int, decode_state_lib.EngineParams] = {}
    self._fetching: threading.Thread | None = None
    supervisor_lib.start_thread("follower", self._run, self._end)

  def _receive(
    self, command: str, arguments: Mapping[str, Any]
  ) -> Mapping[str, Any]:
    if command == "attach":
      # Later commands name the tokenizer instead of bringing it.
      self._world.common = {_TOKENIZER: arguments["spec"].tokenizer}
    return arguments

  def _end(self, error: BaseException) -> None:
    """Tell the process that leads why this one ends, and end it."""
    line = " ".join(f"{type(error).__name__}: {error}".split())
    self._world.close(line)
    world_lib.end_process(line)

  def _run(self) -> None:
    with compile_clock.CompileClock() as clock:
      supervisor_lib.start_thread(
        "compiling", lambda: self._tell_compiling(clock), self._end
      )
      for command, arguments in self._world.follow(self._receive):
        getattr(self, f"_on_{command}")(**arguments)

  def _tell_compiling(self, clock: compile_clock.CompileClock) -> None:
    while True:
      time.sleep(_TELL_S)
      if clock.is_compiling:
        self._world.report(_COMPILING)

  def _on_attach(self, spec: replica_spec.ReplicaSpec) -> None:
    if self._fetching is not None:
      self._fetching.join()
    # Frees the cache and the weights before there are others.
    self._scheduler, self._checksum, self._weights = None, 0, {}
    before, self._spec = self._spec, spec
    self._engine, self._channel = replica_spec.engine_and_channel(
      spec, before, self._engine
    )

  def _on_schedule(self, settings: dict[str, Any]) -> None:
    assert self._engine is not None
    self._scheduler = scheduler_lib.Scheduler(
      self._engine, busy=metrics_lib.BusyClock(), **settings
    )
    self._checksum = 0

  def _on_fetch(self, version: int) -> None:
    engine, channel = self._engine, self._channel
    assert engine is not None and channel is not None

    def fetch() -> None:
      weights = channel.read(version)
      self._weights[version] = engine.load_params(weights, version)
      self._world.report("fetched", version=version)

    self._fetching = supervisor_lib.start_thread(
      "weight-fetch", fetch, self._end
    )

  @property
  def _led(self) -> scheduler_lib.Scheduler:
    assert self._scheduler is not None
    return self._scheduler

  def _on_submit(self, sequence: sequence_lib.Sequence) -> None:
    self._led.submit(sequence)

  def _on_cancel(self, owner: sequence_lib.Owner) -> None:
    self._led.cancel(owner)

  def _on_adopt(self, version: int) -> None:
    for other in list(self._weights):  # another thread may add one
      if other < version:
        del self._weights[other]
    self._led.adopt(self._weights[version], version)

  def _on_step(self, checksum: int) -> None:
    if checksum != self._checksum:
      raise RuntimeError(
        "a process of the replica has generated other tokens than the first"
      )
    self._checksum = _checksum(checksum, self._led.step())
