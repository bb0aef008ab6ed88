"""Directories of this user alone, where others may have been there first."""

import os
import stat

import other_user
import pytest

from jaxrl_async.storage import disk
from jaxrl_async.storage import private_directory


def mode(path):
  return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [None, 0o755, 0o777, 0o700])
def test_a_directory_is_for_its_user_alone(before, tmp_path):
  path = tmp_path / "a" / "b"
  if before is not None:
    path.mkdir(parents=True)
    path.chmod(before)
    (path / "file").touch()
  private_directory.make(path)
  private_directory.make(path)
  assert mode(path) == 0o700 and private_directory.is_own(path)
  assert len(list(path.iterdir())) == (before is not None)


@pytest.mark.parametrize("what", ["link", "dead link", "file"])
def test_what_is_no_directory_is_not_used(what, tmp_path):
  path, own = tmp_path / "path", tmp_path / "own"
  own.mkdir(mode=0o755)
  if what == "file":
    path.touch()
  else:
    path.symlink_to(own if what == "link" else tmp_path / "nowhere")
  for function in (private_directory.check, private_directory.make):
    with pytest.raises(disk.StorageError, match=f"{path} belongs to another"):
      function(path)
  assert not private_directory.is_own(path) and mode(own) == 0o755


def test_a_server_of_files_may_give_what_root_makes_to_nobody(
  tmp_path, monkeypatch
):
  path, owner = tmp_path / "path", os.geteuid()
  monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
  for _ in range(2):
    private_directory.make(path)
  assert private_directory.is_own(path)


@pytest.mark.other_user
def test_another_user_can_do_nothing_with_it():
  with other_user.shared_directory() as directory:
    ours, theirs = directory / "ours", directory / "theirs"
    private_directory.make(ours)
    theirs.mkdir()
    for path in (ours, theirs):
      (path / "below").mkdir(mode=0o777)
      (path / "below" / "file").write_text("what only the owner may read")
    for path in (theirs, *theirs.rglob("*")):
      os.chown(path, other_user.NOBODY, other_user.NOBODY)
    assert other_user.can(ours) == []
    # The attempts succeed where nothing is in their way.
    assert other_user.can(theirs) == [*other_user.ATTEMPTS]
