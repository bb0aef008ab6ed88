"""Versions that a reader refuses, or that are gone, and come again."""

import os
import shutil
import threading
import time

import pytest
import stamped
import test_orbax_channel
import waiting

from jaxrl_async.coordination import weight_transfer
from jaxrl_async.coordination import world as world_lib
from jaxrl_async.storage import manifest
from jaxrl_async.storage import pytree_files
from jaxrl_async.storage import shared_check

_orbax = test_orbax_channel._orbax


def _damage(tmp_path, copy):
  path = test_orbax_channel._data_file(tmp_path, copy)
  path.write_bytes(path.read_bytes()[:-1])


def _copies(tmp_path):
  """Names of the copies that are there."""
  root = tmp_path / f"incarnation-{stamped.INCARNATION}"
  sealed = root.glob(f"[0-9]*/{manifest.NAME}")
  return sorted(path.parent.name for path in sealed)


@pytest.mark.parametrize("foreign", ["incarnation", "version"])
def test_a_foreign_version_is_not_adopted_and_the_next_one_is(
  tmp_path, foreign
):
  before = _orbax(tmp_path / "before", incarnation="before")
  channel = _orbax(tmp_path / "now", is_written_again=False)
  stamped.publish_and_wait(before, 7)
  stamped.publish_and_wait(channel, 1)
  assert channel.adopt(1) is None
  root = tmp_path / "now" / f"incarnation-{stamped.INCARNATION}"
  if foreign == "incarnation":
    source = tmp_path / "before" / "incarnation-before" / "7"
  else:
    source = root / "1"
  shutil.copytree(source, root / "7")
  os.symlink("7", root / "link")
  os.replace(root / "link", root / "newest")
  # A reader without weights cannot go on, and one that has some waits.
  with pytest.raises(weight_transfer.RefusedVersionError, match="not adopted"):
    channel.adopt(-1)
  assert channel.num_refused == 0
  for _ in range(2):
    assert channel.adopt(1) is None
    assert channel.newest_version() == 1
  assert channel.num_refused == 1
  assert "version 7 is not adopted: " in str(channel.refusal)
  assert not channel.wait_for_version(1, 0.05)
  stamped.publish_and_wait(channel, 8)
  params, version = channel.adopt(1)
  assert version == 8 and channel.num_refused == 1
  stamped.assert_all(params, 8)
  before.close()
  channel.close()


@pytest.mark.parametrize("again", [True, False])
def test_a_damaged_version_that_may_not_be_skipped_is_written_again_or_an_error(
  tmp_path, again
):
  channel = _orbax(tmp_path, coalesce=False, is_written_again=again)
  for version in (0, 1):
    stamped.publish_and_wait(channel, version)
  assert channel.adopt(-1)[1] == 1
  stamped.publish_and_wait(channel, 2)
  _damage(tmp_path, 2)
  if again:
    assert channel.adopt(1) is None
    assert channel.wait_for_version(1, stamped.DEADLINE_S)
    stamped.assert_all(channel.adopt(1)[0], 2)
  else:
    with pytest.raises(weight_transfer.RefusedVersionError, match="corrupted"):
      channel.adopt(1)
  assert channel.num_refused == again
  channel.close()


@pytest.mark.parametrize("newest", [0, 3])
def test_a_refused_version_is_written_again_while_it_is_the_newest(
  tmp_path, newest
):
  notes = []
  channel = _orbax(tmp_path, note=notes.append)
  for version in {0, newest}:
    stamped.publish_and_wait(channel, version)
  _damage(tmp_path, newest)
  assert channel.adopt(newest - 1) is None
  assert "corrupted" in str(channel.refusal)
  assert channel.wait_for_version(newest - 1, stamped.DEADLINE_S)
  params, version = channel.adopt(newest - 1)
  assert version == newest
  stamped.assert_all(params, newest)
  assert channel.num_refused == 1
  assert notes == [
    f"WARNING: version {newest} of the weights was refused; it is written again"
  ]
  stamped.publish_and_wait(channel, newest + 1)
  stamped.publish_and_wait(channel, newest + 2)
  stamped.publish_and_wait(channel, newest + 3)
  # Its copies go as other versions do.
  assert not [x for x in _copies(tmp_path) if x.startswith(f"{newest}")]
  channel.close()
  assert not tmp_path.exists()


