"""What is said of a disk that refuses, and what it leaves in a file."""

import errno
import os
import pathlib

import disks
import pytest

from jaxrl_async.storage import disk
from jaxrl_async.storage import workdir as workdir_lib


def test_a_record_that_does_not_fit_leaves_whole_records(tmp_path):
  path = tmp_path / "lines"
  file = disk.AppendFile(path)
  file.append(b"one\n")
  with disks.files_of_at_most(10):
    file.append(b"two\n")
    # Two bytes of it fit, and are taken off again.
    with pytest.raises(disk.StorageError) as raised:
      file.append(b"three\n")
  assert path.read_bytes() == b"one\ntwo\n"
  message = str(raised.value)
  assert str(path) in message and "make room" in message
  assert len(message.splitlines()) == 1
  file.append(b"four\n")
  file.close()
  assert path.read_bytes() == b"one\ntwo\nfour\n"


def test_records_that_are_refused_may_wait_in_memory_in_their_order(tmp_path):
  path, notes = tmp_path / "lines", []
  file = disk.AppendFile(path, note=notes.append)
  file.append(b"one\n")
  with disks.files_of_at_most(10):
    for record, num_notes in ((b"two\n", 0), (b"three\n", 1), (b"four\n", 1)):
      file.append(record)
      assert len(notes) == num_notes
    assert file.num_bytes == 19
    assert path.read_bytes() == b"one\ntwo\n"
    for call in (file.sync, file.sync):
      with pytest.raises(disk.StorageError, match="make room"):
        call()
  assert path.read_bytes() == b"one\ntwo\n"
  file.append(b"five\n")
  assert path.read_bytes() == b"one\ntwo\nthree\nfour\nfive\n"
  assert file.num_bytes == 24
  first, second = notes
  assert first.startswith(f"WARNING: {path} cannot be written (")
  assert second == f"{path} is written again, and lacks nothing"
  with disks.files_of_at_most(10):
    file.append(b"six\n")
    with pytest.raises(disk.StorageError):
      file.close()
  file.close()


def test_what_the_disk_did_not_confirm_is_written_again(tmp_path, monkeypatch):
  path, confirmed, breaks = tmp_path / "lines", [0], []

  def forget(descriptor):
    """A failed writeback: told once, and what was written may be gone."""
    size = path.stat().st_size
    if not breaks:
      confirmed[0] = size
      return
    breaks.pop()
    os.pwrite(descriptor, bytes(size - confirmed[0]), confirmed[0])
    raise OSError(errno.EIO, os.strerror(errno.EIO))

  monkeypatch.setattr(os, "fsync", forget)
  file = disk.AppendFile(path)
  file.append(b"one\n")
  file.sync()
  file.append(b"two\n")
  file.append(b"three\n")
  breaks.append(1)
  with pytest.raises(disk.StorageError, match="lines cannot be written"):
    file.sync()
  file.sync()
  assert path.read_bytes() == b"one\ntwo\nthree\n"
  assert file.num_bytes == 14
  # Nor is more kept in memory than a limit before it is confirmed.
  monkeypatch.setattr(disk, "_MOST_KEPT", 12)
  breaks.append(1)
  file.append(b"four\n")
  with pytest.raises(disk.StorageError):
    file.append(b"five\n")
  assert path.read_bytes() == b"one\ntwo\nthree\n"
  file.append(b"six\n")
  file.close()
  assert path.read_bytes() == b"one\ntwo\nthree\nfour\nsix\n"


