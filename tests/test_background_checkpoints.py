"""Whole runs that train on while checkpoints are written, or cannot be."""

import errno
import threading

import pytest
import reward_scorers
import test_run

from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.run import checkpointing
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.training import trainer as trainer_lib

pytestmark = pytest.mark.slow


def make_config(num_steps, **run):
  return test_run.make_config(
    num_steps=num_steps, eval={"num_items": 4}, run=run
  )


def is_of_a_checkpoint(path):
  return path.name.endswith(".incomplete")


def num_lines(workdir):
  path = workdir / "metrics.jsonl"
  return path.read_text().count("\n") if path.exists() else 0


def test_a_run_trains_while_one_is_written_and_when_the_disk_is_full(
  tmp_path, monkeypatch, capsys
):
  seal, seen = manifest.write, []
  monkeypatch.setattr(checkpointing, "FIRST_WAIT_S", 0.0)
  is_full = threading.Event()

  def write(path, about, **rest):
    if is_of_a_checkpoint(path):
      step = int(path.stem)
      if step == 2:
        # Returns only when the run has trained three steps more.
        before = num_lines(tmp_path)
        test_run.until(lambda: num_lines(tmp_path) >= before + 3)
        seen.append(num_lines(tmp_path) - before)
      if step in (6, 7) or is_full.is_set():
        raise OSError(errno.ENOSPC, "No space left on device")
    seal(path, about, **rest)

  monkeypatch.setattr(manifest, "write", write)
  summary = test_run.start(make_config(12, checkpoint_every=2), tmp_path)
  assert summary["train_steps"] == 12 and seen[0] >= 3
  test_run.check_ledger(tmp_path, summary)
  *_, last = test_run.lines(tmp_path, "metrics")
  said = capsys.readouterr().err
  assert last["checkpoint/failures"] == said.count("could not be written") >= 1
  assert "waits until that of step 2 is written" in said
  assert said.count(" is written\n") >= 1
  assert last["checkpoint/write_s"] > 0
  assert checkpoint.latest(tmp_path / "checkpoints") == 12

  # No room at all: it ends after three attempts, and the last one is whole.
  is_full.set()
  config = make_config(
    100, checkpoint_every=2, max_checkpoint_failures=3, stall_timeout_s=60.0
  )
  with pytest.raises(disk.StorageError) as raised:
    test_run.start(config, tmp_path)
  message = str(raised.value)
  assert "attempt 3 in a row" in message and "\n" not in message
  found = [path.name for path in (tmp_path / "checkpoints").iterdir()]
  assert sorted(found, key=int)[-1] == "12"
  assert num_lines(tmp_path) > 13
  is_full.clear()
  summary = test_run.start(make_config(15, checkpoint_every=2), tmp_path)
  assert summary["train_steps"] == 15
  test_run.check_ledger(tmp_path, summary)


def test_what_can_be_saved_is_saved_before_a_failure_ends_the_run(
  tmp_path, monkeypatch, capsys
):
  directory = tmp_path / "checkpoints"
  prepare = trainer_lib.Trainer.prepare

  def fail(self, groups, step):
    if step == 3:
      raise RuntimeError("broken")
    return prepare(self, groups, step)

  with monkeypatch.context() as patched:
    patched.setattr(trainer_lib.Trainer, "prepare", fail)
    with pytest.raises(supervisor_lib.ThreadFailed, match="batch loader"):
      test_run.start(make_config(9, checkpoint_every=100), tmp_path)
  assert checkpoint.latest(directory) == 3, capsys.readouterr().err

  # Rewards that hang: nothing moves any more.
  config = make_config(9, checkpoint_every=100, stall_timeout_s=3.0)
  config.task.reward_timeout_s = 100.0
  with pytest.raises(supervisor_lib.StallError):
    test_run.start(config, tmp_path, scorer=reward_scorers.hangs_in_training)
  stalled = checkpoint.latest(directory)
  assert stalled is not None and stalled >= 3
  said = capsys.readouterr().err
  assert "could be taken" not in said
  assert (directory / "3").stat().st_mtime_ns > 0

  # A rollout thread that has failed.
  config = make_config(
    9, checkpoint_every=100, stall_timeout_s=60.0, join_timeout_s=20.0
  )
  config.task.max_failed_groups, config.task.reward_retries = 3, 0
  with pytest.raises(supervisor_lib.ThreadFailed, match="3 groups in a row"):
    test_run.start(config, tmp_path, scorer=reward_scorers.raises_in_training)
  failed = checkpoint.latest(directory)
  assert failed is not None and failed >= stalled

  summary = test_run.start(make_config(failed + 3), tmp_path)
  assert summary["train_steps"] == failed + 3
  test_run.check_ledger(tmp_path, summary)