def test_several_processes_are_asked_for_a_version_that_was_refused(tmp_path):
  notes = []
  world = world_lib.World(0, 2, {})  # the other one has no part of the arrays
  publisher = _orbax(tmp_path, world=world, note=notes.append)
  reader = _orbax(tmp_path)
  stamped.publish_and_wait(publisher, 3)
  assert publisher.wanted_again is None
  for copy in ("3", "3-2"):
    _damage(tmp_path, copy)
    assert reader.adopt(-1) is None
    waiting.until(lambda: publisher.wanted_again == 3)
    with pytest.raises(weight_transfer.WeightTransferError, match="not newer"):
      publisher.publish(stamped.params(2), 2)
    publisher.publish(stamped.params(3), 3)
    assert publisher.wanted_again is None
    assert reader.wait_for_version(-1, stamped.DEADLINE_S)
  params, version = reader.adopt(-1)
  assert version == 3 and reader.num_refused == 2
  stamped.assert_all(params, 3)
  assert len(notes) == 2 and "written again" in notes[-1]
  # Nobody asks for one that a newer one has replaced.
  _damage(tmp_path, "3-3")
  assert reader.adopt(2) is None
  stamped.publish_and_wait(publisher, 4)
  time.sleep(1.5)
  assert publisher.wanted_again is None
  publisher.close()


@pytest.mark.parametrize("version", [3, 4])
def test_nothing_is_asked_for_while_a_version_is_being_written(
  tmp_path, version
):
  notes = []
  begun, may_go_on = threading.Event(), threading.Event()

  class Slow(weight_transfer.OrbaxChannel):
    def _save(self, named, copy):
      if copy in ("3-2", "4"):
        begun.set()
        assert may_go_on.wait(stamped.DEADLINE_S)
      return super()._save(named, copy)

  world = world_lib.World(0, 2, {})
  publisher = _orbax(tmp_path, cls=Slow, world=world, note=notes.append)
  reader = _orbax(tmp_path)
  stamped.publish_and_wait(publisher, 3)
  _damage(tmp_path, "3")
  if version == 3:
    assert reader.adopt(-1) is None
    waiting.until(lambda: publisher.wanted_again == 3)
  publishing = threading.Thread(
    target=publisher.publish, args=(stamped.params(version), version)
  )
  publishing.start()
  assert begun.wait(stamped.DEADLINE_S)
  if version == 4:
    assert reader.adopt(-1) is None
  time.sleep(2.5)  # the publisher looks for marks every second
  # The weights may be those of version 4 already.
  assert publisher.wanted_again == (3 if version == 3 else None)
  may_go_on.set()
  publishing.join()
  assert reader.wait_for_version(-1, stamped.DEADLINE_S)
  stamped.assert_all(reader.adopt(-1)[0], version)
  assert publisher.wanted_again is None
  assert version == 4 or len(notes) == 1
  publisher.close()


def test_a_version_is_written_again_once_for_all_who_refuse_it(tmp_path):
  notes = []
  channel = _orbax(tmp_path, note=notes.append)
  readers = [_orbax(tmp_path) for _ in range(3)]
  stamped.publish_and_wait(channel, 5)
  _damage(tmp_path, 5)
  assert readers[0].adopt(-1) is None
  assert readers[0].newest_version() == -1
  for reader in readers:
    params, version = reader.adopt_first(stamped.DEADLINE_S)
    assert version == 5 and reader.num_refused <= 1
    stamped.assert_all(params, 5)
  stamped.publish_and_wait(channel, 6)
  assert len(notes) == 1 and {"5-2", "6"} <= {*_copies(tmp_path)} <= {
    *("5", "5-2", "6")
  }
  channel.close()


