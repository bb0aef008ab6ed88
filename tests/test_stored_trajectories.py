"""Trajectories on the disk: whole, synced, kept when it is full, and cut."""

import errno
import os
import pathlib

import disks
import numpy as np
import pytest
import test_ledger

from jaxrl_async.replay import timing_record
from jaxrl_async.storage import disk


def names(workdir):
  return sorted(path.name for path in (workdir / "trajectories").glob("*"))


def check(workdir, *steps):
  """Each step has its own two groups, bit for bit."""
  for step in steps:
    found = timing_record.read_trajectories(workdir, step)
    assert [group.index for group in found] == [2 * step, 2 * step + 1]
    expected = test_ledger.make_group(2 * step)
    np.testing.assert_array_equal(
      found[0].trajectories[1].policy_versions,
      expected.trajectories[1].policy_versions,
    )


def add(stored, *steps):
  for step in steps:
    stored.add(step, [test_ledger.make_group(2 * step + i) for i in range(2)])


def test_what_a_full_disk_refuses_is_written_when_there_is_room(tmp_path):
  notes = []
  stored = timing_record.StoredTrajectories(tmp_path, 0, notes.append)
  add(stored, 0)
  with disks.files_of_at_most(100):
    add(stored, 1, 2)
    with pytest.raises(disk.StorageError, match="trajectories/1.*make room"):
      stored.sync()
    assert names(tmp_path) == ["0"]  # nothing incomplete fills the disk
  add(stored, 3)
  assert names(tmp_path) == ["0", "1", "2", "3"]
  check(tmp_path, 0, 1, 2, 3)
  first, second = notes
  assert first.startswith(f"WARNING: {tmp_path}/trajectories cannot be written")
  assert second.endswith("is written again, and lacks nothing")


def test_a_name_that_is_not_confirmed_is_given_again(tmp_path, monkeypatch):
  stored = timing_record.StoredTrajectories(tmp_path, 0, lambda text: 0)
  sync_names = disk.sync_names

  def once(directory):
    sync_names(directory)
    if directory.name == timing_record.TRAJECTORIES:
      monkeypatch.undo()
      raise OSError(errno.EIO, os.strerror(errno.EIO))

  monkeypatch.setattr(disk, "sync_names", once)
  add(stored, 0)
  assert names(tmp_path) == ["0"] and stored._kept
  stored.sync()
  assert names(tmp_path) == ["0"]
  check(tmp_path, 0)


def test_nothing_is_written_where_another_workdir_lies(tmp_path):
  workdir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
  workdir.mkdir()
  notes = []
  schedule = timing_record.TimingRecord(
    workdir,
    0,
    record_steps=True,
    keep_trajectories=True,
    first_step=0,
    environment={},
    config={},
    note=notes.append,
  )
  workdir.rename(elsewhere)
  workdir.mkdir()
  groups = [test_ledger.make_group(i) for i in range(2)]
  schedule.add_step(0, groups, {})
  assert not list(workdir.iterdir())
  workdir.rmdir()
  elsewhere.rename(workdir)
  assert schedule.num_bytes() > 0
  schedule.close()
  check(workdir, 0)
  assert len(notes) == 2 and all("was moved" in note for note in notes)


def test_no_more_than_a_limit_is_kept(tmp_path, monkeypatch):
  stored = timing_record.StoredTrajectories(tmp_path, 0, lambda text: 0)
  monkeypatch.setattr(timing_record, "_MOST_KEPT", 3000)
  with disks.files_of_at_most(100):
    add(stored, 0)
    with pytest.raises(disk.StorageError):
      add(stored, 1)
  stored.sync()
  assert names(tmp_path) == ["0"]


def test_a_start_removes_what_came_after_its_checkpoint(tmp_path):
  stored = timing_record.StoredTrajectories(tmp_path, 0)
  add(stored, 0, 1, 2)
  (tmp_path / "trajectories" / "1.incomplete").mkdir()
  timing_record.StoredTrajectories(tmp_path, 2)
  assert names(tmp_path) == ["0", "1"]
  check(tmp_path, 0, 1)


def test_files_and_names_have_reached_the_disk(tmp_path, monkeypatch):
  synced, fsync = [], os.fsync

  def record(descriptor):
    synced.append(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync(descriptor)

  monkeypatch.setattr(os, "fsync", record)
  add(timing_record.StoredTrajectories(tmp_path, 0), 0)
  directory = tmp_path / "trajectories"
  files = {path.name for path in (directory / "0").iterdir()}
  *of_files, incomplete, last = synced
  assert {path.name for path in of_files} == files
  assert incomplete == directory / "0.incomplete" and last == directory
