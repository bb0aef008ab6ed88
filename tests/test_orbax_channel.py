"""Versions in a directory: whole, in order, and gone when nobody reads them."""

import errno
import fcntl
import os
import pathlib
import queue
import shutil
import threading

import numpy as np
from orbax.checkpoint._src.metadata import array_metadata_store
import pytest
import stamped
import waiting

from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.weights import transfer_directory
from jaxrl_async.weights import weight_transfer


def _orbax(
  directory,
  coalesce=True,
  incarnation=stamped.INCARNATION,
  cls=weight_transfer.OrbaxChannel,
  **more,
):
  return cls(
    directory, incarnation, stamped.target(), coalesce=coalesce, **more
  )


class _HeldUp(weight_transfer.OrbaxChannel):
  """Is not done with a version before the gate opens; removes nothing."""

  def _remove_old(self):
    assert self.gate.wait(stamped.DEADLINE_S)


@pytest.mark.parametrize(
  ("coalesce", "expected"), [(True, ["0", "3"]), (False, ["0", "1", "2", "3"])]
)
def test_versions_coalesce_only_when_they_may(tmp_path, coalesce, expected):
  channel = _orbax(tmp_path, coalesce, cls=_HeldUp)
  channel.gate = threading.Event()
  stamped.publish_and_wait(channel, 0)
  for version in (1, 2, 3):
    channel.publish(stamped.params(version), version)
  channel.gate.set()
  assert channel.wait_for_version(2, stamped.DEADLINE_S)
  sealed = tmp_path.glob(
    f"incarnation-{stamped.INCARNATION}/[0-9]*/{manifest.NAME}"
  )
  assert sorted(path.parent.name for path in sealed) == expected
  stamped.assert_all(channel.adopt(-1)[0], 3)
  channel.close()


def test_publish_returns_while_the_save_is_held_up(tmp_path):
  channel = _orbax(tmp_path, cls=_HeldUp)
  channel.gate = threading.Event()
  stamped.publish_and_wait(channel, 0)
  # A publish that waited for the thread would wait for the gate for ever.
  blocked_s = channel.publish(stamped.params(1), 1)
  assert 0 < blocked_s < stamped.DEADLINE_S / 2
  channel.gate.set()
  channel.close()


def test_another_channel_object_adopts_from_the_directory_alone(tmp_path):
  train_side, rollout_side = _orbax(tmp_path), _orbax(tmp_path)
  assert rollout_side.newest_version() == -1
  train_side.publish(stamped.params(1), 1)
  assert rollout_side.wait_for_version(-1, stamped.DEADLINE_S)
  params, version = rollout_side.adopt(-1)
  stamped.assert_all(params, version)
  rollout_side.close()
  assert train_side.adopt(-1)[1] == 1
  train_side.close()


