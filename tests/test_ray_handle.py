"""A replica's handle, with stand-ins for Ray and its actors."""

import threading
import types

import pytest
import waiting

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import ray_handle
from jaxrl_async.cluster import replica_spec
from jaxrl_async.rollout import remote

DEADLINE_S = 30.0


class RayError(Exception):
  pass


class Method:
  """A method of an actor, which is called when its result is wanted."""

  def __init__(self, function):
    self.remote = lambda *arguments: lambda: function(*arguments)


class Actor:
  """An actor; it answers for as long as it is not killed."""

  def __init__(self, cannot_be_killed=False):
    self.cannot_be_killed = cannot_be_killed
    self.is_killed = False
    self.can_answer = threading.Event()
    self.can_answer.set()
    self.attached = []
    self.num = 1
    for name in ("facts", "num_processes", "listen", "meet", "join", "attach"):
      setattr(self, name, Method(getattr(self, f"_{name}")))

  def _facts(self, probe):
    assert self.can_answer.wait(DEADLINE_S)
    return hosts.facts(probe)

  def _num_processes(self):
    return self.num

  def _listen(self, size, timeout_s):
    return size

  def _meet(self):
    self.num = 2

  def _join(self, invitation, rank):
    assert (invitation, rank) == (2, 1)

  def _attach(self, name, spec):
    self.attached.append(name)


class Ray:
  exceptions = types.SimpleNamespace(
    RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {})
  )

  def get(self, calls):
    if isinstance(calls, list):
      return [call() for call in calls]
    return calls()

  def kill(self, actor):
    if actor.cannot_be_killed:
      raise RayError("its host is gone")
    actor.is_killed = True


class Spec(replica_spec.ReplicaSpec):
  """What a handle reads of it."""

  def __init__(self, probe, versions):
    object.__setattr__(self, "probe", probe)
    object.__setattr__(self, "versions", versions)


@pytest.fixture
def spec(tmp_path):
  path = tmp_path / "probe"
  path.write_text("here")
  return Spec(probe=(path, "here"), versions=hosts.versions())


def make(begin, num_processes=1):
  return ray_handle.RayHandle(
    Ray(), begin, num_processes=num_processes, timeout_s=1.0
  )


def test_whoever_starts_a_replica_does_not_wait_for_a_place(spec):
  can_begin, actor = threading.Event(), Actor()

  def begin():
    assert can_begin.wait(DEADLINE_S)
    return ray_handle.Actors(lead=actor)

  handle = make(begin)
  attached = handle.attach("replica 0", spec)  # at once
  assert not attached.running() and not attached.done()
  actor.can_answer.clear()
  can_begin.set()
  waiting.until(lambda: handle._actors is not None)
  # Its process may still wait for a host.
  assert not attached.running() and not attached.done()
  actor.can_answer.set()
  attached.result(DEADLINE_S)
  again = handle.attach("replica 0 #2", spec)
  again.result(DEADLINE_S)
  assert actor.attached == ["replica 0", "replica 0 #2"]


def test_one_that_is_found_has_to_answer_in_time(spec):
  actor = Actor()
  actor.can_answer.clear()
  handle = make(lambda: ray_handle.Actors(lead=actor, is_found=True))
  attached = handle.attach("replica 0", spec)
  waiting.until(attached.running)
  actor.can_answer.set()
  attached.result(DEADLINE_S)


def test_one_that_is_given_up_while_it_is_made_is_killed(spec):
  can_begin, actors = threading.Event(), [Actor(), Actor()]

  def begin():
    assert can_begin.wait(DEADLINE_S)
    return ray_handle.Actors(lead=actors[0], followers=(actors[1],))

  handle = make(begin, num_processes=2)
  attached = handle.attach("replica 0", spec)
  handle.kill()
  can_begin.set()
  with pytest.raises(remote.ReplicaLost, match="given up"):
    attached.result(DEADLINE_S)
  assert all(actor.is_killed for actor in actors)


def test_followers_end_too_if_the_first_cannot_be_reached(spec):
  lead, follower = Actor(cannot_be_killed=True), Actor()
  handle = make(lambda: ray_handle.Actors(lead=lead, followers=(follower,)), 2)
  handle.attach("replica 0", spec).result(DEADLINE_S)
  handle.kill()
  assert follower.is_killed


@pytest.mark.parametrize(
  "error, kind",
  [
    (RayError("no\nanswer"), remote.ReplicaLost),
    (remote.ReplicaLost("no slice"), remote.ReplicaLost),
    (remote.ReplicaFailed("no such slice"), remote.ReplicaFailed),
  ],
)
def test_what_hinders_the_start_ends_the_attachment(spec, error, kind):
  def begin():
    raise error

  attached = make(begin).attach("replica 0", spec)
  with pytest.raises(kind) as found:
    attached.result(DEADLINE_S)
  assert "\n" not in str(found.value)


def test_a_host_that_does_not_fit_is_an_error_of_its_own(spec):
  spec.versions["jax"] = "0.1"
  handle = make(lambda: ray_handle.Actors(lead=Actor()))
  with pytest.raises(remote.DoesNotFit, match="instead of 0.1"):
    handle.attach("replica 0", spec).result(DEADLINE_S)
