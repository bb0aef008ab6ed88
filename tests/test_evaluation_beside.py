"""Whole runs whose evaluations go on beside training, and are stopped."""

from concurrent import futures
import shutil
import threading
import time
from unittest import mock

import numpy as np
import pytest
import test_run

from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.run import rollout_thread
from jaxrl_async.run import run_evaluations

DEADLINE_S = 100.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def make_config(**evaluation):
  config = test_run.make_config(
    "sync",
    num_steps=5,
    eval={"num_items": 6, "every": 2, "samples": 2} | evaluation,
    rollout={"decode_steps_per_call": 1},
    run={"checkpoint_every": 1, "keep_checkpoints": 9},
  )
  config.train.optimizer.learning_rate = 1e-2
  return config


def evaluations(workdir):
  """What was measured of each step that was evaluated."""
  return {
    line["step"]: found
    for line in test_run.lines(workdir, "metrics")
    if (
      found := {
        k: v
        for k, v in line.items()
        if k.startswith("eval/") and k != "eval/mismatch_kl"
      }
    )
  }


def check_same(workdir, expected):
  """Whether a run went as another one did."""
  steps = [line["step"] for line in test_run.lines(workdir, "metrics")]
  assert steps == [*range(6)]
  np.testing.assert_allclose(
    test_run.losses(workdir), test_run.losses(expected), rtol=1e-5
  )


class Watch:
  """Keeps the answers of each evaluation of the runs that are started."""

  def __init__(self, patched):
    self.answers = {}
    record = run_evaluations.RunEvaluations._recorded

    def recorded(this, step, result):
      self.answers[step] = [
        (
          t.tokens.tobytes(),
          t.behavior_logprobs.tobytes(),
          set(t.policy_versions[t.loss_mask].tolist()),
        )
        for t in result.sampled.trajectories
      ]
      return record(this, step, result)

    patched.setattr(run_evaluations.RunEvaluations, "_recorded", recorded)


@pytest.fixture(scope="module")
def in_pauses(tmp_path_factory):
  """A run whose evaluations all pause it: its workdir and their answers."""
  workdir = tmp_path_factory.mktemp("in_pauses")
  with pytest.MonkeyPatch.context() as patched:
    watch = Watch(patched)
    test_run.start(make_config(beside=False), workdir)
  assert watch.answers.keys() == {0, 2, 4, 5}
  return workdir, watch.answers


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
  """A run that trains step 3 before any question of step 2 is answered.

  Returns: its workdir, its answers, and copies of it by checkpoint.
  """
  directory = tmp_path_factory.mktemp("beside")
  copies = {}
  evaluate = run_evaluations.RunEvaluations._evaluated

  def evaluate_late(self, write, **settings):
    if threading.current_thread().name == "evaluation" and not copies:
      workdir = self._sampler._files._directory.parent
      saved = workdir / "checkpoints" / "3" / "manifest.json"
      assert test_run.until(saved.exists, timeout_s=DEADLINE_S)
      # Step 4 waits for this evaluation before it writes anything.
      for step in (2, 3):
        copies[step] = directory / f"after_{step}"
        shutil.copytree(workdir, copies[step])
      shutil.rmtree(copies[2] / "checkpoints" / "3")
    return evaluate(self, write, **settings)

  with pytest.MonkeyPatch.context() as patched:
    watch = Watch(patched)
    patched.setattr(run_evaluations.RunEvaluations, "_evaluated", evaluate_late)
    test_run.start(make_config(), directory / "run")
  return directory / "run", watch.answers, copies


def test_answers_beside_training_have_the_bits_of_those_in_a_pause(
  in_pauses, beside
):
  assert beside[1] == in_pauses[1]
  for step, answers in beside[1].items():
    assert all(versions == {step} for _, _, versions in answers)
  assert len({tuple(map(str, answers)) for answers in beside[1].values()}) == 4
  assert evaluations(beside[0]) == evaluations(in_pauses[0])
  check_same(beside[0], in_pauses[0])
  # Lines of later steps waited for the one that was being evaluated.
  before = test_run.lines(beside[2][3], "metrics")
  assert [line["step"] for line in before] == [0, 1]


