"""Checkpoints that are damaged, in flight, or cut off; without a run."""

import ctypes
import errno
import gc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading

import conftest  # noqa: F401  session settings, also as a script
import disks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting

from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.storage import pytree_files

STATE = {"w": jnp.arange(4.0)}
TIMEOUT_S = 120.0


def save(directory, *steps, keep=9):
  for step in steps:
    checkpoint.save(directory, step, STATE, {"step": step}, [], keep=keep)


def newest(directory):
  notes = []
  whole = checkpoint.newest_whole(directory, notes.append)
  return whole and whole[:3], notes


def names(directory):
  return sorted(path.name for path in directory.iterdir())


def tear(path, how):
  array = path / "host_state.json"
  if how == "missing":
    array.unlink()
  elif how == "short":
    array.write_bytes(array.read_bytes()[:-1])
  elif how == "changed":
    array.write_bytes(array.read_bytes()[:-1] + b" ")
  elif how == "added":
    (path / "more").touch()
  elif how == "manifest":
    (path / manifest.NAME).write_bytes(b"{}")


def test_old_checkpoints_that_stay_fail_no_new_one(
  tmp_path, monkeypatch, caplog
):
  rmtree, is_stuck = shutil.rmtree, [True]

  def stuck(path, *rest, **more):
    if is_stuck[0] and path.suffix == ".removed":
      raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    rmtree(path, *rest, **more)

  monkeypatch.setattr(shutil, "rmtree", stuck)
  save(tmp_path, 1, 2, 3, 3, 4, keep=2)
  assert newest(tmp_path)[0] == (4, {"step": 4}, ())
  assert "could not be removed" in caplog.text
  is_stuck[0] = False
  save(tmp_path, 5, keep=2)
  assert names(tmp_path) == ["4", "5"]


@pytest.mark.parametrize(
  "how", ["missing", "short", "changed", "added", "manifest"]
)
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, how):
  save(tmp_path, 1, 2, 3)
  assert newest(tmp_path) == ((3, {"step": 3}, ()), [])
  tear(tmp_path / "3", how)
  before = sorted(tmp_path.rglob("*"))
  whole, notes = newest(tmp_path)
  assert whole == (2, {"step": 2}, (3,))
  assert sorted(tmp_path.rglob("*")) == before
  (note,) = notes
  assert note.startswith("WARNING: checkpoint of step 3: ")
  assert note.endswith("going back to the checkpoint of step 2")
  tear(tmp_path / "2", how)
  whole, notes = newest(tmp_path)
  assert whole == (1, {"step": 1}, (3, 2)) and len(notes) == 2
  checkpoint.set_aside(tmp_path, (3, 2))
  assert checkpoint.latest(tmp_path) == 1
  save(tmp_path, 2, keep=1)
  assert names(tmp_path) == ["2", "2.damaged", "3.damaged"]
  assert newest(tmp_path) == ((2, {"step": 2}, ()), [])
  # The next time, those of before are removed.
  save(tmp_path, 4)
  tear(tmp_path / "4", how)
  assert newest(tmp_path)[0] == (2, {"step": 2}, (4,))
  checkpoint.set_aside(tmp_path, ())
  assert len(names(tmp_path)) == 4
  checkpoint.set_aside(tmp_path, (4,))
  assert names(tmp_path) == ["2", "4.damaged"]


def test_what_a_crash_left_of_a_damaged_step_never_comes_back(tmp_path):
  """The run goes on from before, and comes to the step in another way."""
  save(tmp_path, 5, 7)
  # A kill after both renames of a second save of step 7, before the removal.
  shutil.copytree(tmp_path / "7", tmp_path / "7.old")
  tear(tmp_path / "7", "short")
  checkpoint.recover(tmp_path)
  whole, _ = newest(tmp_path)
  assert whole == (5, {"step": 5}, (7,))
  checkpoint.set_aside(tmp_path, (7,))
  save(tmp_path, 6)
  assert checkpoint.steps(tmp_path) == [5, 6]
  assert names(tmp_path) == ["5", "6", "7.damaged", "7.old.damaged"]


