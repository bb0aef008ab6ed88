"""A replica in a process of its own, whatever transport calls it.

A thread owns the replica and generates. The transport's threads only hand
over what has arrived and what is to be sent, so that they answer at once, also
while the devices compute.
"""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import pathlib
import queue
import socket
import threading
import time
from typing import Any

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import led_replica
from jaxrl_async.cluster import replica_spec
from jaxrl_async.cluster import replica_world
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import replica as replica_lib

_IDLE_S = 0.02
_LOOK_S = 0.5
_LOST_S = 2.0
_MAX_ACTIVITIES = 256


@dataclasses.dataclass(kw_only=True)
class _Attached:
  """A replica under one name, and what it works with."""

  spec: replica_spec.ReplicaSpec
  engine: engine_lib.Engine
  link: remote.RemoteLink
  replica: replica_lib.Replica
  busy: metrics_lib.BusyClock
  wait_s: float = 0.0
  reported_s: float = dataclasses.field(default_factory=time.monotonic)
  said_s: float = 0.0  # by the clock `busy`, at the last `collect`
  busy_s: float = 0.0  # as of then


class ReplicaProcess:
  """Generates for whoever attached it last.

  Invariant: everything about groups and weights belongs to the last attachment.
  Of an earlier one only the engine is kept, with its compiled programs.

  Threads: `_run` is a thread of its own, which owns the replica. All public
  methods belong to the transport, several of them at a time.
  """

  def __init__(self, on_orphaned: Callable[[], None]):
    """Start the thread, which waits to be attached.

    Args:
      on_orphaned: ends the process; called when nobody has called for as long
        as the last attachment allows.
    """
    self._on_orphaned = on_orphaned
    self._commands: queue.SimpleQueue[
      tuple[Callable[..., Any], tuple[Any, ...], futures.Future]
    ] = queue.SimpleQueue()
    self._attached: _Attached | None = None
    self._listener: replica_world.Listener | None = None
    self._lead: led_replica.Lead | None = None
    self._failure: BaseException | None = None
    self._called_s = time.monotonic()
    self._timeout_s = float("inf")
    self._is_ending = threading.Event()
    self._has_ended = threading.Event()
    supervisor_lib.start_thread("replica", self._run, self._fail)
    supervisor_lib.start_thread("watch", self._watch, self._fail)

  # -- the transport's threads ----------------------------------------------

  def facts(self, probe: pathlib.Path) -> hosts.Facts:
    """Return what the caller has to know before it attaches the replica."""
    return hosts.facts(probe)

  def num_processes(self) -> int:
    """Return the number of processes of this replica that have met."""
    listener = self._listener
    return (
      1
      if self._lead is None or listener is None
      else (listener.invitation.size)
    )

  def invite(
    self, host: str, size: int, timeout_s: float
  ) -> replica_world.Invitation:
    """Listen for the other processes of the replica; see `Listener`."""
    self._listener = replica_world.Listener(host, size, timeout_s)
    return self._listener.invitation

  def meet(self) -> None:
    """Wait for the other processes, and lead them from now on.

    Raises:
      ReplicaFailed: JAX could not connect them.
    """
    listener = self._listener
    assert listener is not None
    try:
      peers = listener.meet()
    except RuntimeError as error:
      raise remote.ReplicaFailed(
        f"on {socket.gethostname()}: JAX could not connect the processes of a"
        f" replica: {error}"
      ) from error
    self._lead = led_replica.Lead(
      peers, listener.invitation.size, self._on_follower_failed
    )

  def attach(self, name: str, spec: replica_spec.ReplicaSpec) -> None:
    """Become the replica of this name, and forget everything else.

    Raises:
      ReplicaFailed: it could not be built.
    """
    self._called_s = time.monotonic()
    self._timeout_s = spec.coordinator_timeout_s
    self._do(self._attach, name, spec)

  def collect(self) -> remote.Said:
    """Return what the replica says next; see `remote.Handle`.

    Raises:
      ReplicaFailed: the replica has failed.
    """
    self._called_s = time.monotonic()
    self._raise_failure()
    this = self._attached
    assert this is not None
    told, ask, received = this.link.collect(this.spec.heartbeat_s)
    self._raise_failure()
    before_s, this.said_s = this.said_s, this.busy.now()
    busy_s = metrics_lib.read({"": this.busy}).busy_s[""]
    before_busy_s, this.busy_s = this.busy_s, busy_s
    return remote.Said(
      name=this.replica.name,
      told=told,
      ask=ask,
      received=received,
      version=this.replica.version,
      totals={
        **dataclasses.asdict(this.replica.scheduler.stats),
        "wait_s": this.wait_s,
        "adopt_s": this.replica.adopt_s,
      },
      busy_s=max(0.0, busy_s - before_busy_s),
      activities=tuple(
        remote.Activity(
          this.said_s - one.start_s, this.said_s - one.end_s, one.activity
        )
        for one in this.busy.since(before_s, _MAX_ACTIVITIES)
      ),
    )

  def deliver(self, delivery: remote.Delivery) -> None:
    """Take work for the replica."""
    self._called_s = time.monotonic()
    this = self._attached
    if this is not None:
      this.link.deliver(delivery)

  def answer(self, questions: remote.Questions) -> list[answers_lib.Written]:
    """Answer questions of an evaluation.

    Raises:
      ReplicaFailed: the replica has failed, or the version did not arrive.
    """
    self._called_s = time.monotonic()
    return self._do(self._answer, questions)

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
    return future.result()

  def _raise_failure(self) -> None:
    error = self._failure
    if isinstance(error, remote.ReplicaFailed):
      raise error
    if error is not None:
      raise remote.ReplicaFailed(
        f"on {socket.gethostname()}: {type(error).__name__}: {error}"
      )

  def _on_follower_failed(self, error: BaseException) -> None:
    """End this process with one that has ended, or keep why one will end."""
    if isinstance(error, replica_world.LostError):
      self._on_orphaned()
    self._fail(error)

  def _fail(self, error: BaseException) -> None:
    """Keep the error of a thread, for the next call to raise."""
    if self._lead is not None:
      # A program also fails if another process has ended. Then this one ends
      # here, and another replica takes its place.
      time.sleep(_LOST_S)
    self._failure = error
    if self._attached is not None:
      self._attached.link.wake()

  def _watch(self) -> None:
    """End the process when nobody calls any more."""
    while not self._is_ending.wait(_LOOK_S):
      if time.monotonic() - self._called_s > self._timeout_s:
        self._on_orphaned()
        return

  # -- the replica's thread -------------------------------------------------

  def _run(self) -> None:
    try:
      self._generate_until_the_end()
    finally:
      if self._attached is not None:
        self._attached.replica.close(has_failed=False)
      self._has_ended.set()

  def _generate_until_the_end(self) -> None:
    while not self._is_ending.is_set():
      try:
        command = self._commands.get(block=self._attached is None, timeout=None)
      except queue.Empty:
        assert self._attached is not None
        self._generate(self._attached)
        continue
      function, arguments, future = command
      try:
        future.set_result(function(*arguments))
      except (remote.ReplicaFailed, TimeoutError) as error:
        future.set_exception(remote.ReplicaFailed(str(error)))

  def _attach(self, name: str, spec: replica_spec.ReplicaSpec) -> None:
    before, self._attached = self._attached, None
    spec_before = engine = None
    if before is not None:
      before.replica.close(has_failed=False)
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
    self._attached = _Attached(
      spec=spec,
      engine=engine,
      link=link,
      replica=replica_lib.Replica(
        name,
        link,
        self._scheduler(
          engine,
          kv_on_adopt=spec.kv_on_adopt,
          shared_tokens=spec.shared_tokens,
          busy=busy,
        ),
        channel=channel,
        tokenizer=spec.tokenizer,
      ),
      busy=busy,
    )

  def _scheduler(
    self, engine: engine_lib.Engine, **settings: Any
  ) -> scheduler_lib.Scheduler:
    if self._lead is None:
      return scheduler_lib.Scheduler(engine, **settings)
    return led_replica.LedScheduler(engine, self._lead, **settings)

  def _generate(self, this: _Attached) -> None:
    """Take work, make one step, and sometimes report what is half-written."""
    replica = this.replica
    if replica.may_adopt():
      replica.adopt()
    replica.feed()
    if replica.can_step:
      replica.step()
    else:
      start_s = time.monotonic()
      if replica.version < 0:
        replica.wait_for_weights(_IDLE_S)
      else:
        this.link.wait(_IDLE_S)
      this.wait_s += time.monotonic() - start_s
    now_s = time.monotonic()
    if now_s - this.reported_s >= this.spec.report_every_s:
      this.reported_s = now_s
      replica.report_all()

  def _answer(self, questions: remote.Questions) -> list[answers_lib.Written]:
    this = self._attached
    if this is None:
      raise remote.ReplicaFailed("it is not attached")
    this.replica.adopt_version(questions.version, questions.timeout_s)
    prompts = dict(zip(questions.numbers, questions.prompts, strict=True))
    written = this.replica.answers(
      prompts, questions.settings, questions.numbers
    )
    return [one for step in written for one in step]
