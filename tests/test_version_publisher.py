"""Publishing while several processes write a checkpoint."""

from concurrent import futures
import types
from unittest import mock

import pytest

from jaxrl_async.coordination import buffer as buffer_lib
from jaxrl_async.coordination import channels
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.rollout import held_version
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import run_evaluations
from jaxrl_async.run import version_publisher
from jaxrl_async.storage import pytree_files
from jaxrl_async.training import trainer as trainer_lib


class FakeTrainer(trainer_lib.Trainer):
  def __init__(self):
    pass

  def published(self):
    return {"weights": 1}


class FakeChannel(channels.DirectChannel):
  def __init__(self, done):
    self.done = done
    self.wanted_again = None

  def publish(self, params, version):
    assert params == {"weights": 1}
    self.done.append(("published", version))


class FakeBuffer(buffer_lib.Buffer):
  def __init__(self, done):
    self.done = done

  def set_policy_version(self, version):
    self.done.append(("set", version))


class FakeHeld(rollout_side.Held):
  def __init__(self, done):
    self.done = done

  def release(self):
    self.done.append("released")


@pytest.fixture
def done():
  """What happens, in order."""
  return []


@pytest.fixture
def publisher(done):
  return version_publisher.VersionPublisher(
    FakeTrainer(), FakeChannel(done), FakeBuffer(done)
  )


def is_held_up(monkeypatch, value):
  monkeypatch.setattr(pytree_files, "is_held_up", lambda: value)


def test_a_version_is_published_at_once(publisher, done):
  publisher.publish(1)
  publisher.catch_up()
  assert done == [("published", 1), ("set", 1)]


def test_the_newest_version_is_published_after_a_checkpoint(
  publisher, done, monkeypatch
):
  is_held_up(monkeypatch, True)
  publisher.publish(1)
  publisher.publish(2)
  publisher.catch_up()
  assert done == [("set", 1), ("set", 2)]
  is_held_up(monkeypatch, False)
  publisher.catch_up()
  publisher.catch_up()
  publisher.publish(3)
  assert done[2:] == [("published", 2), ("published", 3), ("set", 3)]


def test_what_waits_for_a_version_gets_it_all_the_same(
  publisher, done, monkeypatch
):
  is_held_up(monkeypatch, True)
  publisher.publish(1)
  publisher.catch_up(is_urgent=True)
  assert done == [("set", 1), ("published", 1)]


def test_a_version_that_was_refused_is_published_again(
  publisher, done, monkeypatch
):
  publisher.publish(1)
  publisher._channel.wanted_again = 1
  publisher.catch_up()  # which may be called when the weights are newer
  assert done == [("published", 1), ("set", 1)]
  publisher.renew()
  assert done[2:] == [("published", 1)]
  is_held_up(monkeypatch, True)
  publisher.renew()
  publisher.publish(2)  # replaces it
  is_held_up(monkeypatch, False)
  publisher._channel.wanted_again = None
  publisher.renew()
  assert done[3:] == [("set", 2), ("published", 2)]


def test_whoever_awaits_an_evaluation_renews_its_version(publisher, done):
  """The evaluation can only end with a version that was refused before."""
  beside = run_evaluations.RunEvaluations.__new__(
    run_evaluations.RunEvaluations
  )
  beside._stop = supervisor_lib.StopRequest()
  beside._supervisor = supervisor_lib.Supervisor(lambda error: None)
  beside._publisher = publisher
  beside._note = done.append
  result = futures.Future()
  beside._now = run_evaluations._Beside(
    step=1,
    held=FakeHeld(done),
    result=result,
  )
  beside._num_answers = 0
  beside._parts = types.SimpleNamespace(
    writer=types.SimpleNamespace(write=lambda step, found: None),
  )
  beside._thread = mock.Mock()
  publisher._channel.wanted_again = 1

  def publish(params, version):
    publisher._channel.wanted_again = None
    done.append(("published", version))
    result.set_exception(held_version.NotHeld("it was replaced"))

  publisher._channel.publish = publish
  beside.finish(1, is_awaited=True)
  assert done[:2] == [("published", 1), "released"]
  assert done[2] == "step 1 has no evaluation: it was replaced"


def test_only_large_saves_that_nobody_has_awaited_hold_others_up(monkeypatch):
  waits = []
  monkeypatch.setattr(pytree_files, "_waits", waits)
  assert not pytree_files.is_held_up()

  def fail():
    raise OSError("the disk is full")

  short = pytree_files._Wait(lambda: None, is_long=False)
  long = pytree_files._Wait(lambda: None, is_long=True)
  failing = pytree_files._Wait(fail, is_long=True)
  waits += [short]
  assert not pytree_files.is_held_up()
  waits += [long, failing]
  assert pytree_files.is_held_up()
  long()
  assert pytree_files.is_held_up()
  with pytest.raises(OSError, match="full"):
    failing()
  assert not pytree_files.is_held_up()
