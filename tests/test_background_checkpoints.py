"""Whole runs that train on while checkpoints are written, or cannot be."""

import contextlib
import errno
import itertools
import threading

import disks
import pytest
import reward_scorers
import test_run

from jaxrl_async.config import sections
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.run import checkpointing
from jaxrl_async.run import loop as loop_lib
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import run_evaluations
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.training import trainer as trainer_lib
from jaxrl_async.weights import weight_transfer

pytestmark = pytest.mark.slow

BOOKS = ("ledger.jsonl", "metrics.jsonl", "timing.jsonl")


def make_config(num_steps, **run):
  return test_run.make_config(
    num_steps=num_steps, eval={"num_items": 4}, run=run
  )


def is_of_a_checkpoint(path):
  return path.name.endswith(".incomplete")


def num_lines(workdir):
  path = workdir / "metrics.jsonl"
  return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.nightly
def test_a_run_trains_while_one_is_written_and_when_the_disk_is_full(
  tmp_path, monkeypatch, capsys
):
  seal, seen = manifest.write, []
  monkeypatch.setattr(checkpointing, "FIRST_WAIT_S", 0.0)
  is_full = threading.Event()
  refused = set()  # the first two steps after step 2

  def write(path, about, **rest):
    if is_of_a_checkpoint(path):
      step = int(path.stem)
      if step == 2:
        # Returns only when the run has trained three steps more.
        before = num_lines(tmp_path)
        test_run.until(lambda: num_lines(tmp_path) >= before + 3)
        seen.append(num_lines(tmp_path) - before)
      if step > 2 and len(refused) < 2:
        refused.add(step)
      if step in refused or is_full.is_set():
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


