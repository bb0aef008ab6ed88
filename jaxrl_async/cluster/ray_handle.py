"""Actors of Ray that are a replica, and the handle that calls them."""

from collections.abc import Callable
from concurrent import futures
import contextlib
import dataclasses
import importlib
import os
import re
import threading
from typing import Any

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import led_replica
from jaxrl_async.cluster import replica_process
from jaxrl_async.cluster import replica_spec
from jaxrl_async.processes import rendezvous
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rollout import remote

_LONGEST = 300
_GIVE_BACK_S = 5.0
_LOG_LINE = re.compile(r"^\[.*?\]\s*|\x1b\[[0-9;]*m")


class Actor(replica_process.ReplicaProcess):
  """What Ray runs in a process of its own."""

  def __init__(self, timeout_s: float):
    """Start; the process ends when nobody calls for so long."""
    super().__init__(on_orphaned=_end_process, timeout_s=timeout_s)

  def listen(self, size: int, timeout_s: float) -> rendezvous.Invitation:
    """Listen at the address by which Ray knows this host; see `invite`."""
    host = importlib.import_module("ray").util.get_node_ip_address()
    return self.invite(host, size, timeout_s)


class Follower:
  """What Ray runs in each further process of a replica."""

  def __init__(self, timeout_s: float):
    """Start; the process ends when it is not invited for so long."""
    self._has_joined = threading.Event()

    def watch() -> None:
      if not self._has_joined.wait(timeout_s):
        os._exit(0)

    supervisor_lib.start_thread("watch", watch, lambda error: None)

  def facts(self, probe: hosts.Probe) -> hosts.Facts:
    """Return the facts about this process."""
    return hosts.facts(probe)

  def join(self, invitation: rendezvous.Invitation, rank: int) -> None:
    """Connect to the process that leads, and follow it from now on."""
    self._has_joined.set()
    led_replica.follow(invitation, rank)


def _end_process() -> None:
  """End this process, and give back the TPU slice that it holds, if any.

  The slice would stay reserved otherwise, with nobody to give it back.
  """
  # Ray may not answer any more.
  supervisor_lib.start_thread("give back", _give_back, lambda error: None).join(
    _GIVE_BACK_S
  )
  os._exit(0)


def _give_back() -> None:
  util = importlib.import_module("ray").util
  if (group := util.get_current_placement_group()) is not None:
    util.remove_placement_group(group)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Actors:
  """The actors of a replica.

  Attributes:
    lead: the replica.
    followers: its further processes, if they have not been connected to it.
    is_found: whether an earlier start of the run has made them.
  """

  lead: Any
  followers: tuple[Any, ...] = ()
  is_found: bool = False


