"""Publishing while several processes write a checkpoint."""

import pytest

from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.storage import pytree_files
from jaxrl_async.weights import version_publisher
from jaxrl_async.weights import weight_transfer


class FakeChannel(weight_transfer.DirectChannel):
  def __init__(self, done):
    self.done = done

  def publish(self, params, version):
    assert params == {"weights": 1}
    self.done.append(("published", version))


class FakeBuffer(buffer_lib.Buffer):
  def __init__(self, done):
    self.done = done

  def set_policy_version(self, version):
    self.done.append(("set", version))


@pytest.fixture
def done():
  """What happens, in order."""
  return []


@pytest.fixture
def publisher(done):
  return version_publisher.VersionPublisher(
    lambda: {"weights": 1}, FakeChannel(done), FakeBuffer(done)
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
