"""Several processes train like one, and end and begin again together."""

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import replayed_run
import test_assembly

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.processes import world as world_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import publishing
from jaxrl_async.training import train_state
from jaxrl_async.weights import weight_transfer

SCRIPT = pathlib.Path(replayed_run.__file__)
ENVIRONMENT = os.environ | {
  # Programs of followers are compiled anew in each process.
  "XLA_FLAGS": "--xla_backend_optimization_level=0",
  "JAX_PLATFORMS": "cpu",
  "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
}
DEADLINE_S = 120.0
NUM_STEPS = 6


def free_address():
  with socket.socket() as free:
    free.bind(("localhost", 0))
    return f"localhost:{free.getsockname()[1]}"


def command(workdir, rank, size, address, **more):
  named = {"workdir": workdir, **more}
  if size > 1:
    named |= {
      "num_processes": size,
      "process_id": rank,
      "coordinator_address": address,
    }
  flags = [f"--{name}={value}" for name, value in named.items()]
  return [sys.executable, str(SCRIPT), *flags]


class Started:
  """The processes of a run; a context manager that leaves none behind."""

  def __init__(self, workdir, size, suffix="", **more):
    workdir.mkdir(exist_ok=True)
    address = free_address()
    self.files = [
      [open(workdir / f"{name}-{rank}{suffix}", "a") for name in ("out", "err")]
      for rank in range(size)
    ]
    self.workdir, self.suffix = workdir, suffix
    self.processes = [
      subprocess.Popen(
        command(workdir, rank, size, address, **more),
        env=ENVIRONMENT,
        stdout=out,
        stderr=error,
      )
      for rank, (out, error) in enumerate(self.files)
    ]

  def __enter__(self):
    return self

  def __exit__(self, *_):
    for process in self.processes:
      process.kill()
      process.wait()
    for pair in self.files:
      for file in pair:
        file.close()

  def codes(self, timeout_s=DEADLINE_S):
    deadline = time.monotonic() + timeout_s
    return [
      process.wait(max(0.0, deadline - time.monotonic()))
      for process in self.processes
    ]

  def errors(self, rank):
    """What a process said, without the lines of gloo."""
    text = (self.workdir / f"err-{rank}{self.suffix}").read_text()
    return [line for line in text.splitlines() if not line.startswith("[Gloo]")]

  def wait_for_steps(self, count):
    """Waits until so many steps are done."""
    deadline = time.monotonic() + DEADLINE_S
    while len(steps(self.workdir)) < count:
      assert time.monotonic() < deadline
      assert self.processes[0].poll() is None, self.errors(0)
      time.sleep(0.05)


def printed(workdir):
  text = (workdir / "out-0").read_text()
  lines = [line for line in text.splitlines() if line.startswith("{")]
  return [json.loads(line) for line in lines]


def steps(workdir):
  return [found for found in printed(workdir) if "step" in found]


def assert_same(found, wanted):
  assert [x.keys() for x in found] == [x.keys() for x in wanted]
  for here, there in zip(found, wanted, strict=True):
    for name in here:
      np.testing.assert_allclose(
        here[name], there[name], rtol=1e-5, atol=1e-5, err_msg=name
      )


def ran(workdir, size, **more):
  with Started(workdir, size, **more) as started:
    codes = started.codes()
    assert codes == [0] * size, [started.errors(rank) for rank in range(size)]
    assert not any(started.errors(rank) for rank in range(size))
  return workdir


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  workdir = tmp_path_factory.mktemp("one")
  return ran(workdir, 1, sft_steps=3, num_steps=NUM_STEPS)


