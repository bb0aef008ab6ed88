"""One process checks for its host, and the others believe only what holds."""

import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxrl_async.storage import shared_check

DEADLINE_S = 60.0


class World:
  """Two files, their record, and a check that counts its calls."""

  def __init__(self, directory: pathlib.Path):
    self.files = [directory / "a", directory / "b"]
    for path in self.files:
      path.write_bytes(b"right")
    self.record = shared_check.record_of(directory / "version")
    self.num_checks = 0

  def check(self) -> str:
    self.num_checks += 1
    wrong = [p.name for p in self.files if p.read_bytes() != b"right"]
    return f"{wrong[0]} is corrupted" if wrong else ""

  def once(self, about="seal") -> str:
    return shared_check.once(self.record, about, self.files, self.check)


@pytest.fixture
def world(tmp_path):
  return World(tmp_path)


@pytest.fixture
def settled(monkeypatch):
  """Files count as old as soon as they are written."""
  monkeypatch.setattr(shared_check, "_SETTLED_NS", -(10**18))


def test_of_many_that_come_at_once_one_checks(world, settled):
  num_readers = 8
  barrier = threading.Barrier(num_readers)
  found = []

  def read():
    barrier.wait(DEADLINE_S)
    found.append(world.once())

  threads = [threading.Thread(target=read) for _ in range(num_readers)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(DEADLINE_S)
  assert found == [""] * num_readers
  assert world.num_checks == 1


def test_a_refusal_is_told_to_all_in_the_same_words(world, settled):
  world.files[1].write_bytes(b"wrong")
  assert [world.once() for _ in range(3)] == ["b is corrupted"] * 3
  assert world.num_checks == 1


def test_a_file_that_was_changed_or_replaced_is_checked_again(world, settled):
  path = world.files[0]

  def put_back_times(before):
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

  def change_in_place():
    path.write_bytes(b"wrong")

  def replace():
    other = path.with_name("other")
    other.write_bytes(b"wrong")
    other.replace(path)

  for change in (change_in_place, replace):
    path.write_bytes(b"right")
    assert world.once() == world.once() == ""
    before = path.stat()
    time.sleep(0.02)  # a tick of the file system's clock
    change()
    put_back_times(before)
    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert world.once() == "a is corrupted"


def test_what_is_checked_against_other_digests_is_checked_again(world, settled):
  assert world.once("these") == world.once("those") == ""
  assert world.num_checks == 2


def test_a_torn_record_counts_as_none(world, settled):
  assert world.once() == ""
  whole = world.record.read_bytes()
  for length in range(len(whole)):
    world.record.write_bytes(whole[:length])
    assert world.once() == ""
  assert world.num_checks == 1 + len(whole)
  assert world.record.read_bytes() == whole


def test_files_that_were_just_written_are_not_recorded(world, monkeypatch):
  monkeypatch.setattr(shared_check, "_SETTLED_NS", 10**18)
  assert world.once() == world.once() == ""
  assert world.num_checks == 2
  monkeypatch.setattr(shared_check, "_SETTLED_NS", -(10**18))
  assert world.once() == world.once() == ""
  assert world.num_checks == 3


def test_a_file_that_changes_during_the_check_is_not_recorded(world, settled):
  def check():
    why_not = world.check()
    world.files[0].with_name("other").write_bytes(b"wrong")
    world.files[0].with_name("other").replace(world.files[0])
    return why_not

  assert shared_check.once(world.record, "seal", world.files, check) == ""
  assert world.once() == "a is corrupted"


_DIES = """
import pathlib, sys, time
from jaxrl_async.storage import shared_check

def check():
  print("checking", flush=True)
  time.sleep(1000.0)

record, *files = map(pathlib.Path, sys.argv[1:])
shared_check.once(record, "seal", files, check)
"""


def test_others_go_on_when_the_process_that_checks_is_killed(world, settled):
  with subprocess.Popen(
    [sys.executable, "-c", _DIES, world.record, *world.files],
    stdout=subprocess.PIPE,
    cwd=pathlib.Path(__file__).parent.parent,
  ) as other:
    assert other.stdout is not None
    assert other.stdout.readline() == b"checking\n"
    found = []
    waiting = threading.Thread(target=lambda: found.append(world.once()))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive() and world.num_checks == 0
    other.send_signal(signal.SIGKILL)
    waiting.join(DEADLINE_S)
  assert found == [""]
  assert world.num_checks == 1


def test_nobody_waits_for_ever_for_one_that_stands_still(
  world, settled, monkeypatch
):
  monkeypatch.setattr(shared_check, "_PATIENCE_S", 0.1)
  with open(world.record, "w") as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    assert world.once() == world.once() == ""
  assert world.num_checks == 2
  assert not world.record.read_text()


def test_without_a_place_for_the_record_every_process_checks(world, settled):
  world.record = world.record.parent / "gone" / "record"
  assert world.once() == world.once() == ""
  world.record = None
  assert world.once() == ""
  assert world.num_checks == 3


def test_files_that_are_gone_leave_no_record(world):
  world.files[0].unlink()
  with pytest.raises(FileNotFoundError):
    world.once()
  assert not world.record.exists()


def test_records_belong_to_a_host_and_go_with_their_directory(
  tmp_path, monkeypatch
):
  directory, other = tmp_path / "1", tmp_path / "11"
  records = [shared_check.record_of(path) for path in (directory, other)]
  monkeypatch.setattr(shared_check.socket, "gethostname", lambda: "elsewhere")
  records.append(shared_check.record_of(directory))
  assert len(set(records)) == 3
  for record in records:
    record.write_text("")
  shared_check.remove_records(directory)
  assert [record.exists() for record in records] == [False, True, False]
  monkeypatch.setattr(shared_check, "_BOOT_ID", tmp_path / "none")
  assert shared_check.record_of(directory) is None
