"""The flags of one of several processes, and what they must not be."""

import os
import pathlib
import re
import socket
import subprocess
import sys
import types

import numpy as np
import pytest

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import trainer_facts
from jaxrl_async.config import sections

ROOT = pathlib.Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny.py"
DEADLINE_S = 60.0


def start(workdir, *flags):
  return subprocess.Popen(
    [
      sys.executable,
      str(ROOT / "launch" / "train.py"),
      f"--config={TINY}",
      f"--workdir={workdir}",
      *flags,
    ],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def errors(*processes):
  """What each process says; all of them fail."""
  try:
    found = [
      process.communicate(timeout=DEADLINE_S)[1] for process in processes
    ]
  finally:
    for process in processes:
      process.kill()
  assert [process.returncode for process in processes] == [1] * len(processes)
  return [text.rstrip("\n") for text in found]


def two(**settings):
  """Flags of a run of two processes."""
  fields = {"trainer_processes": 2, "kind": "ray", **settings}
  return [f"--config.cluster.{name}={value}" for name, value in fields.items()]


ADDRESS = "--coordinator_address=localhost:1"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("flags", "error"),
  [
    (["--process_id=1"], "num_processes: missing; "),
    ([ADDRESS], "num_processes: missing; "),
    (["--num_processes=2"], "coordinator_address: '' is not HOST:PORT"),
    (
      ["--num_processes=2", "--process_id=2", ADDRESS],
      "process_id: 2 is not one of 0 to 1",
    ),
    pytest.param(
      ["--num_processes=2", ADDRESS],
      "cluster.trainer_processes: the config asks for 1, and this is one of 2",
      marks=pytest.mark.nightly,
    ),
    pytest.param(
      [*two(kind="local"), "--num_processes=2", ADDRESS],
      "cluster.trainer_processes: several processes that train need replicas",
      marks=pytest.mark.nightly,
    ),
    (
      [
        *two(),
        "--config.transfer.channel=direct",
        "--num_processes=2",
        ADDRESS,
      ],
      "transfer.channel: direct is for slices of one process; use orbax",
    ),
    (two(), "num_processes: missing; JAX finds no other processes by itself"),
    pytest.param(
      [
        *two(start_timeout_s=1),
        "--num_processes=2",
        "--process_id=1",
        ADDRESS,
      ],
      "coordinator_address: process 0 did not listen at localhost:1 within 1 s",
      marks=pytest.mark.nightly,
    ),
  ],
  ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_flags_are_one_line(flags, error, tmp_path):
  (line,) = errors(start(tmp_path, *flags))
  assert line.startswith(f"error: {error}")
  assert "\n" not in line


DETECTED = """
import socket
import jax
import trainer_process

def unknown(*_):
  raise socket.gaierror(-2, "Name or service not known")

socket.gethostname, socket.gethostbyname = lambda: "container", unknown
jax.config.update("jax_cpu_collectives_implementation", "gloo")
print("found", *trainer_process._detected(60.0))
"""


@pytest.mark.slow
def test_processes_find_each_other_on_hosts_that_do_not_know_their_own_name():
  # JAX chooses its port by the number of the job.
  slurm = {"SLURM_JOB_ID": f"{os.getpid()}", "SLURM_STEP_NODELIST": "localhost"}
  environment = os.environ | slurm | {"SLURM_NTASKS": "2"}
  environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "launch")))
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", DETECTED],
      env=environment | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for rank in range(2)
  ]
  try:
    said = [process.communicate(timeout=DEADLINE_S) for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert all(not process.returncode for process in processes), said
  found = [re.search(r"found (.*) (localhost:\d+)", out) for out, _ in said]
  places, addresses = zip(*(match.groups() for match in found), strict=True)
  assert places == ("0 2", "1 2") and len(set(addresses)) == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_two_processes_of_different_settings_end_with_one_line(tmp_path):
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"--coordinator_address=localhost:{free.getsockname()[1]}"
  flags = [*two(), "--num_processes=2", address]
  lines = errors(
    start(tmp_path, *flags, "--process_id=0"),
    start(tmp_path, *flags, "--process_id=1", "--config.train.num_steps=9"),
  )
  assert lines[0] == lines[1]
  assert lines[0].startswith("error: train.num_steps: process 1 on ")
  assert lines[0].endswith("has 9, process 0 has 4; they have to be the same")


def test_what_is_compared_is_all_settings_packages_and_the_code(tmp_path):
  facts = trainer_facts.facts(sections.Config(), tmp_path)
  names = {"jax", "jaxlib", "numpy", "flax", "optax", "orbax-checkpoint"}
  assert names <= facts.keys()
  assert facts["algorithm.groups_per_step"] == 32
  assert facts["source of jaxrl_async"] == hosts.source_digest()
  assert facts["workdir"] == str(tmp_path)


def test_the_workdir_and_the_directory_of_versions_are_shared(tmp_path):
  config = sections.Config()
  assert trainer_facts.shared(config, tmp_path) == {"workdir": tmp_path}
  config.transfer.directory = str(tmp_path / "versions")
  assert trainer_facts.shared(config, tmp_path) == {
    "workdir": tmp_path,
    "transfer.directory": tmp_path / "versions",
  }


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "error"),
  [
    ([], "the flags of launch/train.py are missing; they follow after --"),
    (["--num_processes=0", "--", "x"], "flag --num_processes=0: "),
    pytest.param(
      ["--", f"--config={TINY}", "--workdir=/tmp/nowhere", *two(kind="local")],
      "cluster.trainer_processes: several processes that train need replicas",
      marks=pytest.mark.nightly,
    ),
  ],
  ids=["none", "too few", "of process 0"],
)
def test_the_launcher_of_all_says_what_is_wrong_once(arguments, error):
  script = str(ROOT / "launch" / "trainer_world.py")
  launcher = subprocess.Popen(
    [sys.executable, script, *arguments],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )
  (line,) = errors(launcher)
  assert line.startswith(f"error: {error}")
  assert "\n" not in line


def test_each_process_needs_devices_of_the_train_mesh():
  devices = np.array(
    [types.SimpleNamespace(process_index=i) for i in (0, 0, 1)]
  )

  def check(count, size):
    mesh = types.SimpleNamespace(devices=devices[:count], size=count)
    trainer_facts.check_mesh(mesh, size)

  check(3, 2)
  check(1, 1)
  error = "mesh.train_data: the train mesh of 2 devices leaves out 1 of 2"
  with pytest.raises(sections.ConfigError, match=error):
    check(2, 2)
