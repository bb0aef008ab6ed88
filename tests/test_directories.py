"""What can be written to is found out without leaving anything."""

import os

import pytest

from jaxrl_async.config import sections
from jaxrl_async.storage import directories
from jaxrl_async.storage import manifest


@pytest.mark.parametrize("name", ["", "here", "not/here/yet", "ü and spaces"])
def test_a_directory_that_can_be_made_passes_and_is_not_made(tmp_path, name):
  (tmp_path / "here").mkdir()
  directories.check_can_write("workdir", str(tmp_path / name))
  assert os.listdir(tmp_path) == ["here"]
  assert not os.listdir(tmp_path / "here")


def test_what_stands_in_the_way_is_named(tmp_path):
  (tmp_path / "file").write_text("")
  (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
  for name, words in (
    ("file", "is not a directory"),
    ("file/below", "cannot be a directory"),
    ("nowhere", "is not a directory"),
    ("nowhere/below", "cannot be a directory"),
    ("x" * 256, "has a name of 256 bytes; use at most 255"),
    ("new/" + "ü" * 128, "has a name of 256 bytes"),
    ("x/" * 2_000, "too long a path"),
    ("nu\0l", "a character that paths may not have"),
    ("\udcff", "a character that paths may not have"),
    ("\ud800", "a character that paths may not have"),
  ):
    with pytest.raises(sections.ConfigError, match=f"^workdir: .*{words}"):
      directories.check_can_write("workdir", f"{tmp_path}/{name}")
  assert sorted(os.listdir(tmp_path)) == ["file", "nowhere"]


def test_nothing_is_written_into_what_a_manifest_seals(tmp_path):
  """Such as a checkpoint, which would be damaged by a single file."""
  sealed = tmp_path / "run" / "checkpoints" / "16"
  sealed.mkdir(parents=True)
  (sealed / "state").write_text("")
  manifest.write(sealed, {})
  (tmp_path / "link").symlink_to(sealed)
  for path in (sealed, sealed / "more", tmp_path / "link"):
    with pytest.raises(
      sections.ConfigError, match=f"^workdir: .* {sealed} is a"
    ):
      directories.check_can_write("workdir", str(path))
  manifest.verify(sealed)
  # A file of this name may be anybody's.
  (tmp_path / "manifest.json").write_text("{}")
  directories.check_can_write("workdir", str(tmp_path / "run"))


def test_a_file_system_that_takes_nothing_is_found_out():
  with pytest.raises(sections.ConfigError, match="^workdir: .*be written to"):
    directories.check_can_write("workdir", "/proc/none")


def test_what_is_read_has_to_be_a_directory(tmp_path):
  directories.check_can_read("checkpoint", str(tmp_path), "give another")
  for name in ("", "x" * 5_000, str(tmp_path / "no"), __file__, "nu\0l"):
    with pytest.raises(sections.ConfigError, match="^checkpoint: "):
      directories.check_can_read("checkpoint", name, "give another")
