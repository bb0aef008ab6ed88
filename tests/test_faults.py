"""Whole runs whose disk, rewards or terminal fail."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import metrics_page
import pytest
import reward_scorers
import surviving_books
import test_run

from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.weights import transfer_directory

DEADLINE_S = 150.0


@pytest.mark.slow
@pytest.mark.nightly
def test_an_evaluation_that_fails_costs_no_step_and_no_line(tmp_path):
  workdir = tmp_path / "run"

  def start(num_steps, scorer):
    config = test_run.make_config(num_steps=num_steps, eval={"num_items": 4})
    return test_run.start(config, workdir, scorer=scorer)

  def refuse(num_steps, checkpoints, num_lines):
    with pytest.raises(answers_lib.EvaluationError, match="no reward in an"):
      start(num_steps, reward_scorers.raises_in_evaluation)
    found = {int(path.name) for path in (workdir / "checkpoints").iterdir()}
    assert max(found) == checkpoints
    metrics = workdir / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    assert text.count("\n") == num_lines

  refuse(num_steps=1, checkpoints=0, num_lines=0)
  start(1, reward_scorers.length)
  refuse(num_steps=3, checkpoints=3, num_lines=5)
  summary = start(3, reward_scorers.length)
  assert summary["train_steps"] == 3
  lines = test_run.lines(workdir, "metrics")
  assert [line["step"] for line in lines] == [0, 1, 2, 3]
  assert [line.get("eval/held_out/failed") for line in lines] == [0, 0, None, 0]
  assert not metrics_page.unwritten(lines[3].keys())
  test_run.check_ledger(workdir, summary)


# Of all processes of a run: the time of day jumps by up to a day every second,
# forwards and backwards.
JUMPING_CLOCK = """
import random
import time

_time, _time_ns = time.time, time.time_ns


def _jump_s():
  return random.Random(int(_time())).randint(-86_400, 86_400)


time.time = lambda: _time() + _jump_s()
time.time_ns = lambda: _time_ns() + 10**9 * _jump_s()
print("the clock jumps")
"""


# launch/train.py, whose second checkpoint is not written to its end.
HELD_UP = """
import sys
import threading

import staged_train

from jaxrl_async.storage import manifest
from jaxrl_async.evaluation import answers as answers_lib

write = manifest.write


def held_up(directory, about, **more):
  if directory.name.endswith(".incomplete") and int(directory.stem) > 2:
    threading.Event().wait(1000)
  write(directory, about, **more)