def shapes_of_versions():
  """What a reader on one device of its own adopts."""
  setup = replayed_run.make_setup(replayed_run.get_config(1, 4))
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  publish = publishing.make_publish(
    setup.model,
    mesh_lib.Layout(mesh=mesh, rules=mesh_lib.TRAIN_RULES),
    dtype=setup.config.rollout.dtype,
    weights=setup.config.rollout.weights,
  )
  params = jax.eval_shape(
    lambda: transformer.init_params(setup.model, jax.random.key(0))
  )
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return setup, jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
    publish.eval_shape(params),
  )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """A run of two processes, and the versions that a reader has adopted."""
  workdir = tmp_path_factory.mktemp("two")
  (workdir / "reader").touch()
  _, target = shapes_of_versions()
  adopted = {}

  def read():
    channel = weight_transfer.OrbaxChannel(
      workdir / replayed_run.VERSIONS, replayed_run.INCARNATION, target
    )
    version = -1
    while version < NUM_STEPS and channel.wait_for_version(version, DEADLINE_S):
      params, version = channel.adopt(version)
      adopted[version] = jax.tree.map(np.asarray, params)
    (workdir / "adopted").touch()

  reader = threading.Thread(target=read, daemon=True)
  reader.start()
  ran(workdir, 2, sft_steps=3, num_steps=NUM_STEPS)
  reader.join(DEADLINE_S)
  return workdir, adopted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_train_like_one(one, two):
  assert [x["step"] for x in steps(one)] == list(range(1, NUM_STEPS + 1))
  assert any(x["grad_norm"][0] > 1e-2 for x in steps(one))
  assert_same(printed(two[0]), printed(one))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reader_adopts_what_two_processes_published(two):
  workdir, adopted = two
  assert NUM_STEPS in adopted and len(adopted) > 1
  setup, _ = shapes_of_versions()
  for version in {2, 4, NUM_STEPS} & adopted.keys():
    state = checkpoint.restore_params(
      workdir / "checkpoints",
      version,
      jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=sharding
        ),
        jax.eval_shape(
          lambda: transformer.init_params(setup.model, jax.random.key(0))
        ),
        train_state.params_sharding(
          setup.train_mesh, mesh_lib.TRAIN_RULES, setup.model
        ),
      ),
    )
    wanted = publishing.published_params(
      state,
      setup.model.num_layers,
      setup.config.rollout.dtype,
      setup.config.rollout.weights,
    )
    jax.tree.map(np.testing.assert_array_equal, adopted[version], wanted)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
  "size", [1, pytest.param(2, marks=pytest.mark.nightly)]
)
def test_a_checkpoint_of_one_goes_on_in_two_and_back(size, one, two, tmp_path):
  before = two[0] if size == 1 else one
  shutil.copytree(
    before / "checkpoints",
    tmp_path / "checkpoints",
    ignore=shutil.ignore_patterns("4", str(NUM_STEPS)),
  )
  ran(tmp_path, size, num_steps=NUM_STEPS)
  assert [x["step"] for x in steps(tmp_path)] == [3, 4, 5, NUM_STEPS]
  assert_same(printed(tmp_path), printed(one)[2:])


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_pretrained_model_is_the_same_in_two_processes(tmp_path):
  """Each of them reads the parts of its own devices."""
  model = tmp_path / "model"
  test_assembly.write_pretrained(model, replayed_run.get_config(1, 1))
  wanted = ran(tmp_path / "one", 1, model=model, num_steps=2)
  found = ran(tmp_path / "two", 2, model=model, num_steps=2)
  assert_same(printed(found), printed(wanted))
  fresh = ran(tmp_path / "fresh", 1, num_steps=2)
  norms = [steps(workdir)[0]["grad_norm"] for workdir in (wanted, fresh)]
  assert not np.allclose(*norms, rtol=1e-3)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_adapters_train_in_two_processes_and_go_on(tmp_path):
  wanted = ran(tmp_path / "one", 1, lora_rank=2, num_steps=3)
  found = ran(tmp_path / "two", 2, lora_rank=2, num_steps=2)
  assert (found / "base").is_dir()
  ran(found, 2, lora_rank=2, num_steps=3)
  assert_same(steps(found), steps(wanted))


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_a_critic_trains_in_two_processes_and_goes_on(trunk, tmp_path):
  wanted = ran(tmp_path / "one", 1, critic=trunk, num_steps=3)
  found = ran(tmp_path / "two", 2, critic=trunk, num_steps=2)
  ran(found, 2, critic=trunk, num_steps=3)
  assert_same(steps(found), steps(wanted))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_signal_at_any_process_stops_all_after_a_checkpoint(tmp_path):
  with Started(tmp_path, 2, num_steps=900, slow_s=0.1) as started:
    started.wait_for_steps(1)
    # Meanwhile nobody else can train there.
    with Started(tmp_path, 2, suffix="-b", num_steps=900) as others:
      assert others.codes() == [1, 1]
      for rank in range(2):
        (line,) = others.errors(rank)
        assert "workdir: " in line and " is in use by " in line
    started.processes[1].send_signal(signal.SIGTERM)
    assert started.codes() == [130, 130]
  last = steps(tmp_path)[-1]["step"]
  assert checkpoint.latest(tmp_path / "checkpoints") == last


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_end_when_a_process_is_killed(rank, tmp_path):
  with Started(tmp_path, 2, num_steps=900) as started:
    started.wait_for_steps(2)
    started.processes[rank].kill()
    other = started.processes[1 - rank]
    code = other.wait(15)
    if rank == 1:
      assert code == world_lib.LOST
      (line,) = started.errors(0)
      assert line == "error: process 1 of the trainer has ended"
    else:
      # JAX ends it too, with pages of its own, and may be the first.
      assert code in (world_lib.LOST, -signal.SIGABRT)


WORLD = """
import os, sys
sys.path.insert(0, sys.argv[3])
import trainer_world

def command(rank, address):
  return [
    *(sys.executable, sys.argv[2], f"--workdir={sys.argv[1]}"),
    *("--num_steps=8", "--slow_s=0.2", "--num_processes=2"),
    *(f"--process_id={rank}", f"--coordinator_address={address}"),
  ], os.environ

sys.exit(trainer_world.run(
  command,
  2,
  max_restarts=2,
  note=lambda line: print(line, file=sys.stderr, flush=True),
))
"""


@pytest.mark.slow
@pytest.mark.nightly  # test_trainer_world.py starts processes again
@pytest.mark.timeout(300)
def test_all_are_started_again_from_the_checkpoint_when_one_dies(tmp_path):
  with open(tmp_path / "out-0", "w") as out:
    launcher = subprocess.Popen(
      [
        *(sys.executable, "-c", WORLD, str(tmp_path), str(SCRIPT)),
        str(SCRIPT.parents[1] / "launch"),
      ],
      env=ENVIRONMENT | {"PYTHONPATH": str(SCRIPT.parents[1])},
      stdout=out,
      stderr=subprocess.PIPE,
      text=True,
    )
  try:
    deadline = time.monotonic() + DEADLINE_S
    while len(steps(tmp_path)) < 3:
      assert time.monotonic() < deadline and launcher.poll() is None
      time.sleep(0.05)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    _, errors = launcher.communicate(timeout=DEADLINE_S)
  finally:
    launcher.kill()
  lines = [x for x in errors.splitlines() if not x.startswith("[Gloo]")]
  assert lines == [
    "error: process 1 of the trainer has ended",
    "process 1 was ended by SIGKILL; starting all 2 processes again (1)",
  ]
  assert launcher.returncode == 0
  found = [x["step"] for x in steps(tmp_path)]
  again = max(i for i, x in enumerate(found) if i and x <= found[i - 1])
  # From the newest checkpoint, which is of an even step.
  assert found[again] in (3, 5, 7) and found[again:] == list(
    range(found[again], 9)
  )