class RayHandle:
  """A replica of actors, as `remote.Handle` describes it.

  Threads: a thread for each attachment finds or makes the actors, which can
  take as long as there is no room for them. A lock guards which they are.
  """

  def __init__(
    self,
    ray: Any,
    begin: Callable[[], Actors],
    *,
    num_processes: int,
    timeout_s: float,
  ):
    """Create the handle of a replica that `attach` begins.

    Args:
      ray: the module.
      begin: finds or makes the actors; it may take long. It raises
        `ReplicaLost` if there is no room for them now.
      timeout_s: deadline for JAX to connect them.
    """
    self._ray = ray
    self._begin = begin
    self._num_processes = num_processes
    self._timeout_s = timeout_s
    self._lock = threading.Lock()
    self._actors: Actors | None = None
    self._has_run = False
    self._is_killed = False

  @property
  def _lead(self) -> Any:
    assert self._actors is not None  # nothing comes before `attach`
    return self._actors.lead

  def attach(
    self, name: str, spec: replica_spec.ReplicaSpec
  ) -> futures.Future[None]:
    """Give the replica a name; see `remote.Handle`."""
    attached: futures.Future[None] = futures.Future()

    def attach() -> None:
      actors = self._begun()
      # One that was found may have hung since. It has to answer in time.
      is_there = self._has_run or actors.is_found
      if is_there:
        attached.set_running_or_notify_cancel()
      self._check(actors, spec)
      self._has_run = True
      if not is_there:
        attached.set_running_or_notify_cancel()
      self._meet(actors)
      self._ray.get(actors.lead.attach.remote(name, spec))
      attached.set_result(None)

    def fail(error: BaseException) -> None:
      attached.set_exception(self._translated(error))

    supervisor_lib.start_thread(f"attach {name}", attach, fail)
    return attached

  def _begun(self) -> Actors:
    """Return the actors, which are found or made the first time.

    Raises:
      ReplicaLost: there is no room for them, or they were killed meanwhile.
    """
    if self._actors is not None:
      return self._actors
    actors = self._begin()
    with self._lock:
      self._actors = actors
      is_killed = self._is_killed
    if is_killed:
      self._kill(actors)
      raise remote.ReplicaLost("it was given up")
    return actors

  def _check(self, actors: Actors, spec: replica_spec.ReplicaSpec) -> None:
    """Check that the processes can work with this one.

    Raises:
      DoesNotFit: one of them cannot.
    """
    with contextlib.suppress(OSError):  # then a process says that it sees none
      hosts.write_probe(spec.probe)
    asked = [
      actor.facts.remote(spec.probe)
      for actor in (actors.lead, *actors.followers)
    ]
    for found in self._ray.get(asked):
      why_not = hosts.difference(found, spec.probe, spec.versions)
      if why_not is not None:
        raise remote.DoesNotFit(why_not)

  def _meet(self, actors: Actors) -> None:
    """Connect the processes of the replica, unless they are connected.

    Raises:
      ReplicaLost: an earlier start left a part of them, or another number.
    """
    size = self._ray.get(actors.lead.num_processes.remote())
    if size == self._num_processes:
      return
    if size > 1 or not actors.followers:
      raise remote.ReplicaLost(
        f"it has {size} processes instead of {self._num_processes}"
      )
    invitation = self._ray.get(
      actors.lead.listen.remote(self._num_processes, self._timeout_s)
    )
    joining = [actors.lead.meet.remote()]
    for rank, follower in enumerate(actors.followers, 1):
      joining.append(follower.join.remote(invitation, rank))
    self._ray.get(joining)

  def collect(self) -> futures.Future[Any]:
    """Return what it says next; see `remote.Handle`."""
    return self._pass_on(self._lead.collect.remote())

  def deliver(self, delivery: remote.Delivery) -> None:
    """Send work; that the process has ended is learnt from `collect`."""
    self._lead.deliver.remote(delivery)

  def kill(self) -> None:
    """End the processes, those too that are still to be made."""
    with self._lock:
      self._is_killed = True
      actors = self._actors
    if actors is not None:
      self._kill(actors)

  def _kill(self, actors: Actors) -> None:
    for actor in (actors.lead, *actors.followers):
      # If one cannot be reached, the others have to end all the same. It ends
      # by itself when nobody calls.
      with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
        self._ray.kill(actor)

  def _pass_on(self, reference: Any) -> futures.Future:
    """Return a future that ends as the call of an actor ends."""
    result: futures.Future = futures.Future()

    def end(call: futures.Future) -> None:
      error = call.exception()
      if error is None:
        result.set_result(call.result())
      else:
        result.set_exception(self._translated(error))

    reference.future().add_done_callback(end)
    return result

  def _translated(self, error: BaseException) -> BaseException:
    """Return an error of Ray's as one of `remote`."""
    if isinstance(error, self._ray.exceptions.RayTaskError):
      cause = getattr(error, "cause", error)
      if isinstance(cause, remote.ReplicaFailed):
        return remote.ReplicaFailed(str(cause))
      return remote.ReplicaFailed(f"{type(cause).__name__}: {cause}")
    if isinstance(error, self._ray.exceptions.RayError):
      return remote.ReplicaLost(one_line(error))
    return error


def one_line(error: BaseException) -> str:
  """Return the text of an error of Ray's, without colours and line breaks."""
  text = " ".join(_LOG_LINE.sub("", str(error)).split())
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
