"""What is said of a disk that refuses, and what it leaves in a file."""

import disks
import pytest

from jaxrl_async.storage import disk


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


def test_a_file_is_cut_to_what_is_known_of_it(tmp_path):
  path = tmp_path / "lines"
  path.write_bytes(b"one\ntwo\ntorn")
  file = disk.AppendFile(path, 8)
  file.append(b"three\n")
  file.close()
  assert path.read_bytes() == b"one\ntwo\nthree\n"
  with pytest.raises(ValueError, match="has 14 bytes, fewer than the 15"):
    disk.AppendFile(path, 15)


def test_a_file_in_the_way_of_a_directory_is_named(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(disk.StorageError, match="file/lines cannot be"):
    disk.AppendFile(tmp_path / "file" / "lines")


def test_what_orbax_makes_of_a_full_disk_is_understood():
  with pytest.raises(disk.StorageError, match="checkpoint .*make room"):
    with disk.writing("checkpoint"):
      raise ValueError("RESOURCE_EXHAUSTED: Failed to write [OS error 28: x]")


@pytest.mark.parametrize(
  "error", [FileExistsError(17, "File exists"), ValueError("a bug")]
)
def test_what_is_not_the_disks_fault_stays_what_it_is(error):
  with pytest.raises(type(error)) as raised, disk.writing("somewhere"):
    raise error
  assert raised.value is error
