"""Versions that a reader cannot read: they are passed over, never adopted."""

import os
import shutil

import pytest
import stamped
import test_orbax_channel

from jaxrl_async.storage import pytree_files

_orbax = test_orbax_channel._orbax


def _root(directory):
  return directory / f"incarnation-{stamped.INCARNATION}"


@pytest.mark.parametrize("foreign", ["incarnation", "version"])
def test_a_foreign_version_is_not_adopted_and_the_next_one_is(
  tmp_path, foreign, caplog
):
  before = _orbax(tmp_path / "before", incarnation="before")
  channel = _orbax(tmp_path / "now")
  stamped.publish_and_wait(before, 7)
  stamped.publish_and_wait(channel, 1)
  assert channel.adopt(1) is None
  root = _root(tmp_path / "now")
  if foreign == "incarnation":
    source = tmp_path / "before" / "incarnation-before" / "7"
  else:
    source = root / "1"
  shutil.copytree(source, root / "7")
  os.symlink("7", root / "link")
  os.replace(root / "link", root / "newest")
  for _ in range(2):
    assert channel.adopt(1) is None
    assert channel.newest_version() == 1
  assert channel.unreadable == 7
  assert caplog.text.count("version 7 is not adopted: it is {") == 1
  assert not channel.wait_for_version(1, 0.05)
  stamped.publish_and_wait(channel, 8)
  params, version = channel.adopt(1)
  assert version == 8
  stamped.assert_all(params, 8)
  before.close()
  channel.close()


def test_a_damaged_version_is_passed_over_by_each_reader(tmp_path, caplog):
  channel, other = _orbax(tmp_path), _orbax(tmp_path)
  stamped.publish_and_wait(channel, 0)
  path = test_orbax_channel._data_file(tmp_path, 0)
  path.write_bytes(path.read_bytes()[:-1])
  for reader in (channel, other):
    assert reader.adopt(-1) is None and reader.newest_version() == -1
  assert caplog.text.count("is corrupted; the next version is") == 2
  stamped.publish_and_wait(channel, 1)
  for reader in (channel, other):
    params, version = reader.adopt_first(stamped.DEADLINE_S)
    assert version == 1
    stamped.assert_all(params, 1)
  channel.close()


@pytest.mark.parametrize("what", ["version", "incarnation", "directory"])
def test_a_version_that_vanishes_before_it_is_read_is_passed_over(
  tmp_path, monkeypatch, what
):
  directory = tmp_path / "versions"
  channel = _orbax(directory)
  stamped.publish_and_wait(channel, 0)
  root = _root(directory)
  gone = {"version": root / "0", "incarnation": root, "directory": directory}
  load = pytree_files.load

  def load_nothing(*arguments):
    shutil.rmtree(gone[what])
    monkeypatch.undo()
    return load(*arguments)

  monkeypatch.setattr(pytree_files, "load", load_nothing)
  assert channel.adopt(-1) is None
  stamped.publish_and_wait(channel, 1)
  params, version = channel.adopt_first(stamped.DEADLINE_S)
  assert version == 1
  stamped.assert_all(params, 1)
  channel.close()


def test_what_is_not_the_fault_of_the_files_is_an_error(tmp_path, monkeypatch):
  channel = _orbax(tmp_path)
  stamped.publish_and_wait(channel, 0)

  def fail(directory, target):
    raise ValueError("a bug")

  monkeypatch.setattr(pytree_files, "load", fail)
  with pytest.raises(ValueError, match="a bug"):
    channel.adopt(-1)
  assert channel.unreadable == -1
  channel.close()
