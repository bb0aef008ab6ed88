"""Actors of Ray that are a replica, and the handle that calls them."""

from collections.abc import Callable, Sequence
from concurrent import futures
import importlib
import os
import pathlib
import re
import time
from typing import Any

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import led_replica
from jaxrl_async.cluster import replica_process
from jaxrl_async.cluster import replica_spec
from jaxrl_async.cluster import replica_world
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import remote

_LONGEST = 300
_LOG_LINE = re.compile(r"^\[.*?\]\s*|\x1b\[[0-9;]*m")


class Actor(replica_process.ReplicaProcess):
  """What Ray runs in a process of its own."""

  def __init__(self):
    """Start; the process ends when nobody calls any more."""
    super().__init__(on_orphaned=lambda: os._exit(0))

  def listen(self, size: int, timeout_s: float) -> replica_world.Invitation:
    """Listen at the address by which Ray knows this host; see `invite`."""
    host = importlib.import_module("ray").util.get_node_ip_address()
    return self.invite(host, size, timeout_s)


class Follower(led_replica.FollowerProcess):
  """What Ray runs in each further process of a replica."""

  def facts(self, probe: pathlib.Path) -> hosts.Facts:
    """Return the facts about this process."""
    return hosts.facts(probe)


class RayHandle:
  """An actor, as `remote.Handle` describes it."""

  def __init__(
    self,
    ray: Any,
    actor: Any,
    followers: Sequence[Any] = (),
    *,
    num_processes: int,
    timeout_s: float,
  ):
    """Take over an actor.

    Args:
      ray: the module.
      actor: the replica.
      followers: its further processes, if this handle shall connect them.
      num_processes: that it has to have.
      timeout_s: deadline for JAX to connect them.
    """
    self._ray = ray
    self._actor = actor
    self._followers = list(followers)
    self._num_processes = num_processes
    self._timeout_s = timeout_s

  def attach(
    self, name: str, spec: replica_spec.ReplicaSpec
  ) -> futures.Future[None]:
    """Give the replica a name; see `remote.Handle`."""
    attached: futures.Future[None] = futures.Future()

    def attach() -> None:
      self._check(spec)
      self._meet()
      self._ray.get(self._actor.attach.remote(name, spec))
      attached.set_result(None)

    def fail(error: BaseException) -> None:
      attached.set_exception(self._translated(error))

    supervisor_lib.start_thread(f"attach {name}", attach, fail)
    return attached

  def _check(self, spec: replica_spec.ReplicaSpec) -> None:
    """Check that the processes can work with this one.

    Raises:
      ReplicaFailed: one of them cannot.
    """
    asked_s = time.time()
    actors = [self._actor, *self._followers]
    for found in self._ray.get([a.facts.remote(spec.probe[0]) for a in actors]):
      why_not = hosts.difference(found, spec.probe, spec.versions, asked_s)
      if why_not is not None:
        raise remote.ReplicaFailed(why_not)

  def _meet(self) -> None:
    """Connect the processes of the replica, unless they are connected.

    Raises:
      ReplicaLost: an earlier start left a part of them, or another number.
    """
    size = self._ray.get(self._actor.num_processes.remote())
    if size == self._num_processes:
      return
    if size > 1 or not self._followers:
      self.kill()
      raise remote.ReplicaLost(
        f"it has {size} processes instead of {self._num_processes}"
      )
    invitation = self._ray.get(
      self._actor.listen.remote(self._num_processes, self._timeout_s)
    )
    joining = [self._actor.meet.remote()]
    for rank, follower in enumerate(self._followers, 1):
      joining.append(follower.join.remote(invitation, rank))
    self._ray.get(joining)

  def collect(self) -> futures.Future[Any]:
    """Return what it says next; see `remote.Handle`."""
    return self._pass_on(self._actor.collect.remote())

  def deliver(self, delivery: remote.Delivery) -> None:
    """Send work; that the process has ended is learnt from `collect`."""
    self._actor.deliver.remote(delivery)

  def answer(
    self, questions: remote.Questions
  ) -> futures.Future[list[answers_lib.Written]]:
    """Have questions answered; see `remote.Handle`."""
    return self._pass_on(self._actor.answer.remote(questions))

  def hold(self, version: int) -> futures.Future[None]:
    """Have a version kept; see `remote.Handle`."""
    return self._pass_on(self._actor.hold.remote(version))

  def release(self, version: int) -> None:
    """Give it back; that the process has ended is learnt from `collect`."""
    self._actor.release.remote(version)

  def kill(self) -> None:
    """End the processes."""
    for actor in [self._actor, *self._followers]:
      self._ray.kill(actor)

  def _pass_on(self, reference: Any) -> futures.Future:
    result: futures.Future = futures.Future()
    pass_on(reference, result, self._translated)
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


def pass_on(
  reference: Any,
  to: futures.Future,
  translated: Callable[[BaseException], BaseException],
) -> None:
  """Let a future end as the call of an actor ends.

  Args:
    reference: of the call.
    to: the future.
    translated: returns an error of Ray's as the caller knows it.
  """

  def end(call: futures.Future) -> None:
    error = call.exception()
    if error is None:
      to.set_result(call.result())
    else:
      to.set_exception(translated(error))

  reference.future().add_done_callback(end)


def one_line(error: BaseException) -> str:
  """Return the text of an error of Ray's, without colours and line breaks."""
  text = " ".join(_LOG_LINE.sub("", str(error)).split())
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