@pytest.mark.nightly
def test_only_a_checkpoint_of_the_step_itself_evaluates_it_again(
  in_pauses, beside, capfd
):
  expected = evaluations(in_pauses[0])
  test_run.start(make_config(), beside[2][2])
  assert evaluations(beside[2][2]) == expected
  check_same(beside[2][2], in_pauses[0])
  assert "has no evaluation" not in capfd.readouterr().err
  test_run.start(make_config(), beside[2][3])
  assert "step 2 has no evaluation: the checkpoint is of step 3" in (
    capfd.readouterr().err
  )
  del expected[2]
  assert evaluations(beside[2][3]) == expected
  check_same(beside[2][3], in_pauses[0])


def test_nobody_waits_for_ever_for_an_evaluation():
  this = object.__new__(run_evaluations.RunEvaluations)
  this._num_answers = 0
  this._stop = supervisor_lib.StopRequest()
  this._supervisor = this._publisher = mock.Mock()
  rollout = mock.Mock(**{"moving.return_value": 3, "status.return_value": "R"})
  this._thread = object.__new__(rollout_thread.RolloutThread)
  this._thread._rollout, this._thread.stall_timeout_s = rollout, 1.0
  this._thread._seconds = time.monotonic
  buffer = mock.Mock(**{"waiting.return_value": ["B"]})
  this._rollout, this._buffer = rollout, buffer
  this._now = run_evaluations._Beside(
    step=4, held=mock.Mock(), result=futures.Future()
  )
  start_s, looks = time.monotonic(), []

  def catch_up(**_):
    looks.append(1)
    this._num_answers += len(looks) < 15  # three seconds of answers

  this._publisher.catch_up = catch_up
  with pytest.raises(supervisor_lib.StallError) as raised:
    this.finish(5, is_awaited=True)
  assert 3.0 < time.monotonic() - start_s < 20.0
  said = str(raised.value)
  assert said.startswith("nothing moved for 1 s (run.stall_timeout_s): ")
  assert "training waits for the evaluation of step 4 since" in said
  assert said.endswith("; R; B")


@pytest.mark.nightly
def test_a_stop_ends_an_evaluation_at_once(in_pauses, tmp_path, monkeypatch):
  """At the start, beside training and at the end; then the run goes on."""
  expected = evaluations(in_pauses[0])
  in_a_pause = run_evaluations.RunEvaluations.in_a_pause
  evaluate = run_evaluations.RunEvaluations._evaluated
  num_steps = []

  def stop_in_a_pause(self, step):
    if step in (0, 5):
      write = self._rollout.answers

      def answers(*arguments, **more):
        for written in write(*arguments, **more):
          self._stop.set()
          num_steps.append(1)
          yield written

      monkeypatch.setattr(self._rollout, "answers", answers)
    return in_a_pause(self, step)

  def stop_beside(self, write, **settings):
    if threading.current_thread().name == "evaluation":
      self._stop.set()
      while True:  # until it is told that the version is released
        evaluate(self, write, **settings)
    return evaluate(self, write, **settings)

  def stopped(name, function):
    with monkeypatch.context() as patched:
      patched.setattr(run_evaluations.RunEvaluations, name, function)
      with pytest.raises(supervisor_lib.Interrupted, match="the same command"):
        test_run.start(make_config(), tmp_path)

  stopped("in_a_pause", stop_in_a_pause)
  assert len(num_steps) == 1
  assert not (tmp_path / "metrics.jsonl").exists()
  stopped("_evaluated", stop_beside)
  # Step 2 is held, or step 3 was trained too.
  steps = [line["step"] for line in test_run.lines(tmp_path, "metrics")]
  assert steps in ([0, 1], [0, 1, 2, 3])
  stopped("in_a_pause", stop_in_a_pause)
  assert len(num_steps) == 2
  assert test_run.lines(tmp_path, "metrics")[-1]["step"] == 4
  test_run.start(make_config(), tmp_path)
  check_same(tmp_path, in_pauses[0])
  if len(steps) == 4:
    del expected[2]
  assert evaluations(tmp_path) == expected
