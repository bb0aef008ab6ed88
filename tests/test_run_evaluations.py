"""Whole runs that are evaluated: beside training, in pauses, and stopped."""

import queue
import shutil
import threading
import time
from unittest import mock

import numpy as np
import pytest
import test_run

from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import rollout_side
from jaxrl_async.run import checkpointing
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import run_evaluations
from jaxrl_async.run import session as session_lib
from jaxrl_async.weights import weight_transfer

DEADLINE_S = 100.0
DIRECT = {"channel": sections.Channel.DIRECT}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def make_config(variant="", **changes):
  config = test_run.make_config(
    variant,
    num_steps=5,
    **{
      "eval": {"num_items": 6, "every": 2, "samples": 2},
      "rollout": {"decode_steps_per_call": 1},
      "run": {"checkpoint_every": 1, "keep_checkpoints": 9},
    }
    | changes,
  )
  config.train.optimizer.learning_rate = 1e-2
  return config


def evaluations(workdir):
  """What was measured of each step that was evaluated."""
  return {
    line["step"]: found
    for line in test_run.lines(workdir, "metrics")
    if (found := {k: v for k, v in line.items() if k.startswith("eval/")})
  }


def versions(workdir):
  return {
    step: (found["eval/version_min"], found["eval/version_max"])
    for step, found in evaluations(workdir).items()
  }


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
  """A run that trains step 3 before any answer to step 2 is scored.

  Returns: its workdir, and copies of it by checkpoint.
  """
  directory = tmp_path_factory.mktemp("beside")
  copies = {}
  score = run_evaluations.RunEvaluations._score
  take = checkpointing.Checkpointing.take

  def score_late(self, now):
    if now.step == 2 and not copies:
      workdir = self.recorder.writer._workdir
      saved = workdir / "checkpoints" / "3" / "manifest.json"
      assert test_run.until(saved.exists, timeout_s=DEADLINE_S)
      # Step 4 waits for this evaluation before it is published.
      for step in (2, 3):
        copies[step] = directory / f"after_{step}"
        shutil.copytree(workdir, copies[step])
      shutil.rmtree(copies[2] / "checkpoints" / "3")
    score(self, now)

  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(run_evaluations.RunEvaluations, "_score", score_late)
    # A checkpoint that is due while another one is written is put off.
    patched.setattr(
      checkpointing.Checkpointing,
      "take",
      lambda self, step: take(self, step) or self._wait(),
    )
    test_run.start(make_config(), directory / "run")
  return directory / "run", copies


def test_training_goes_on_beside_an_evaluation(beside):
  found = versions(beside[0])
  assert found.keys() == {0, 2, 4, 5}
  assert found[0] == (0, 0) and found[5] == (5, 5)
  for step in (2, 4):
    assert step <= found[step][0] <= found[step][1] <= step + 2
  for name in ("held_out/avg@2", "held_out/pass@2", "held_out/failed"):
    assert all(f"eval/{name}" in x for x in evaluations(beside[0]).values())
  # Its line came after that of the step that was trained meanwhile.
  order = [
    (line["step"], "eval/held_out/failed" in line)
    for line in metrics_lib.lines(beside[0])
  ]
  assert order.index((2, True)) > order.index((3, False))


@pytest.mark.nightly
def test_only_a_checkpoint_of_the_step_itself_evaluates_it_again(beside, capfd):
  _, copies = beside
  test_run.start(make_config(), copies[2])
  assert versions(copies[2]).keys() == {0, 2, 4, 5}
  assert "has no evaluation" not in capfd.readouterr().err
  test_run.start(make_config(), copies[3])
  assert "step 2 has no evaluation" in (capfd.readouterr().err)
  assert versions(copies[3]).keys() == {0, 4, 5}
  for workdir in copies.values():
    lines = test_run.lines(workdir, "metrics")
    assert [line["step"] for line in lines] == [*range(6)]


@pytest.fixture(scope="module")
def in_pauses(tmp_path_factory):
  """A synchronous run: its workdir and its summary."""
  workdir = tmp_path_factory.mktemp("in_pauses")
  adopt = weight_transfer.DirectChannel.adopt

  def slow_adopt(self, newer_than):
    time.sleep(0.5)  # longer than a train step
    return adopt(self, newer_than)

  config = make_config("sync", transfer=DIRECT)
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(weight_transfer.DirectChannel, "adopt", slow_adopt)
    return workdir, test_run.start(config, workdir)


def test_an_evaluation_in_a_pause_has_the_weights_of_its_step(in_pauses):
  workdir, summary = in_pauses
  assert versions(workdir) == {step: (step, step) for step in (0, 2, 4, 5)}
  # Between the logprobs of the engine and those of the trainer.
  assert 0 <= summary["mismatch_kl_max"] < 1e-9


def test_nobody_waits_for_ever_for_an_evaluation():
  rollout = mock.Mock(
    spec=rollout_side.RolloutSide,
    **{"moving.return_value": 3, "status.return_value": "R"},
  )
  session = mock.Mock(
    spec=session_lib.Session,
    stop=supervisor_lib.StopRequest(),
    seconds=time.monotonic,
    shutdown=mock.Mock(),
  )
  thread = rollout_thread.RolloutThread(
    rollout=rollout, session=session, join_timeout_s=1.0, stall_timeout_s=1.0
  )
  this = object.__new__(run_evaluations.RunEvaluations)
  this.session = session
  this.thread, this.rollout = thread, rollout
  this.buffer = mock.Mock(**{"waiting.return_value": ["B"]})
  this.channel = mock.Mock(unreadable=5)
  this._now = run_evaluations._Now(
    step=4,
    begun_s=0.0,
    num_wanted=1,
    written=queue.SimpleQueue(),
    is_alone=False,
  )
  start_s = time.monotonic()
  answer = threading.Timer(0.6, lambda: this._now.answers.append(mock.Mock()))
  answer.start()
  with pytest.raises(supervisor_lib.StallError) as raised:
    this.finish()
  assert 1.4 < time.monotonic() - start_s < 20.0
  text = str(raised.value)
  assert "nothing moved for 1 s" in text and text.endswith("; R; B")
  assert "training waits for the evaluation of step 4 since" in text
  this._now.is_alone = True
  with pytest.raises(weight_transfer.UnreadableVersionError, match="version 4"):
    this.finish()


@pytest.mark.nightly
def test_a_stop_ends_an_evaluation_at_once(in_pauses, tmp_path, monkeypatch):
  """At the start, in the middle and at the end; then the run goes on."""
  score = run_evaluations.RunEvaluations._score
  stopped = []

  def stop_once(self, now):
    if now.step not in stopped:
      stopped.append(now.step)
      self.session.stop.set()
      while not now.is_dropped:
        time.sleep(0.01)
    score(self, now)

  monkeypatch.setattr(run_evaluations.RunEvaluations, "_score", stop_once)
  config = make_config("sync", transfer=DIRECT)
  for step in (0, 2, 4, 5):
    with pytest.raises(supervisor_lib.Interrupted, match="the same command"):
      test_run.start(config, tmp_path)
    assert stopped[-1] == step
  test_run.start(config, tmp_path)
  # A synchronous run goes on as one that was never stopped.
  assert evaluations(tmp_path) == evaluations(in_pauses[0])
  np.testing.assert_allclose(
    test_run.losses(tmp_path), test_run.losses(in_pauses[0]), rtol=1e-5
  )
