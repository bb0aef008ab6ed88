"""Manifests: no directory that differs from what was sealed is taken."""

import hashlib
import json
import pathlib
import tempfile

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from jaxrl_async.storage import manifest

_PARENT = tempfile.TemporaryDirectory()  # is removed when the tests end


def _directory_with(files: dict[str, bytes]) -> pathlib.Path:
  directory = pathlib.Path(tempfile.mkdtemp(dir=_PARENT.name))
  for name, data in files.items():
    (directory / name).parent.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(data)
  return directory


@pytest.mark.parametrize("sync", [False, True])
def test_what_was_written_about_a_whole_directory_is_read_back(sync):
  directory = _directory_with({"a": b"1", "b/c": b"", "b/manifest.json": b"2"})
  manifest.write(directory, {"version": 3, "name": "x\ny"}, sync=sync)
  assert manifest.verify(directory) == {"version": 3, "name": "x\ny"}


@settings(max_examples=200, deadline=None)
@given(data=st.data(), contents=st.lists(st.binary(max_size=40), max_size=3))
def test_any_single_flipped_bit_is_refused_and_its_file_named(data, contents):
  names = [f"d{i}/f" for i in range(len(contents))]
  directory = _directory_with(dict(zip(names, contents, strict=True)))
  manifest.write(directory, {"version": 1})
  sizes = {n: (directory / n).stat().st_size for n in [*names, manifest.NAME]}
  name = data.draw(st.sampled_from([n for n in sizes if sizes[n]]))
  bit = data.draw(st.integers(0, 8 * sizes[name] - 1))
  flipped = bytearray((directory / name).read_bytes())
  flipped[bit // 8] ^= 1 << bit % 8
  (directory / name).write_bytes(bytes(flipped))
  with pytest.raises(manifest.ManifestError, match=f"{name} is corrupted"):
    manifest.verify(directory)


def test_a_directory_without_a_manifest_is_refused():
  with pytest.raises(manifest.ManifestError, match="manifest.json is missing"):
    manifest.verify(_directory_with({"a": b"1"}))


def test_a_cut_manifest_is_refused_at_every_length():
  directory = _directory_with({"a": b"1"})
  manifest.write(directory, {"version": 1})
  whole = (directory / manifest.NAME).read_bytes()
  for length in range(len(whole)):
    (directory / manifest.NAME).write_bytes(whole[:length])
    with pytest.raises(manifest.ManifestError, match="is corrupted"):
      manifest.verify(directory)


def test_a_lost_and_an_added_file_are_refused_by_name():
  directory = _directory_with({"a": b"1", "b/c": b"2"})
  manifest.write(directory, {})
  (directory / "b/d").write_bytes(b"")
  with pytest.raises(manifest.ManifestError, match="b/d does not belong here"):
    manifest.verify(directory)
  (directory / "b/d").unlink()
  (directory / "b/c").unlink()
  with pytest.raises(manifest.ManifestError, match="b/c is missing"):
    manifest.verify(directory)


def test_a_digest_is_that_of_the_digests_of_its_blocks(monkeypatch):
  monkeypatch.setattr(manifest, "_BLOCK_BYTES", 4)
  contents = {"a": b"", "b": b"1234", "c": b"123456789", "d/e": bytes(40)}
  directory = _directory_with(contents)
  manifest.write(directory, {})
  assert manifest.verify(directory) == {}
  line = (directory / manifest.NAME).read_bytes().partition(b"\n")[0]
  found = json.loads(line)["files"]
  for name, data in contents.items():
    blocks = [data[i : i + 4] for i in range(0, max(1, len(data)), 4)]
    digests = b"".join(hashlib.sha256(block).digest() for block in blocks)
    assert found[name] == hashlib.sha256(digests).hexdigest()
  for name, changed in {
    "c": b"1234_6789",
    "b": b"1234\0",
    "d/e": bytes(36),
    "a": b"1",
  }.items():
    (directory / name).write_bytes(changed)
    with pytest.raises(manifest.ManifestError, match=f"{name} is corrupted"):
      manifest.verify(directory)
    (directory / name).write_bytes(contents[name])
