"""An engine that fails or hangs in the process of the run ends that process."""

import json
import os
import subprocess
import sys

import jax
import pytest
import test_run
import tiny
import worker_world

from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import row_check
from jaxrl_async.processes import supervisor as supervisor_lib

TIMEOUT_S = 300.0
# launch/train.py, whose engine gets stuck or fails once it has made some calls.
FAULTY = """
import pathlib
import sys
import threading

import jax
import staged_train

from jaxrl_async.engine import engine

how, arguments = sys.argv[1], sys.argv[2:]
generate, num_calls = engine.Engine.generate, 0


def faulty(self, *given, **more):
  global num_calls
  is_rollout = threading.current_thread().name == "rollout worker"
  num_calls += is_rollout
  result = generate(self, *given, **more)
  if is_rollout and num_calls > 25 and how == "hangs":
    threading.Event().wait(1000)
  if is_rollout and num_calls > 25 and how == "fails":
    raise jax.errors.JaxRuntimeError("INTERNAL: it is broken")
  return result


engine.Engine.generate = faulty
staged_train.run(arguments)
"""


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


def failing(monkeypatch, cls, name, call, text="INTERNAL: it is broken"):
  """A method raises at this call, after it has done its work."""
  real, count = getattr(cls, name), iter(range(10**9))

  def fails(self, *arguments, **settings):
    result = real(self, *arguments, **settings)
    if next(count) == call:
      raise jax.errors.JaxRuntimeError(text)
    return result

  monkeypatch.setattr(cls, name, fails)


@pytest.mark.parametrize(
  ("cls", "name", "call"),
  [
    (engine_lib.Engine, "generate", 2),
    (engine_lib.Engine, "insert", 2),
    (engine_lib.Engine, "read", 2),
    (tiny.SteppedScheduler, "adopt", 0),
  ],
)
def test_a_failed_engine_leaves_what_was_reported(
  make_world, monkeypatch, cls, name, call
):
  world = make_world()
  with monkeypatch.context() as patched:
    failing(patched, cls, name, call)
    with pytest.raises(supervisor_lib.EngineFailed, match="INTERNAL: it is"):
      world.run_until(worker_world.finished(3))
  said = list(world.link.said)

  def touched(*_):
    raise AssertionError("a failed engine was used")

  for method in ("generate", "insert", "read", "release"):
    monkeypatch.setattr(engine_lib.Engine, method, touched)
  with world.worker.paused(0.0):
    world.worker.cut(0)
    groups = world.worker.groups()
  assert world.link.said == said
  written = sum(g.num_completion_tokens for g in groups.values())
  state = world.buffer.state()
  written += sum(g.num_completion_tokens for g in state.finished)
  assert written == world.worker.generated_tokens


def test_an_engine_without_enough_memory_says_so(make_world, monkeypatch):
  world = make_world()
  text = "RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes."
  failing(monkeypatch, engine_lib.Engine, "generate", 2, text)
  with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
    world.run_until(worker_world.finished(3))


def test_rows_are_compared(monkeypatch):
  sizes, model = tiny.SIZES, tiny.MODEL
  assert not row_check.depends_on_row(model, sizes, "float32", num_parts=1)

  class Product:
    def __init__(self, function):
      self.function = function

    def __call__(self, rows, matrix):
      result = self.function(rows, matrix)
      return result.at[-1, -1].multiply(1 + 2**-22)

  monkeypatch.setattr(row_check.jax, "jit", Product)
  assert row_check.depends_on_row(model, sizes, "float32", num_parts=1)


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize(
  ("how", "line"),
  [
    ("hangs", "error: nothing moved for 10 s (run.stall_timeout_s): training"),
    pytest.param(
      *("fails", "error: the engine failed (JaxRuntimeError: INTERNAL: it is"),
      marks=pytest.mark.nightly,
    ),
  ],
)
def test_the_same_command_continues_what_a_faulty_engine_ended(
  tmp_path, how, line
):
  import test_replay

  script, workdir = tmp_path / "faulty.py", tmp_path / "run"
  script.write_text(FAULTY)

  def start(what):
    return subprocess.run(
      [
        *(sys.executable, str(script), what),
        f"--config={test_run.ROOT / 'configs' / 'tiny.py'}",
        f"--workdir={workdir}",
        *("--config.warm_start.num_steps=0", "--config.train.num_steps=8"),
        *("--config.run.exact_resume", "--config.run.checkpoint_every=100"),
        *(
          "--config.run.stall_timeout_s=10",
          "--config.transfer.channel=direct",
        ),
        f"--compile_cache={jax.config.jax_compilation_cache_dir}",
      ],
      env=os.environ | {"PYTHONPATH": str(test_run.ROOT / "benchmarks")},
      capture_output=True,
      text=True,
      timeout=TIMEOUT_S,
    )

  ended = start(what=how)
  assert ended.returncode == supervisor_lib.START_AGAIN, ended.stderr
  last = ended.stderr.splitlines()[-1]
  assert last.startswith(line), ended.stderr
  steps = [int(path.name) for path in (workdir / "checkpoints").iterdir()]
  assert 0 < max(steps) < 8, ended.stderr
  finished = start(what="works")
  assert finished.returncode == 0, finished.stderr
  summary = json.loads(finished.stdout)
  assert summary["train_steps"] == 8
  test_run.check_ledger(workdir, summary)
  found = test_replay.play(workdir)
  assert found.last_step == 8 and found.record()["state_bit_exact"]