def test_a_full_disk_ends_no_run_and_costs_no_line(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(checkpointing, "FIRST_WAIT_S", 0.0)
  record = recorder_lib.Recorder._step
  full, num_bytes = contextlib.ExitStack(), []

  def recorded(self, pending, *rest):
    if pending.step == 2:
      # Later ones fail because the ledger does, before Orbax begins.
      written = tmp_path / "checkpoints" / "2" / manifest.NAME
      assert test_run.until(written.exists)
      full.enter_context(disks.files_of_at_most(100))
    if pending.step in (2, 6):
      sizes = [(tmp_path / name).stat().st_size for name in BOOKS]
      num_bytes.append(sizes)
    if pending.step == 6:
      full.close()
    record(self, pending, *rest)

  monkeypatch.setattr(recorder_lib.Recorder, "_step", recorded)
  config = make_config(8, checkpoint_every=2)
  config.transfer.channel = sections.Channel.DIRECT
  with full:
    summary = test_run.start(config, tmp_path)
  before, after = num_bytes
  assert before == after and all(before)  # all of them were refused
  assert summary["train_steps"] == 8
  entries = test_run.check_ledger(tmp_path, summary)
  assert sorted({entry["step"] for entry in entries}) == [*range(8)]
  metrics = test_run.lines(tmp_path, "metrics")
  assert [line["step"] for line in metrics] == [*range(9)]
  schedule = recorded_timing.read(tmp_path)
  assert schedule.num_steps == 8
  assert checkpoint.latest(tmp_path / "checkpoints") == 8
  said = capsys.readouterr().err
  for name in BOOKS:
    assert f"WARNING: {tmp_path / name} cannot be written" in said
    assert f"{tmp_path / name} is written again, and lacks nothing" in said


def test_what_fails_at_a_stop_costs_no_step(tmp_path, monkeypatch):
  train = loop_lib.Loop._train

  def stopping(self):
    done = train(self)
    if self.step == 3:
      self.stop.set()
    return done

  def fails(self):
    if not self.session.stop.is_set:
      return
    raise answers_lib.EvaluationError("no answer could be scored")

  monkeypatch.setattr(loop_lib.Loop, "_train", stopping)
  monkeypatch.setattr(run_evaluations.RunEvaluations, "look", fails)
  with pytest.raises(answers_lib.EvaluationError):
    test_run.start(make_config(9, checkpoint_every=100), tmp_path)
  assert checkpoint.latest(tmp_path / "checkpoints") == 3


@pytest.mark.nightly
def test_what_can_be_saved_is_saved_before_a_failure_ends_the_run(
  tmp_path, monkeypatch, capsys
):
  directory = tmp_path / "checkpoints"
  prepare = trainer_lib.Trainer.prepare

  def failing_at(bad_step, error):
    steps = itertools.count()

    def prepared(self, groups):
      if next(steps) == bad_step:
        raise error
      return prepare(self, groups)

    return prepared

  # The second one says in one line what is wrong with the data.
  for bad_step, error, raised, match in (
    (3, RuntimeError("broken"), supervisor_lib.ThreadFailed, "batch loader"),
    (5, sections.ConfigError("none left"), sections.ConfigError, "none left"),
  ):
    with monkeypatch.context() as patched:
      patched.setattr(
        trainer_lib.Trainer, "prepare", failing_at(bad_step, error)
      )
      with pytest.raises(raised, match=match):
        test_run.start(make_config(9, checkpoint_every=100), tmp_path)
    assert checkpoint.latest(directory) == bad_step, capsys.readouterr().err

  # Rewards that hang: nothing moves any more.
  config = make_config(9, checkpoint_every=100, stall_timeout_s=3.0)
  config.task.reward_timeout_s = 100.0
  with pytest.raises(supervisor_lib.StallError):
    test_run.start(config, tmp_path, scorer=reward_scorers.hangs_in_training)
  stalled = checkpoint.latest(directory)
  assert stalled is not None and stalled >= 5
  said = capsys.readouterr().err
  assert "could be taken" not in said
  assert (directory / "5").stat().st_mtime_ns > 0

  # A version that cannot be published, of a step that was trained.
  publish = weight_transfer.OrbaxChannel.publish

  def refuse(self, params, version):
    if version == stalled + 2:
      raise weight_transfer.WeightTransferError("refused")
    return publish(self, params, version)

  with monkeypatch.context() as patched:
    patched.setattr(weight_transfer.OrbaxChannel, "publish", refuse)
    config = make_config(stalled + 9, checkpoint_every=100)
    with pytest.raises(weight_transfer.WeightTransferError):
      test_run.start(config, tmp_path)
  trained = checkpoint.latest(directory)
  assert trained == stalled + 2, capsys.readouterr().err
  metrics = test_run.lines(tmp_path, "metrics")
  assert [line["step"] for line in metrics] == [*range(trained + 1)]

  # A rollout thread that hangs in a call of the engine, in the middle of its
  # trajectories. What it has reported is saved.
  step, may_go_on = scheduler_lib.Scheduler.step, threading.Event()

  def hang(self):
    is_rollout = threading.current_thread().name == rollout_thread.NAME
    if is_rollout and num_lines(tmp_path) > trained + 3:
      may_go_on.wait(100)
    return step(self)

  with monkeypatch.context() as patched:
    patched.setattr(scheduler_lib.Scheduler, "step", hang)
    config = make_config(
      trained + 90,
      checkpoint_every=100,
      stall_timeout_s=3.0,
      join_timeout_s=2.0,
    )
    with pytest.raises(supervisor_lib.StallError):
      test_run.start(config, tmp_path)
    may_go_on.set()
  hung = checkpoint.latest(directory)
  said = capsys.readouterr().err
  assert hung is not None and hung >= trained + 3, said
  assert "could be taken" not in said
  metrics = test_run.lines(tmp_path, "metrics")
  assert [line["step"] for line in metrics] == [*range(hung + 1)]
  assert test_run.until(
    lambda: rollout_thread.NAME not in {t.name for t in threading.enumerate()}
  )

  # A rollout thread that has failed.
  config = make_config(
    hung + 9, checkpoint_every=100, stall_timeout_s=60.0, join_timeout_s=20.0
  )
  config.task.max_failed_groups, config.task.reward_retries = 3, 0
  with pytest.raises(supervisor_lib.ThreadFailed, match="3 groups in a row"):
    test_run.start(config, tmp_path, scorer=reward_scorers.raises_in_training)
  failed = checkpoint.latest(directory)
  assert failed is not None and failed >= hung

  summary = test_run.start(make_config(failed + 3), tmp_path)
  assert summary["train_steps"] == failed + 3
  test_run.check_ledger(tmp_path, summary)
