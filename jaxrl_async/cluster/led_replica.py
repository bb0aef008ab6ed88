"""What the process that leads a replica tells the others, and what they do.

Which programs an engine runs follows from what its scheduler is told: the
sequences that enter and leave, the weights that are adopted, and when a step is
made. `LedScheduler` tells all followers each of these calls before it makes the
call itself. A follower makes the same calls on a scheduler of its own. It reads
the same results from its own devices, so its scheduler decides the same.

| message | what a follower does |
| --- | --- |
| attach | makes its engine and channels, if they differ from those it has |
| schedule | makes a scheduler without sequences |
| fetch | reads its part of a version beside decoding, and says when it has it |
| submit, cancel, adopt, step | calls its scheduler |
| forget | forgets a scheduler, with its cache |

A follower tells while it compiles a program, for which all others wait.

Each step brings a checksum of what the steps before have written. A follower
whose own differs ends the replica, before it could train on such tokens.
"""

from collections.abc import Callable, Iterable
import os
import queue
import threading
import time
from typing import Any
import zlib

from jaxrl_async.cluster import replica_spec
from jaxrl_async.cluster import replica_world
from jaxrl_async.coordination import compile_clock
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.coordination import weight_transfer
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib

_TOKENIZER = "tokenizer"
# The scheduler of the groups, and that of the questions of an evaluation.
_GROUPS, _QUESTIONS = 0, 1
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
    peers: replica_world.Peers,
    size: int,
    on_failure: Callable[[BaseException], None],
    on_compiling: Callable[[], None] = lambda: None,
  ):
    """Take over the connections.

    Args:
      peers: the followers.
      size: number of processes, this one included.
      on_failure: see `replica_world.Peers.watch`.
      on_compiling: is called again and again while a follower compiles.
    """
    self._on_compiling = on_compiling
    self._peers = peers
    self._num_followers = size - 1
    self._changed = threading.Condition()
    self._fetched: dict[int, int] = {}  # followers that have a version
    peers.watch(self._receive, on_failure)

  def tell(self, verb: str, *arguments: Any) -> None:
    """Tell all followers what to do next."""
    self._peers.send(verb, *arguments)

  def attach(self, spec: replica_spec.ReplicaSpec) -> None:
    """Have the followers make what a replica is made of."""
    self.tell("attach", spec)
    self._peers.common = {_TOKENIZER: spec.tokenizer}

  def fetch(self, version: int) -> None:
    """Have the followers fetch a version."""
    with self._changed:
      self._fetched = {version: 0}
    self.tell("fetch", version)

  def wait(self, version: int) -> None:
    """Wait until all followers have fetched a version."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._fetched[version] == self._num_followers
      )

  def forget_questions(self) -> None:
    """Have the followers free the cache of the questions."""
    self.tell("forget", _QUESTIONS)

  def _receive(self, message: tuple[Any, ...]) -> None:
    if message == (_COMPILING,):
      self._on_compiling()
      return
    (version,) = message
    with self._changed:
      self._fetched[version] += 1
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
    number: int = _GROUPS,
    **settings: Any,
  ):
    """Create a scheduler here and in all followers.

    Args:
      engine: whose programs run.
      lead: the followers.
      busy: records the time of every call.
      number: which of the two schedulers of a replica it is.
      **settings: the other arguments of `scheduler.Scheduler`.
    """
    self._lead, self._number = lead, number
    self._checksum = 0
    lead.tell("schedule", number, settings)
    super().__init__(engine, busy=busy, **settings)

  def fresh(self, busy: metrics_lib.BusyClock) -> scheduler_lib.Scheduler:
    return LedScheduler(self.engine, self._lead, busy=busy, number=_QUESTIONS)

  def submit(self, sequence: sequence_lib.Sequence) -> None:
    # Nothing runs yet, and a sequence that is refused is never told.
    super().submit(sequence)
    self._lead.tell("submit", self._number, sequence)

  def cancel(self, owner: sequence_lib.Owner) -> int:
    self._lead.tell("cancel", self._number, owner)
    return super().cancel(owner)

  def adopt(self, params: decode_state_lib.EngineParams, version: int) -> None:
    self._lead.tell("adopt", self._number, version)
    super().adopt(params, version)

  def step(self) -> list[sequence_lib.Sequence]:
    self._lead.tell("step", self._number, self._checksum)
    ended = super().step()
    self._checksum = _checksum(self._checksum, ended)
    return ended


class Follower:
  """A process of a replica that does what the one that leads tells.

  Threads: `_run` is a thread of its own, which owns everything but the queue of
  messages. Another thread fills that one, one for each version reads it, and
  one tells while `_run` compiles.
  """

  def __init__(
    self, peers: replica_world.Peers, on_end: Callable[[], None]
  ) -> None:
    """Begin to follow.

    Args:
      peers: the process that leads.
      on_end: ends this process.
    """
    self._peers = peers
    self._on_end = on_end
    self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    self._spec: replica_spec.ReplicaSpec | None = None
    self._engine: engine_lib.Engine | None = None
    self._channel: weight_transfer.OrbaxChannel | None = None
    self._schedulers: dict[int, scheduler_lib.Scheduler] = {}
    self._checksums: dict[int, int] = {}
    self._weights: dict[int, decode_state_lib.EngineParams] = {}
    self._fetching: threading.Thread | None = None
    peers.watch(self._receive, self._end)
    supervisor_lib.start_thread("follower", self._run, self._end)

  def _receive(self, message: tuple[Any, ...]) -> None:
    if message[0] == "attach":
      # Later messages name the tokenizer instead of bringing it.
      self._peers.common = {_TOKENIZER: message[1].tokenizer}
    self._messages.put(message)

  def _end(self, error: BaseException) -> None:
    """End this process, and say why if that is not known already."""
    if not isinstance(error, replica_world.LostError):
      self._peers.fail(error)
    self._on_end()

  def _run(self) -> None:
    with compile_clock.CompileClock() as clock:
      supervisor_lib.start_thread(
        "compiling", lambda: self._tell_compiling(clock), self._end
      )
      while True:
        verb, *arguments = self._messages.get()
        getattr(self, f"_on_{verb}")(*arguments)

  def _tell_compiling(self, clock: compile_clock.CompileClock) -> None:
    while True:
      time.sleep(_TELL_S)
      if clock.is_compiling:
        self._peers.send(_COMPILING)

  def _on_attach(self, spec: replica_spec.ReplicaSpec) -> None:
    if self._fetching is not None:
      self._fetching.join()
    # Frees the caches and the weights before there are others.
    self._schedulers, self._checksums, self._weights = {}, {}, {}
    before, self._spec = self._spec, spec
    self._engine, self._channel = replica_spec.engine_and_channel(
      spec, before, self._engine
    )

  def _on_schedule(self, number: int, settings: dict[str, Any]) -> None:
    assert self._engine is not None
    self._schedulers[number] = scheduler_lib.Scheduler(
      self._engine, busy=metrics_lib.BusyClock(), **settings
    )
    self._checksums[number] = 0

  def _on_fetch(self, version: int) -> None:
    engine, channel = self._engine, self._channel
    assert engine is not None and channel is not None

    def fetch() -> None:
      weights = channel.read(version)
      self._weights[version] = engine.load_params(weights, version)
      self._peers.send(version)

    self._fetching = supervisor_lib.start_thread(
      "weight-fetch", fetch, self._end
    )

  def _on_submit(self, number: int, sequence: sequence_lib.Sequence) -> None:
    self._schedulers[number].submit(sequence)

  def _on_cancel(self, number: int, owner: sequence_lib.Owner) -> None:
    self._schedulers[number].cancel(owner)

  def _on_adopt(self, number: int, version: int) -> None:
    # Questions may adopt a version when the next one is there already.
    self._keep(lambda v: v >= version)
    self._schedulers[number].adopt(self._weights[version], version)

  def _keep(self, is_kept: Callable[[int], bool]) -> None:
    """Forget versions, while another thread may add one."""
    for version in list(self._weights):
      if not is_kept(version):
        del self._weights[version]

  def _on_forget(self, number: int) -> None:
    self._schedulers.pop(number, None)  # with its cache

  def _on_step(self, number: int, checksum: int) -> None:
    if checksum != self._checksums[number]:
      raise RuntimeError(
        "a process of the replica has generated other tokens than the first"
      )
    ended = self._schedulers[number].step()
    self._checksums[number] = _checksum(checksum, ended)


class FollowerProcess:
  """A process of a replica other than the first, whatever transport calls it.

  Threads: all methods belong to the transport.
  """

  def __init__(self, timeout_s: float):
    """Wait for an invitation.

    Args:
      timeout_s: the process ends if there is none for so long.
    """
    self._has_joined = threading.Event()
    supervisor_lib.start_thread(
      "watch", lambda: self._watch(timeout_s), lambda error: None
    )

  def join(self, invitation: replica_world.Invitation, rank: int) -> None:
    """Connect to the process that leads, and follow it from now on."""
    self._has_joined.set()
    peers = replica_world.join(invitation, rank)
    Follower(peers, on_end=lambda: os._exit(0))

  def _watch(self, timeout_s: float) -> None:
    if not self._has_joined.wait(timeout_s):
      os._exit(0)