def test_a_start_reads_a_checkpoint_once_and_verifies_it_once(
  tmp_path, monkeypatch
):
  save(tmp_path, 1)
  calls, verify = [], manifest.verify

  def counted(directory):
    calls.append(1)
    return verify(directory)

  monkeypatch.setattr(manifest, "verify", counted)
  whole = checkpoint.newest_whole(tmp_path, lambda text: None)
  w = STATE["w"]
  abstract = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)}
  found, _, _ = checkpoint.restore(
    tmp_path, 1, abstract, verified=whole.verified
  )
  np.testing.assert_array_equal(found["w"], STATE["w"])
  assert len(calls) == 1


def test_where_all_are_damaged_the_newest_is_named(tmp_path):
  assert newest(tmp_path) == (None, [])
  save(tmp_path, 1, 2)
  for step in (1, 2):
    tear(tmp_path / str(step), "short")
  with pytest.raises(checkpoint.DamagedError, match="step 2: "):
    newest(tmp_path)


def test_another_format_is_no_damage(tmp_path, monkeypatch):
  save(tmp_path, 1)
  with monkeypatch.context() as patched:
    patched.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    save(tmp_path, 2)
  with pytest.raises(checkpoint.CheckpointError, match="another version"):
    newest(tmp_path)


def test_arrays_may_be_donated_and_the_rest_changed_while_it_is_written(
  tmp_path,
):
  rng = np.random.default_rng(0)
  shape = (64, 1024)
  values = {
    name: rng.normal(size=shape).astype(np.float32) for name in "abcdefgh"
  }
  state = jax.tree.map(jnp.array, values)
  overwrite = jax.jit(
    lambda tree: jax.tree.map(lambda x: -x, tree), donate_argnums=0
  )
  overwrite(jax.tree.map(jnp.array, values))
  host_state = {"step": 1}
  finish = checkpoint.begin(tmp_path, 1, state, host_state, [])
  host_state["step"] = 2
  for _ in range(3):
    state = jax.block_until_ready(overwrite(state))
  finish()
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )
  found, found_state, _ = checkpoint.restore(tmp_path, 1, abstract)
  jax.tree.map(np.testing.assert_array_equal, found, values)
  assert found_state == {"step": 1}


class LateResponse:
  """What Orbax returns, for which nobody may wait too early."""

  def __init__(self, response, may_wait):
    self.response, self.may_wait = response, may_wait

  def result(self):
    assert self.may_wait.is_set()
    return self.response.result()


def test_nobody_waits_for_arrays_in_host_memory_and_they_may_change(
  tmp_path, monkeypatch
):
  devices = np.array(jax.devices()[:2])
  mesh = jax.sharding.Mesh(devices, ("x",))
  on_device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  values = np.arange(64 * 1024, dtype=np.float32)
  state = {
    "moments": jax.device_put(
      values.copy(), on_device.with_memory_kind("pinned_host")
    ),
    "weights": jax.device_put(values, on_device),
  }
  jax.block_until_ready(state)
  save_async, may_wait = pytree_files.ocp.save_async, threading.Event()
  monkeypatch.setattr(
    pytree_files.ocp,
    "save_async",
    lambda *arguments: LateResponse(save_async(*arguments), may_wait),
  )
  finish = checkpoint.begin(tmp_path, 1, state, {}, [])
  for shard in state["moments"].addressable_shards:  # as an update would
    ctypes.memset(shard.data.unsafe_buffer_pointer(), 0, shard.data.nbytes)
  may_wait.set()
  finish()
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )
  found, _, _ = checkpoint.restore(tmp_path, 1, abstract)
  for name, array in found.items():
    np.testing.assert_array_equal(array, values)
    assert array.sharding.memory_kind == state[name].sharding.memory_kind