manifest.write = held_up
staged_train.run(sys.argv[1:])
"""


def launch(workdir, output, *arguments, environment=None, script=None):
  """launch/train.py, or another script, in a process group of its own."""
  return subprocess.Popen(
    [
      sys.executable,
      str(script or test_run.ROOT / "launch" / "train.py"),
      f"--config={test_run.ROOT / 'configs' / 'tiny.py'}",
      f"--workdir={workdir}",
      "--config.warm_start.num_steps=0",
      "--config.eval.num_items=4",
      "--config.train.num_steps=5000",
      f"--compile_cache={jax.config.jax_compilation_cache_dir}",
      *arguments,
    ],
    start_new_session=True,
    stderr=output,
    stdout=output,
    env=os.environ | (environment or {}),
  )


def end(process):
  """Its exit code, once it has ended by itself."""
  try:
    return process.wait(DEADLINE_S)
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait(DEADLINE_S)


def members(group):
  """Processes of a group that have not ended."""
  found = []
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
      state, _, parent_group = path.read_text().rpartition(") ")[2].split()[:3]
    except (FileNotFoundError, ProcessLookupError):
      continue
    if int(parent_group) == group and state != "Z":
      found.append(path.parent.name)
  return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_signals_end_a_run_at_once_and_leave_nothing(tmp_path):
  workdir = tmp_path / "run"
  workdir.mkdir()
  (workdir / "tensorboard").touch()  # in the way of a directory
  shown = tmp_path / "shown"
  with open(shown, "w") as output:
    process = launch(
      workdir,
      output,
      "--config.run.checkpoint_every=1000",
      "--config.transfer.channel=orbax",
    )
  has_ended = lambda: process.poll() is not None  # noqa: E731
  try:
    assert test_run.until_lines(workdir / "metrics.jsonl", 3, has_ended)
    used, _ = transfer_directory.defaults(workdir)
    assert used.exists()
    os.killpg(process.pid, signal.SIGINT)  # to all of them, as Ctrl-C is
    assert test_run.until(
      lambda: "SIGINT: finishing the step" in shown.read_text(), has_ended
    )
    os.killpg(process.pid, signal.SIGINT)
  finally:
    code = end(process)
  assert code == 128 + signal.SIGINT
  text = shown.read_text()
  # Python may say after it that it has removed the locks of processes.
  assert "\nSIGINT: ended at once" in text, text
  assert "Traceback" not in text
  assert text.count("WARNING: TensorBoard could not be written") == 1
  assert test_run.until(lambda: not members(process.pid))
  assert test_run.until(lambda: not used.exists())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_stands_still_under_a_jumping_clock_loses_only_time(
  tmp_path,
):
  workdir, shown = tmp_path / "run", tmp_path / "shown"
  (tmp_path / "sitecustomize.py").write_text(JUMPING_CLOCK)
  with open(shown, "w") as output:
    process = launch(
      workdir,
      output,
      "--config.train.num_steps=40",
      "--config.run.stall_timeout_s=3",
      "--config.rollout.max_group_seconds=3",
      "--config.task.reward_timeout_s=2",
      environment={"PYTHONPATH": str(tmp_path)},
    )
  has_ended = lambda: process.poll() is not None  # noqa: E731
  stopped_s = 0.0
  try:
    for num_lines in (4, 12):
      assert test_run.until_lines(
        workdir / "metrics.jsonl", num_lines, has_ended
      )
      os.kill(process.pid, signal.SIGSTOP)
      # What the process is to sleep through: both deadlines and more.
      time.sleep(6.0)
      stopped_s += 6.0
      os.kill(process.pid, signal.SIGCONT)
  finally:
    process.send_signal(signal.SIGCONT)
    code = end(process)
  assert code == 0, shown.read_text()
  assert "the clock jumps" in shown.read_text()
  summary = json.loads((workdir / "summary.json").read_text())
  entries = test_run.check_ledger(workdir, summary)
  assert {entry["fate"] for entry in entries} == {"trained"}
  assert len(entries) == 40 * 4
  metrics = test_run.lines(workdir, "metrics")
  assert [line["step"] for line in metrics] == list(range(41))
  assert sum(line.get("time/step_s", 0.0) for line in metrics) > stopped_s


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_preempted_run_whose_checkpoint_does_not_fit_rolls_back(tmp_path):
  workdir, shown = tmp_path / "run", tmp_path / "shown"
  script = tmp_path / "held_up.py"
  script.write_text(HELD_UP)
  with open(shown, "w") as output:
    process = launch(
      workdir,
      output,
      "--config.run.checkpoint_every=2",
      "--config.run.preemption_grace_s=2",
      environment={"PYTHONPATH": str(test_run.ROOT / "benchmarks")},
      script=script,
    )
  has_ended = lambda: process.poll() is not None  # noqa: E731
  directory = workdir / "checkpoints"
  held_up = "*.incomplete/host_state.json"
  try:
    assert test_run.until(
      lambda: (directory / "2").exists() and [*directory.glob(held_up)],
      has_ended,
    ), shown.read_text()
    assert test_run.until_lines(workdir / "metrics.jsonl", 12, has_ended)
    process.send_signal(signal.SIGTERM)
    assert test_run.until(
      lambda: "SIGTERM: finishing the step" in shown.read_text(), has_ended
    )
    time.sleep(2.0)  # the seconds that it was given
    names = sorted(path.name for path in directory.iterdir())
    assert process.poll() is None
  finally:
    process.kill()  # as the machine ends
    end(process)
  # Nothing was begun behind it.
  assert names[:2] == ["0", "2"] and len(names) == 3, names
  assert surviving_books.read(workdir).are_whole
  with open(shown, "w") as output:
    resumed = launch(workdir, output, "--config.train.num_steps=4")
  assert end(resumed) == 0, shown.read_text()
  assert "from step 2" in shown.read_text()
  summary = json.loads((workdir / "summary.json").read_text())
  test_run.check_ledger(workdir, summary)
  assert surviving_books.read(workdir).are_whole
  metrics = test_run.lines(workdir, "metrics")
  assert [line["step"] for line in metrics] == [*range(5)]