def test_no_flipped_bit_is_ever_adopted(tmp_path, caplog):
  channel = _orbax(tmp_path)
  stamped.publish_and_wait(channel, 0)
  rng = np.random.default_rng(1)
  root = tmp_path / f"incarnation-{stamped.INCARNATION}" / "0"
  files = [path for path in root.rglob("*") if path.is_file()]
  assert any("/embedding/0" in str(path) for path in files)
  for path in files:
    whole = path.read_bytes()
    for _ in range(3 if whole else 0):
      flipped = bytearray(whole)
      flipped[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
      path.write_bytes(flipped)
      reader = _orbax(tmp_path)
      assert reader.adopt(-1) is None and reader.unreadable == 0
      assert path.name in caplog.messages[-1]
    path.write_bytes(whole)
  assert channel.adopt(-1)[1] == 0
  channel.close()


def _data_file(tmp_path, version):
  root = tmp_path / f"incarnation-{stamped.INCARNATION}" / str(version)
  files = [*(root / "state" / "embedding").glob("[0-9]*")]
  return max(files, key=lambda path: path.stat().st_size)


def test_a_torn_version_is_not_there(tmp_path, caplog):
  channel = _orbax(tmp_path)
  stamped.publish_and_wait(channel, 0)
  root = tmp_path / f"incarnation-{stamped.INCARNATION}"
  # As a save that died would leave it: written, not sealed, not announced.
  shutil.copytree(root / "0", root / "1")
  (root / "1" / manifest.NAME).unlink()
  shutil.copytree(root / "1", root / "2.orbax-checkpoint-tmp")
  assert channel.newest_version() == 0
  assert channel.adopt(-1)[1] == 0
  # Announced all the same, it is no version, and not a hang.
  os.symlink("1", root / "link")
  os.replace(root / "link", root / "newest")
  assert channel.adopt(-1) is None and channel.unreadable == 1
  assert "no manifest" in caplog.text
  channel.close()


def test_a_new_start_removes_what_a_killed_one_left(tmp_path):
  killed = _orbax(tmp_path, incarnation="killed")
  stamped.publish_and_wait(killed, 9)
  killed._lock.close()  # as the kernel does
  (tmp_path / "of somebody else").mkdir()
  channel = _orbax(tmp_path)
  assert channel.newest_version() == -1
  assert (tmp_path / "incarnation-killed").exists()
  stamped.publish_and_wait(channel, 2)
  assert not (tmp_path / "incarnation-killed").exists()
  assert channel.adopt(-1)[1] == 2
  channel.close()
  assert [path.name for path in tmp_path.iterdir()] == ["of somebody else"]


def test_two_publishers_of_one_incarnation_are_refused(tmp_path):
  first, second = _orbax(tmp_path), _orbax(tmp_path)
  stamped.publish_and_wait(first, 0)
  with pytest.raises(weight_transfer.WeightTransferError, match="already"):
    second.publish(stamped.params(0), 0)
  first.close()


def test_old_versions_go_but_never_one_that_is_read(tmp_path):
  channel = _orbax(tmp_path)
  root = tmp_path / f"incarnation-{stamped.INCARNATION}"
  stamped.publish_and_wait(channel, 0)
  with open(root / "0" / manifest.NAME, "rb") as reader:
    fcntl.flock(reader, fcntl.LOCK_SH)
    for version in range(1, 5):
      stamped.publish_and_wait(channel, version)
    # Removal follows the announcement; that of 5 follows those before it.
    assert (root / "0" / manifest.NAME).exists()
  stamped.publish_and_wait(channel, 5)
  stamped.publish_and_wait(channel, 6)
  names = {path.name for path in root.iterdir()}
  names.remove("publisher")
  assert {"5", "6", "newest"} <= names <= {"4", "5", "6", "newest"}
  channel.close()
  assert not tmp_path.exists()


def test_what_cannot_be_removed_ends_nothing(tmp_path, notes, monkeypatch):
  remove, stays = shutil.rmtree, [errno.ENOTEMPTY, errno.EIO]

  def removes(directory, *rest, **more):
    if pathlib.Path(directory).name == "0" and stays:
      number = stays.pop()
      raise OSError(number, os.strerror(number))
    remove(directory, *rest, **more)

  monkeypatch.setattr(weight_transfer.shutil, "rmtree", removes)
  channel = _orbax(tmp_path, coalesce=False, note=notes.put)
  for version in range(6):
    stamped.publish_and_wait(channel, version)
    stamped.assert_all(channel.adopt(version - 1)[0], version)
  root = tmp_path / f"incarnation-{stamped.INCARNATION}"
  waiting.until(lambda: not (root / "0").exists(), "its removal")
  assert not stays
  assert "could not be removed" in notes.get(timeout=stamped.DEADLINE_S)
  assert notes.empty()  # said once
  channel.close()


class _OvertakenWhileReading(weight_transfer.OrbaxChannel):
  """Four newer versions are announced between its lock and its first byte."""

  def read(self, version):
    if version == 0:
      for newer in range(1, 5):
        stamped.publish_and_wait(self, newer)
    return super().read(version)


def test_a_version_that_is_overtaken_while_it_is_read_is_read_whole(tmp_path):
  channel = _orbax(tmp_path, cls=_OvertakenWhileReading)
  stamped.publish_and_wait(channel, 0)
  params, version = channel.adopt(-1)
  assert version == 0
  stamped.assert_all(params, 0)
  channel.close()


class _OvertakenWhileLocking(weight_transfer.OrbaxChannel):
  """Newer versions are announced after its first look at the newest."""

  num_looks = 0
  num_newer = 0

  def adopt(self, newer_than):
    self.num_looks = 0
    return super().adopt(newer_than)

  def _announced_version(self):
    newest = super()._announced_version()
    self.num_looks += 1
    if self.num_looks == 1 and newest == 0:  # the version that it will open
      for newer in range(1, self.num_newer + 1):
        stamped.publish_and_wait(self, newer)
    return newest


# By one: it is still there but may go. By three: it is gone.
@pytest.mark.parametrize("num_newer", [1, 3])
def test_a_version_overtaken_before_it_is_locked_gives_way(tmp_path, num_newer):
  channel = _orbax(tmp_path, cls=_OvertakenWhileLocking)
  channel.num_looks, channel.num_newer = 1, num_newer
  stamped.publish_and_wait(channel, 0)
  params, version = channel.adopt(-1)
  assert version == num_newer
  stamped.assert_all(params, num_newer)
  channel.close()


def test_a_failed_save_surfaces_everywhere_with_its_cause(tmp_path):
  channel = _orbax(tmp_path)
  stamped.publish_and_wait(channel, 0)
  # Something lies where the next version is to be announced.
  obstacle = (
    tmp_path / f"incarnation-{stamped.INCARNATION}" / "newest.incomplete"
  )
  obstacle.mkdir()
  channel.publish(stamped.params(1), 1)
  for call in (
    lambda: channel.wait_for_version(0, stamped.DEADLINE_S),
    lambda: channel.publish(stamped.params(2), 2),
    lambda: channel.adopt(-1),
    channel.close,
  ):
    with pytest.raises(weight_transfer.WeightTransferError) as raised:
      call()
    assert str(obstacle) in str(raised.value)
    frames = []
    traceback = raised.value.__cause__.__traceback__
    while traceback is not None:
      frames.append(traceback.tb_frame.f_code.co_name)
      traceback = traceback.tb_next
    assert "_publish_next" in frames
  assert not tmp_path.exists()


class _Full(weight_transfer.OrbaxChannel):
  """The disk takes one version, and more when it has room."""

  has_room = False

  def _announce(self, save, version):
    if version and not self.has_room:
      save()()
      raise OSError(errno.ENOSPC, "No space left on device")
    super()._announce(save, version)


@pytest.fixture
def notes(monkeypatch):
  """What channels say; their attempts follow each other quickly."""
  monkeypatch.setattr(weight_transfer, "_FIRST_WAIT_S", 0.01)
  monkeypatch.setattr(weight_transfer, "_LONGEST_WAIT_S", 0.02)
  return queue.Queue()


def test_a_full_disk_is_said_and_engines_keep_the_version_they_have(
  tmp_path, notes
):
  channel = _orbax(tmp_path, cls=_Full, note=notes.put)
  stamped.publish_and_wait(channel, 0)
  channel.publish(stamped.params(1), 1)
  for _ in range(3):
    note = notes.get(timeout=stamped.DEADLINE_S)
    assert note.startswith("WARNING: version 1 of the weights could not be")
    assert "No space left on device" in note
  assert not channel.wait_for_version(0, 0.1)
  assert channel.adopt(-1)[1] == 0
  with pytest.raises(
    disk.StorageError, match=f"^{tmp_path}.* cannot be .*make room"
  ):
    channel.close()
  assert not tmp_path.exists()


def test_the_newest_version_is_published_when_there_is_room_again(
  tmp_path, notes
):
  channel = _orbax(tmp_path, cls=_Full, note=notes.put)
  stamped.publish_and_wait(channel, 0)
  channel.publish(stamped.params(1), 1)
  notes.get(timeout=stamped.DEADLINE_S)
  channel.publish(stamped.params(2), 2)
  while "version 2" not in notes.get(timeout=stamped.DEADLINE_S):
    pass
  # Nothing of an attempt stays, which would keep the disk full.
  (incarnation,) = tmp_path.iterdir()
  assert not [path.name for path in incarnation.iterdir() if "1" in path.name]
  channel.has_room = True
  assert channel.wait_for_version(0, stamped.DEADLINE_S)
  params, version = channel.adopt(-1)
  assert version == 2
  stamped.assert_all(params, 2)
  channel.close()


def test_a_directory_that_was_removed_is_made_again(tmp_path, notes):
  channel = _orbax(tmp_path / "versions", note=notes.put)
  for version in range(3):
    stamped.publish_and_wait(channel, version)
  (tmp_path / "versions").rename(tmp_path / "elsewhere")
  assert channel.adopt(2) is None
  for version in range(3, 6):
    stamped.publish_and_wait(channel, version)
    stamped.assert_all(channel.adopt(-1)[0], version)
  (incarnation,) = (tmp_path / "versions").iterdir()
  assert disk.is_locked(incarnation / transfer_directory._LOCK)
  channel.close()
  assert not (tmp_path / "versions").exists()


def test_nothing_is_written_after_the_removal_at_an_end(tmp_path):
  channel = _orbax(tmp_path / "versions")
  stamped.publish_and_wait(channel, 0)
  for version in range(1, 5):
    channel.publish(stamped.params(version), version)  # one is being saved
  channel.remove()
  assert not (tmp_path / "versions").exists()
  channel.publish(stamped.params(5), 5)
  with pytest.raises(AssertionError, match="is made again"):
    waiting.until((tmp_path / "versions").exists, "is made again", 0.5)
  channel._writing.release()
  channel.close()


def test_a_directory_that_is_removed_during_a_save_is_made_again(
  tmp_path, notes, monkeypatch
):
  channel = _orbax(tmp_path, note=notes.put)
  stamped.publish_and_wait(channel, 0)
  read, removed = array_metadata_store.Store.read, []

  async def removes_first(self, checkpoint_dir, process_index=None):
    if not removed:
      # What `rmtree` of the whole directory might remove first.
      removed.append(pathlib.Path(checkpoint_dir, "array_metadatas"))
      shutil.rmtree(removed[0])
    return await read(self, checkpoint_dir, process_index)

  monkeypatch.setattr(array_metadata_store.Store, "read", removes_first)
  stamped.publish_and_wait(channel, 1)
  assert removed and "No such file or directory" in notes.get_nowait()
  stamped.assert_all(channel.adopt(0)[0], 1)
  channel.close()


@pytest.mark.parametrize("what", [".", "state", "state/embedding"])
def test_a_version_that_is_removed_before_its_seal_is_not_adopted(
  what, tmp_path, monkeypatch
):
  seal, removed = manifest.write, []

  def remove_first(directory, *arguments):
    if not removed:
      # `rmtree` cannot remove a directory in which there is a new manifest.
      removed.append(directory / what)
      shutil.rmtree(directory / what)
      directory.mkdir(exist_ok=True)
    seal(directory, *arguments)

  monkeypatch.setattr(manifest, "write", remove_first)
  channel = _orbax(tmp_path)
  stamped.publish_and_wait(channel, 0)
  assert removed and channel.adopt(-1) is None
  stamped.publish_and_wait(channel, 1)
  weights, version = channel.adopt(-1)
  assert version == 1
  stamped.assert_all(weights, 1)
  channel.close()


def test_close_does_not_wait_for_ever(tmp_path):
  channel = _orbax(tmp_path, cls=_HeldUp)
  channel.gate = threading.Event()
  stamped.publish_and_wait(channel, 0)
  with pytest.raises(weight_transfer.WeightTransferError, match="still saving"):
    channel.close(timeout_s=0.05)
  channel.gate.set()
  channel.close()
