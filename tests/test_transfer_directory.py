"""Where versions go, and that dead starts of a run leave nothing behind."""

import os
import shutil
import types

import other_user
import pytest

from jaxrl_async.cluster import hosts
from jaxrl_async.config import sections
from jaxrl_async.storage import disk
from jaxrl_async.weights import transfer_directory

SIZE = 100  # of a version; so 400 are wanted


@pytest.fixture
def memory(tmp_path, monkeypatch):
  """A memory-backed directory of 1,000 bytes, as of the files in it."""
  path = tmp_path / "shm"
  path.mkdir()

  def usage(directory):
    files = [p for p in directory.rglob("*") if p.is_file()]
    used = sum(p.stat().st_size for p in files)
    return types.SimpleNamespace(free=1000 - used)

  monkeypatch.setattr(transfer_directory, "_MEMORY_BACKED", path)
  monkeypatch.setattr(transfer_directory.shutil, "disk_usage", usage)
  return path


@pytest.fixture
def workdir(tmp_path):
  path = tmp_path / "run"
  path.mkdir()
  return path


def start(workdir, notes=None, **section):
  """What a start of a run does: returns its directory and its lock."""
  said = [] if notes is None else notes
  section = sections.TransferSection(**section)
  directory = transfer_directory.prepare(section, workdir, SIZE, said.append)
  number = len(list(directory.glob("incarnation-*")))
  incarnation = directory / f"incarnation-{number}"
  lock = transfer_directory.open_incarnation(incarnation)
  (incarnation / "weights").write_bytes(b"x" * 700)
  return directory, lock


def kill(lock):
  lock.close()  # as the kernel does


def test_every_start_finds_the_same_directory_although_the_last_filled_it(
  memory, workdir
):
  directories, notes = [], []
  for _ in range(3):
    directory, lock = start(workdir, notes)
    kill(lock)
    directories.append(directory)
    (incarnation,) = directory.iterdir()
  assert len(set(directories)) == 1 and directories[0].parent == memory
  assert not notes


def test_what_lies_where_versions_went_before_is_removed(
  memory, workdir, tmp_path
):
  first, lock = start(workdir)
  assert first.parent == memory
  kill(lock)
  configured = tmp_path / "configured"
  second, lock = start(workdir, directory=str(configured))
  assert second.parent == configured and not any(memory.iterdir())
  kill(lock)
  (configured / "of somebody else").mkdir()
  transfer_directory.prepare(
    sections.TransferSection(
      channel=sections.Channel.DIRECT, directory=str(configured)
    ),
    workdir,
    SIZE,
    lambda text: None,
  )
  assert [p.name for p in configured.iterdir()] == ["of somebody else"]


def test_a_copy_of_a_workdir_leaves_the_weights_of_the_live_run_alone(
  memory, workdir, tmp_path
):
  live, lock = start(workdir)
  copy = shutil.copytree(workdir, tmp_path / "copy")
  notes = []
  directory, other_lock = start(copy, notes)
  assert (live / "incarnation-0" / "weights").exists()
  assert directory == copy / "weight_transfer"
  assert "0.0 MB free" in notes[0] and len(notes) == 1
  kill(lock)
  kill(other_lock)


def test_without_memory_backed_storage_the_workdir_is_taken_and_it_is_said(
  memory, workdir
):
  memory.rmdir()
  notes = []
  directory, lock = start(workdir, notes)
  assert directory == workdir / "weight_transfer"
  (note,) = notes
  assert f"{memory} cannot be written to" in note
  kill(lock)


def made_first(path, how, tmp_path):
  """Somebody else makes the directory of a run, or a link in its place."""
  target = path
  if how == "link":
    target = tmp_path / "elsewhere"
    path.symlink_to(target)
  left = target / "incarnation-left"
  left.mkdir(parents=True)
  if how == "directory":
    os.chown(target, other_user.NOBODY, other_user.NOBODY)
  return left


HOWS = ["link", pytest.param("directory", marks=pytest.mark.other_user)]


@pytest.mark.parametrize("how", HOWS)
def test_a_directory_that_somebody_else_made_first_is_not_used(
  how, memory, workdir, tmp_path
):
  name = transfer_directory._name(workdir.resolve())
  left = made_first(memory / name, how, tmp_path)
  notes = []
  directory, lock = start(workdir, notes)
  kill(lock)
  assert directory == workdir / "weight_transfer"
  assert f"{memory / name} belongs to another user" in notes[0]
  assert len(notes) == 1 and left.is_dir()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.usefixtures("memory")
def test_a_configured_directory_of_somebody_else_is_refused(
  how, workdir, tmp_path
):
  chosen = tmp_path / "weights" / transfer_directory._name(workdir.resolve())
  chosen.parent.mkdir()
  left = made_first(chosen, how, tmp_path)
  with pytest.raises(disk.StorageError, match=f"^{chosen} belongs to another"):
    start(workdir, directory=str(chosen.parent))
  # It was made after the start had looked.
  with pytest.raises(disk.StorageError, match=f"^{chosen} belongs to another"):
    transfer_directory.open_incarnation(chosen / "incarnation-0")
  with pytest.raises(disk.StorageError, match=f"^{chosen} belongs to another"):
    hosts.write_probe((chosen / "probe", "content"))
  assert [*left.parent.iterdir()] == [left]


@pytest.mark.other_user
def test_another_user_can_do_nothing_with_published_versions(
  workdir, monkeypatch
):
  with other_user.shared_directory() as directory:
    monkeypatch.setattr(transfer_directory, "_MEMORY_BACKED", directory)
    chosen, lock = start(workdir)
    assert chosen.parent == directory
    assert other_user.can(chosen) == []
    kill(lock)
    configured, lock = start(workdir, directory=str(directory / "weights"))
    assert not chosen.exists() and other_user.can(configured) == []
    kill(lock)


def test_a_link_to_a_workdir_is_the_same_run(memory, workdir, tmp_path):
  link = tmp_path / "link"
  link.symlink_to(workdir)
  first, lock = start(workdir)
  kill(lock)
  second, lock = start(link)
  assert first == second
  kill(lock)


def test_two_workdirs_share_no_directory_and_another_runs_files_stay(
  memory, workdir, tmp_path
):
  first, lock = start(workdir)
  kill(lock)
  other = tmp_path / "other"
  other.mkdir()
  start(other, directory=str(tmp_path / "elsewhere"))[1].close()
  assert (first / "incarnation-0").exists()


def test_a_reader_that_goes_on_does_not_disturb_the_removal(
  tmp_path, monkeypatch
):
  incarnation = tmp_path / "incarnation-0"
  transfer_directory.open_incarnation(incarnation).close()
  late = []
  rmtree = shutil.rmtree

  def rmtree_beside_a_reader(directory):
    for path in directory.iterdir():
      path.unlink()
    try:
      (incarnation / "0.checked-here").write_text("")
    except FileNotFoundError:
      late.append(incarnation)
    rmtree(directory)

  monkeypatch.setattr(
    transfer_directory.shutil, "rmtree", rmtree_beside_a_reader
  )
  transfer_directory.remove_leftovers(tmp_path)
  assert late == [incarnation]
  assert not tmp_path.exists()