def test_copies_that_are_damaged_too_follow_each_other_more_slowly(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(weight_transfer, "_LONGEST_WAIT_S", 0.3)
  channel = _orbax(tmp_path)
  stamped.publish_and_wait(channel, 0)
  begin_s = time.monotonic()
  for copy in ("0", "0-2", "0-3"):
    assert channel.wait_for_version(-1, stamped.DEADLINE_S)
    _damage(tmp_path, copy)
    assert channel.adopt(-1) is None
  params, version = channel.adopt_first(stamped.DEADLINE_S)
  stamped.assert_all(params, version)
  assert channel.num_refused == 3
  assert time.monotonic() - begin_s > 0.6  # before the third and the fourth
  channel.close()


def test_a_newer_version_comes_in_the_place_of_a_further_copy(tmp_path):
  channel = _orbax(tmp_path, cls=test_orbax_channel._HeldUp)
  channel.gate = threading.Event()
  stamped.publish_and_wait(channel, 0)
  _damage(tmp_path, 0)
  assert channel.adopt(-1) is None  # marked, and not seen yet
  channel.publish(stamped.params(1), 1)
  channel.gate.set()
  params, version = channel.adopt_first(stamped.DEADLINE_S)
  assert version == 1 and _copies(tmp_path) == ["0", "1"]
  stamped.assert_all(params, 1)
  channel.close()


@pytest.mark.parametrize("what", ["version", "incarnation", "directory"])
def test_a_version_that_vanishes_while_it_is_read_is_refused_and_comes_again(
  tmp_path, monkeypatch, what
):
  directory = tmp_path / "versions"
  notes = []
  channel = _orbax(directory, note=notes.append)
  stamped.publish_and_wait(channel, 0)
  root = directory / f"incarnation-{stamped.INCARNATION}"
  gone = {"version": root / "0", "incarnation": root, "directory": directory}

  def remove(original):
    def removed(*arguments, **more):
      shutil.rmtree(gone[what])
      monkeypatch.undo()
      return original(*arguments, **more)

    return removed

  # Before the marks of its files are read, and before Orbax reads them.
  for module, name, said in (
    (shared_check, "identities", "cannot be read"),
    (pytree_files, "load", "has changed while it was read"),
  ):
    monkeypatch.setattr(module, name, remove(getattr(module, name)))
    assert channel.adopt(-1) is None
    assert said in str(channel.refusal)
    params, version = channel.adopt_first(stamped.DEADLINE_S)
    assert version == 0
    stamped.assert_all(params, 0)
    gone["version"] = root / os.readlink(root / "newest")
  assert len(notes) == 2 and all("it is written again" in x for x in notes)
  channel.close()


def test_a_version_whose_arrays_vanish_while_they_are_read_is_refused(
  tmp_path, monkeypatch
):
  channel = _orbax(tmp_path / "versions")
  stamped.publish_and_wait(channel, 0)

  def load(directory, target):
    # What describes the arrays was read before. Orbax has no class for this,
    # and leaves coroutines behind that would fail in other tests.
    shutil.rmtree(directory)
    monkeypatch.undo()
    raise Exception("Encountered error while reading array index:\n ()")

  monkeypatch.setattr(pytree_files, "load", load)
  assert channel.adopt(-1) is None
  assert "has changed while it was read" in str(channel.refusal)
  params, version = channel.adopt_first(stamped.DEADLINE_S)
  assert version == 0
  stamped.assert_all(params, 0)
  channel.close()


def test_a_version_that_is_removed_unread_is_written_again(tmp_path):
  channel = _orbax(tmp_path / "versions")
  stamped.publish_and_wait(channel, 0)
  shutil.rmtree(tmp_path / "versions")
  assert channel.adopt(-1) is None and channel.num_refused == 0
  params, version = channel.adopt_first(stamped.DEADLINE_S)
  assert version == 0
  stamped.assert_all(params, 0)
  channel.close()


def test_what_is_not_the_fault_of_the_files_is_no_refusal(
  tmp_path, monkeypatch
):
  channel = _orbax(tmp_path)
  stamped.publish_and_wait(channel, 0)

  def fail(directory, target):
    raise ValueError("a bug")

  monkeypatch.setattr(pytree_files, "load", fail)
  with pytest.raises(ValueError, match="a bug"):
    channel.adopt(-1)
  assert channel.refusal is None
  channel.close()


def test_what_is_not_written_again_is_not_kept(tmp_path):
  channel = _orbax(tmp_path, is_written_again=False)
  stamped.publish_and_wait(channel, 0)
  assert not channel._kept
  shutil.rmtree(tmp_path)
  assert not channel.wait_for_version(-1, 1.5)
  channel.close()
