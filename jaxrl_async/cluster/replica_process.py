"""A replica in a process of its own, whatever transport calls it.

A thread owns the replica and generates. The transport's threads only hand
over what has arrived and what is to be sent, so that they answer at once, also
while the devices compute.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import queue
import socket
import threading
import time
from typing import Any

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import led_replica
from jaxrl_async.cluster import replica_spec
from jaxrl_async.config import sections
from jaxrl_async.devices import memory_error
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.processes import compile_clock
from jaxrl_async.processes import rendezvous
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import attached_replica
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import replica as replica_lib

_IDLE_S = 0.02
_LOOK_S = 0.5
_LONGEST = 1000  # characters of an error
_LOST_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attachment:
  """A replica under one name, and what it works with."""

  spec: replica_spec.ReplicaSpec
  engine: engine_lib.Engine
  attached: attached_replica.AttachedReplica


class ReplicaProcess:
  """Generates for whoever attached it last.

  Invariant: everything about groups and weights belongs to the last attachment.
  Of an earlier one only the engine is kept, with its compiled programs.

  Threads: `_run` is a thread of its own, which owns the replica. All public
  methods belong to the transport, several of them at a time.
  """

  def __init__(self, on_orphaned: Callable[[], None], timeout_s: float):
    """Start the thread, which waits to be attached.

    Args:
      on_orphaned: ends the process; called when nobody has called for so long.
      timeout_s: how long that is until an attachment says something else.
    """
    self._on_orphaned = on_orphaned
    self._commands: queue.SimpleQueue[
      tuple[Callable[..., Any], tuple[Any, ...], futures.Future]
    ] = queue.SimpleQueue()
    self._attachment: _Attachment | None = None
    self._clock = compile_clock.CompileClock()
    self._listener: socket.socket | None = None
    self._invitation: rendezvous.Invitation | None = None
    self._lead: led_replica.Lead | None = None
    self._failure: BaseException | None = None
    self._called_s = time.monotonic()
    self._timeout_s = timeout_s
    self._is_ending = threading.Event()
    self._has_ended = threading.Event()
    supervisor_lib.start_thread("replica", self._run, self._fail)
    supervisor_lib.start_thread("watch", self._watch, self._fail)

  # -- the transport's threads ----------------------------------------------

  def facts(self, probe: hosts.Probe) -> hosts.Facts:
    """Return what the caller has to know before it attaches the replica."""
    self._called_s = time.monotonic()
    return hosts.facts(probe)

  def num_processes(self) -> int:
    """Return the number of processes of this replica that have met."""
    return 1 if self._lead is None else self._lead.world.size

  def invite(
    self, host: str, size: int, timeout_s: float
  ) -> rendezvous.Invitation:
    """Listen at a free port of this host, which others reach at `host`."""
    self._listener = rendezvous.listen((host, 0))
    self._invitation = rendezvous.Invitation(
      size=size,
      address=(host, self._listener.getsockname()[1]),
      key=rendezvous.new_key(),
      timeout_s=timeout_s,
      of="replica",
    )
    return self._invitation

  def meet(self) -> None:
    """Wait for the other processes, and lead them from now on.

    Raises:
      ReplicaFailed: they could not be connected.
    """
    self._called_s = time.monotonic()
    listener, invitation = self._listener, self._invitation
    assert listener is not None and invitation is not None
    try:
      world = rendezvous.gather(listener, invitation, {})
      rendezvous.connect_jax(world, invitation.timeout_s)
    except sections.ConfigError as error:
      raise remote.ReplicaFailed(
        f"on {socket.gethostname()}: {error}"
      ) from error
    self._lead = led_replica.Lead(
      world, self._before_ending, self._on_follower_compiles
    )

  def attach(self, name: str, spec: replica_spec.ReplicaSpec) -> None:
    """Become the replica of this name, and forget everything else.

    Raises:
      ReplicaFailed: it could not be built.
    """
    self._called_s = time.monotonic()
    self._timeout_s = spec.coordinator_timeout_s
    if self._failure is not None:
      # It failed when nobody listened. A new process has to take its place.
      self._on_orphaned()
    self._do(self._attach, name, spec)

  def collect(self) -> remote.Said:
    """Return what the replica says next; see `remote.Handle`.

    Raises:
      ReplicaFailed: the replica has failed.
    """
    self._called_s = time.monotonic()
    self._raise_failure()
    this = self._attachment
    assert this is not None
    said = this.attached.collect(this.spec.heartbeat_s)
    self._raise_failure()
    return said

  def deliver(self, delivery: remote.Delivery) -> None:
    """Take work for the replica."""
    self._called_s = time.monotonic()
    this = self._attachment
    if this is not None:
      this.attached.link.deliver(delivery)

  def end(self) -> None:
    """Let the threads end, for a transport within one process."""
    self._is_ending.set()
    self._commands.put((lambda: None, (), futures.Future()))

  def join(self, timeout_s: float) -> bool:
    """Wait until the replica's thread has ended, and return whether it has."""
    return self._has_ended.wait(timeout_s)

  def _do(self, function: Callable[..., Any], *arguments: Any) -> Any:
    """Have the replica's thread call a function, and return its result."""
    future: futures.Future = futures.Future()
    self._commands.put((function, arguments, future))
    while not futures.wait([future], timeout=_LOOK_S).done:
      self._called_s = time.monotonic()  # the caller waits
      self._raise_failure()
      if self._has_ended.is_set():
        raise remote.ReplicaLost("its thread has ended")
    return future.result()

  def _raise_failure(self) -> None:
    error = self._failure
    if isinstance(error, remote.ReplicaFailed):
      raise error
    if error is not None:
      line = memory_error.explained(error)
      if not line:
        # Some errors of JAX and of Orbax have many lines.
        line = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
      raise remote.ReplicaFailed(f"on {socket.gethostname()}: {line}")

  def _before_ending(self, failure: str) -> None:
    """End this process because another one ends; say why if that is known."""
    if failure:
      self._fail(RuntimeError(failure))
      # Whoever calls gets the reason, and ends this process.
      self._is_ending.wait(_LOST_S)
    self._on_orphaned()

  def _on_follower_compiles(self) -> None:
    if (this := self._attachment) is not None:
      this.attached.beat()

  def _fail(self, error: BaseException) -> None:
    """Keep the error of a thread, for the next call to raise."""
    if self._lead is not None:
      # A program also fails if another process has ended. Then this one ends
      # here, and another replica takes its place.
      time.sleep(_LOST_S)
    self._failure = error
    if self._attachment is not None:
      self._attachment.attached.link.wake()

  def _watch(self) -> None:
    """End the process when nobody calls any more."""
    while not self._is_ending.wait(_LOOK_S):
      if time.monotonic() - self._called_s > self._timeout_s:
        self._on_orphaned()
        return

  # -- the replica's thread -------------------------------------------------

  def _run(self) -> None:
    try:
      with self._clock:
        self._generate_until_the_end()
    finally:
      if self._attachment is not None:
        self._attachment.attached.replica.close(has_failed=False)
      self._has_ended.set()

  def _generate_until_the_end(self) -> None:
    while not self._is_ending.is_set():
      try:
        command = self._commands.get(
          block=self._attachment is None, timeout=None
        )
      except queue.Empty:
        assert self._attachment is not None
        self._attachment.attached.round(_IDLE_S)
        continue
      function, arguments, future = command
      try:
        future.set_result(function(*arguments))
      except (remote.ReplicaFailed, TimeoutError) as error:
        future.set_exception(remote.ReplicaFailed(str(error)))

  def _attach(self, name: str, spec: replica_spec.ReplicaSpec) -> None:
    before, self._attachment = self._attachment, None
    spec_before = engine = None
    if before is not None:
      # What is still being fetched would take the memory of another version.
      # Whoever attaches the replica gives it up if this takes too long.
      before.attached.replica.close(
        has_failed=False, fetch_timeout_s=threading.TIMEOUT_MAX
      )
      spec_before, engine = before.spec, before.engine
    # Frees the cache and the weights before there are others.
    del before
    lead = self._lead
    if lead is None:
      engine, channel = replica_spec.engine_and_channel(
        spec, spec_before, engine
      )
    else:
      lead.attach(spec)
      engine, channel = replica_spec.engine_and_channel(
        spec, spec_before, engine, led_replica.LedChannel
      )
      assert isinstance(channel, led_replica.LedChannel)
      channel.lead = lead
    busy = metrics_lib.BusyClock()
    link = remote.RemoteLink(name)
    replica = replica_lib.Replica(
      name,
      link,
      self._scheduler(
        engine,
        kv_on_adopt=spec.kv_on_adopt,
        busy=busy,
      ),
      channel=channel,
      tokenizer=spec.tokenizer,
    )
    attached = attached_replica.AttachedReplica(
      replica,
      link,
      busy=busy,
      report_every_s=spec.report_every_s,
      seconds=self._clock,
    )
    self._attachment = _Attachment(spec=spec, engine=engine, attached=attached)

  def _scheduler(
    self, engine: engine_lib.Engine, **settings: Any
  ) -> scheduler_lib.Scheduler:
    if self._lead is None:
      return scheduler_lib.Scheduler(engine, **settings)
    return led_replica.LedScheduler(engine, self._lead, **settings)