def test_a_full_disk_in_the_background_leaves_the_one_before(tmp_path):
  save(tmp_path, 4)
  finish = checkpoint.begin(tmp_path, 8, STATE, {"x": "x" * 50_000}, [])
  with disks.files_of_at_most(20_000):
    with pytest.raises(disk.StorageError, match=f"{tmp_path}/8.*make room"):
      finish()
  assert [path.name for path in tmp_path.iterdir()] == ["4"]
  save(tmp_path, 9)
  assert checkpoint.latest(tmp_path) == 9


# Orbax leaves a coroutine behind whose event loop is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_that_orbax_meets_leaves_the_one_before(tmp_path):
  save(tmp_path, 4)
  rng = np.random.default_rng(0)
  state = {"w": jnp.asarray(rng.normal(size=50_000).astype(np.float32))}
  with disks.files_of_at_most(20_000):
    finish = checkpoint.begin(tmp_path, 8, state, {}, [])
    with pytest.raises(disk.StorageError, match=f"{tmp_path}/8.*make room"):
      finish()
  gc.collect()
  assert [path.name for path in tmp_path.iterdir()] == ["4"]


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_directory_that_vanishes_is_a_failure_and_is_made_again(
  tmp_path, is_made_again
):
  directory = tmp_path / "checkpoints"
  save(directory, 4)
  finish = checkpoint.begin(directory, 8, STATE, {}, [])
  arrays = directory / "8.incomplete" / "train_state"
  waiting.until(arrays.is_dir)
  directory.rename(tmp_path / "elsewhere")
  directory.mkdir() if is_made_again else directory.touch()
  with pytest.raises(disk.StorageError, match="checkpoints/8"):
    finish()
  directory.rename(tmp_path / "empty")
  save(directory, 9)
  assert checkpoint.latest(directory) == 9


def test_a_file_that_orbax_misses_is_a_failure_of_the_disk(
  tmp_path, monkeypatch
):
  def wait():
    raise ValueError("No ArrayMetadata found")

  monkeypatch.setattr(checkpoint, "begin_arrays", lambda path, state: wait)
  finish = checkpoint.begin(tmp_path, 8, STATE, {}, [])
  with pytest.raises(disk.StorageError, match="8.*No such file"):
    finish()
  assert not list(tmp_path.iterdir())


def test_names_reach_the_disk_before_and_after_the_rename(
  tmp_path, monkeypatch
):
  synced, fsync = [], os.fsync

  def record(descriptor):
    synced.append(pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync(descriptor)

  monkeypatch.setattr(os, "fsync", record)
  directory = tmp_path / "checkpoints"
  save(directory, 5)
  incomplete = directory / "5.incomplete"
  of_files = [
    incomplete / path.relative_to(directory / "5")
    for path in (directory / "5").rglob("*")
  ]
  assert {tmp_path, directory, incomplete} < {*synced}
  sealed = {str(path).removesuffix(".incomplete") for path in synced}
  assert {str(path) for path in of_files} <= sealed
  assert synced.index(incomplete) < len(synced) - 1
  assert synced[-1] == directory


def in_another_process(directory):
  """Write step 2, and stand still in the middle of the background write."""
  seal = manifest.write

  def stand_still(path, about, **rest):
    print("writing", flush=True)
    threading.Event().wait(TIMEOUT_S)
    seal(path, about, **rest)

  save(directory, 1)
  manifest.write = stand_still
  checkpoint.begin(directory, 2, STATE, {"step": 2}, [])()


def test_a_process_killed_while_it_writes_leaves_the_one_before(tmp_path):
  process = subprocess.Popen(
    [sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE
  )
  try:
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)
    process.stdout.close()
  assert (tmp_path / "2.incomplete" / "train_state").exists()
  assert newest(tmp_path) == ((1, {"step": 1}, ()), [])
  save(tmp_path, 2, keep=1)
  assert [path.name for path in tmp_path.iterdir()] == ["2"]
  assert json.loads((tmp_path / "2" / "host_state.json").read_text()) == {
    "step": 2
  }


if __name__ == "__main__":
  in_another_process(pathlib.Path(sys.argv[1]))