def test_a_file_system_that_does_not_answer_is_waited_for(
  tmp_path, monkeypatch
):
  path, notes = tmp_path / "lines", []
  file = disk.AppendFile(path, note=notes.append)
  file.append(b"one\n")
  with monkeypatch.context() as patched:
    patched.setattr(workdir_lib, "check_in_place", disks.does_not_answer)
    file.append(b"two\n")
    file.append(b"three\n")
    with pytest.raises(disk.StorageError, match="check that the directory"):
      file.sync()
  assert path.read_bytes() == b"one\n" and file.num_bytes == 14
  file.append(b"four\n")
  file.sync()
  assert path.read_bytes() == b"one\ntwo\nthree\nfour\n"
  assert len(notes) == 2 and "Stale file handle" in notes[0]
  path.rename(tmp_path / "elsewhere")
  file.append(b"five\n")
  with pytest.raises(disk.StorageError, match="it was moved; put it back"):
    file.sync()
  (tmp_path / "elsewhere").rename(path)
  file.append(b"six\n")
  assert path.read_bytes() == b"one\ntwo\nthree\nfour\nfive\nsix\n"
  path.unlink()
  file.append(b"seven\n")
  with pytest.raises(disk.StorageError, match="it was removed"):
    file.sync()
  path.touch()
  with pytest.raises(workdir_lib.WorkdirError, match="lines was replaced"):
    file.append(b"eight\n")
  assert file.num_bytes == 34
  file.close()


def test_no_more_than_a_limit_waits_in_memory(tmp_path, monkeypatch):
  monkeypatch.setattr(disk, "_MOST_KEPT", 9)
  file = disk.AppendFile(tmp_path / "lines", note=lambda text: None)
  with disks.files_of_at_most(1):
    file.append(b"four\n")
    with pytest.raises(disk.StorageError):
      file.append(b"five\n")
    assert file.num_bytes == 5
  file.close()
  assert (tmp_path / "lines").read_bytes() == b"four\n"


def test_a_file_is_cut_to_what_is_known_of_it(tmp_path):
  path = tmp_path / "lines"
  path.write_bytes(b"one\ntwo\ntorn")
  file = disk.AppendFile(path, 8)
  file.append(b"three\n")
  file.close()
  assert path.read_bytes() == b"one\ntwo\nthree\n"
  with pytest.raises(ValueError, match="has 14 bytes, fewer than the 15"):
    disk.AppendFile(path, 15)


def test_a_text_has_reached_the_disk_before_it_has_its_name(
  tmp_path, monkeypatch
):
  synced, fsync = [], os.fsync

  def record(descriptor):
    path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    synced.append((path, path.is_dir() or path.read_text()))
    fsync(descriptor)

  monkeypatch.setattr(os, "fsync", record)
  disk.replace_text(tmp_path / "text.json", "all of it")
  assert synced == [
    (tmp_path / "text.incomplete", "all of it"),
    (tmp_path, True),
  ]
  assert (tmp_path / "text.json").read_text() == "all of it"


def test_what_could_not_be_written_whole_does_not_stay(tmp_path):
  """Be it a file or a directory: it would keep a full disk full."""
  path = tmp_path / "kept"
  disk.replace_text(path, "before")
  with disks.files_of_at_most(100), pytest.raises(disk.StorageError):
    disk.replace_text(path, "after" * 100)
  with disks.files_of_at_most(100), pytest.raises(disk.StorageError):
    with disk.replacing(tmp_path / "folder") as folder:
      folder.mkdir()
      (folder / "file").write_text("x" * 1000)
  assert path.read_text() == "before"
  assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_a_file_in_the_way_of_a_directory_is_named(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(disk.StorageError, match="file/lines cannot be"):
    disk.AppendFile(tmp_path / "file" / "lines")


@pytest.mark.parametrize("text", ["[OS error 28: x]", "[os_error_code='28']"])
def test_what_orbax_makes_of_a_full_disk_is_understood(text):
  with pytest.raises(disk.StorageError, match="checkpoint .*make room"):
    with disk.writing("checkpoint"):
      raise ValueError(f"RESOURCE_EXHAUSTED: Failed to write {text}")


@pytest.mark.parametrize(
  "error", [FileExistsError(17, "File exists"), ValueError("a bug")]
)
def test_what_is_not_the_disks_fault_stays_what_it_is(error):
  with pytest.raises(type(error)) as raised, disk.writing("somewhere"):
    raise error
  assert raised.value is error
