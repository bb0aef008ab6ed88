"""Whole runs whose replicas are in other processes and on other hosts."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import cluster_world
import pytest
import three_hosts

from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.storage import checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def hosts():
  # Names of sockets are short, so the directory has to be near the root.
  with tempfile.TemporaryDirectory(prefix="jr", dir="/tmp") as directory:
    made = three_hosts.Hosts(pathlib.Path(directory))
    try:
      yield made
    finally:
      made.close()


@pytest.mark.nightly
@pytest.mark.namespaces
def test_a_run_over_three_hosts_loses_none_of_its_groups(hosts):
  for i in range(3):
    hosts.start_ray(i)
  workdir = hosts.directory / "run"
  command = cluster_world.train(
    workdir,
    f"--config.cluster.address={hosts.cluster}",
    "--config.cluster.replicas=3",
    "--config.cluster.replica_timeout_s=4",
    "--config.cluster.report_every_s=0.2",
    f"--config.transfer.directory={hosts.directory}",
    "--config.run.checkpoint_every=20",
    "--config.eval.every=0",
  )
  log = open(hosts.directory / "run.log", "w+")
  hosts.stack.callback(log.close)
  said = pathlib.Path(log.name)

  def begin(num_steps):
    steps = f"--config.train.num_steps={num_steps}"
    return hosts.start(0, *command, steps, stdout=log, stderr=log)

  def step():
    return len(cluster_world.lines(workdir / "metrics.jsonl"))

  def has(text):
    return text in said.read_text()

  run = begin(cluster_world.FOR_EVER)
  cluster_world.until(
    lambda: all(has(f"replica {i} is ready") for i in range(3)), run, "3"
  )
  cluster_world.until(lambda: step() > 5, run, "some steps")
  hosts.cut(1)
  before = step()
  time.sleep(10)
  hosts.mend(1)
  assert step() > before, "it stood still while one host was away"
  cluster_world.until(
    lambda: has("is heard again"), run, "the host that was away"
  )
  before = step()
  hosts.kill(2)
  cluster_world.until(lambda: has("is gone"), run, "the host that was killed")
  # The coordinator dies, and the same command goes on.
  cluster_world.until(lambda: step() > before + 40, run, "a checkpoint")
  run.send_signal(signal.SIGKILL)
  for pid in hosts.pids(0):
    arguments = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    if "launch/train.py" in arguments:
      os.kill(pid, signal.SIGKILL)
  run.wait(30)
  num_steps = step() + 60
  run = begin(num_steps)
  assert run.wait(300) == 0, said.read_text()[-4000:]
  summary = json.loads((workdir / "summary.json").read_text())
  assert summary["train_steps"] == num_steps
  assert summary["staleness_max"] <= 2
  tokens = summary["tokens"]
  assert tokens["generated"] == sum(
    count for name, count in tokens.items() if name != "generated"
  )
  ledger = cluster_world.lines(workdir / "ledger.jsonl")
  indices = [line["index"] for line in ledger]
  assert len(indices) == len(set(indices))
  assert len([x for x in ledger if x["fate"] == "trained"]) == 4 * num_steps
  missing = set(range(max(indices) + 1)) - set(indices)
  assert len(missing) <= 4 * 3, "groups that are still in flight"
  names = {
    name
    for line in ledger
    for trajectory in line["writers"]
    for name, _, _ in trajectory
  }
  assert {"replica 0", "replica 1", "replica 2"} <= names
  for line in ledger:
    for trajectory, count in zip(
      line["writers"], line["num_completion_tokens"], strict=True
    ):
      assert sum(tokens for _, _, tokens in trajectory) == count
      assert all(
        line["birth"] <= version <= line["step"] for _, version, _ in trajectory
      )


REWARD = """
import os
import pathlib

from jaxrl_async.rewards import reasoning


def score(item, completion):
  if not (died := pathlib.Path(__file__).with_name("died")).exists():
    died.touch()
    os._exit(3)
  return reasoning.score(item, completion)
"""


@pytest.mark.nightly  # each half of it has tests of its own
def test_two_processes_train_replicas_of_two_generate(
  tmp_path,
):
  # Where the run starts, and nowhere else. Its first process dies.
  (tmp_path / "my_reward.py").write_text(REWARD)
  # As below `uv run`: Ray looks for a parent with this command line.
  (tmp_path / "run").write_text('"$@"\nexit $?\n')
  run = subprocess.run(
    [
      *("uv", "run"),
      sys.executable,
      str(cluster_world.ROOT / "launch" / "trainer_world.py"),
      "--num_processes=2",
      "--max_restarts=0",
      "--",
      *cluster_world.train(
        tmp_path / "work",
        "--config.cluster.trainer_processes=2",
        "--config.cluster.replicas=2",
        "--config.cluster.replica_processes=2",
        "--config.task.reward=my_reward:score",
        "--config.mesh.rollout_tensor=2",
        "--config.mesh.train_data=-1",
        # The bound rises as soon as anything waits.
        "--config.staleness_control.maximum=2",
        "--config.staleness_control.max_wait_frac=0",
        "--config.staleness_control.min_ess=0",
        "--config.staleness_control.max_left_out_frac=1",
        "--config.staleness_control.patience=1",
      )[2:],
    ],
    executable="/bin/sh",
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=500,
    env=cluster_world.ENVIRONMENT,
  )
  assert run.returncode == 0, run.stderr[-4000:]
  summary = json.loads((tmp_path / "work" / "summary.json").read_text())
  assert summary["train_steps"] == 4 and summary["staleness_max"] <= 2
  assert summary["mismatch_kl_max"] < 1e-9
  assert (tmp_path / "died").exists()
  steps = metrics_lib.by_step(tmp_path / "work")[1:]
  bounds = [line["staleness/bound"] for line in steps]
  assert bounds[0] == 0 and bounds == sorted(bounds) and 0 < bounds[-1] <= 2
  for line in cluster_world.lines(tmp_path / "work" / "ledger.jsonl"):
    assert line["deadline"] - line["birth"] in {0, *bounds}
  last = steps[-1]
  assert last["reward_service/errors"] == 1 and summary["tokens"]["failed"] == 0
  cluster_world.check_nothing_is_left()


FAILS = """
import pathlib

from jaxrl_async.rewards import reasoning


def score(item, completion):
  if pathlib.Path(__file__).with_name("broken").exists():
    raise ValueError("the verifier is broken")
  return reasoning.score(item, completion)
"""


@pytest.mark.nightly
def test_two_processes_take_a_last_checkpoint_when_a_thread_fails(tmp_path):
  (tmp_path / "my_reward.py").write_text(FAILS)
  workdir, broken = tmp_path / "work", tmp_path / "broken"

  def start():
    return subprocess.Popen(
      [
        sys.executable,
        str(cluster_world.ROOT / "launch" / "trainer_world.py"),
        "--num_processes=2",
        "--max_restarts=0",
        "--",
        *cluster_world.train(
          workdir,
          "--config.cluster.trainer_processes=2",
          "--config.mesh.train_data=-1",
          "--config.task.reward=my_reward:score",
          "--config.task.max_failed_groups=2",
          "--config.warm_start.num_steps=0",
          "--config.train.num_steps=30",
          "--config.run.checkpoint_every=1000",
          "--config.eval.every=0",
        )[2:],
      ],
      cwd=tmp_path,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      text=True,
      env=cluster_world.ENVIRONMENT,
    )

  with start() as run:
    cluster_world.until(
      lambda: len(cluster_world.lines(workdir / "metrics.jsonl")) > 4, run, ""
    )
    broken.touch()
    said = run.communicate(timeout=240)[1]
  assert run.returncode == 1 and "the verifier is broken" in said
  (step,) = {*checkpoint.steps(workdir / "checkpoints")} - {0}
  assert 4 <= step < 30
  broken.unlink()
  with start() as run:
    said = run.communicate(timeout=240)[1]
  assert run.returncode == 0 and f"from step {step}" in said, said[-3000:]
  lines = cluster_world.lines(workdir / "ledger.jsonl")
  trained = [x["index"] for x in lines if x["fate"] == "trained"]
  assert len(trained) == len({*trained}) == 30 * 4
  cluster_world.check_nothing_is_left()


OF_TWO_REPLICAS = """
import sys

import jaxrl_async

config, workdir = sys.argv[1:]
jaxrl_async.train(
  config,
  workdir,
  settings={
    "cluster.kind": "ray",
    "cluster.replicas": 2,
    "warm_start.num_steps": 0,
    "rollout.num_slots": 4,
    "rollout.decode_steps_per_call": 1,
    "run.exact_resume": True,
  },
)
"""


def listening(pids):
  """The addresses at which some processes listen, as the kernel writes them."""
  found = set()
  for pid in pids:
    with contextlib.suppress(OSError):
      process = pathlib.Path(f"/proc/{pid}")
      sockets = {os.readlink(path) for path in (process / "fd").iterdir()}
      for name in ("tcp", "tcp6"):
        table = (process / "net" / name).read_text().splitlines()[1:]
        for _, local, _, state, *_, inode in (
          line.split()[:10] for line in table
        ):
          if state == "0A" and f"socket:[{inode}]" in sockets:
            found.add(local.partition(":")[0])
  return found


@pytest.mark.parametrize(
  "first_steps", [(0,), pytest.param((0, 2), marks=pytest.mark.nightly)]
)
def test_a_run_of_two_replicas_is_replayed_in_one_process(
  first_steps, tmp_path
):
  (tmp_path / "run.py").write_text(OF_TWO_REPLICAS)
  run = subprocess.Popen(
    [
      *(sys.executable, tmp_path / "run.py"),
      *(cluster_world.ROOT / "configs" / "tiny.py", tmp_path),
    ],
    # Two devices, for the two slices.
    env=cluster_world.ENVIRONMENT
    | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
  )
  addresses = set()
  while run.poll() is None:
    addresses |= listening(cluster_world.marked())
    time.sleep(0.2)
  assert run.returncode == 0
  # Ray listens, and only on the loopback address.
  assert addresses and addresses <= {
    "0100007F",
    "00000000000000000000000001000000",
    "0000000000000000FFFF00000100007F",
  }
  writers = {
    name
    for line in cluster_world.lines(tmp_path / "ledger.jsonl")
    for trajectory in line["writers"]
    for name, _, _ in trajectory
  }
  assert {name.split(" #")[0] for name in writers} == {"replica 0", "replica 1"}
  for first in first_steps:
    run = subprocess.run(
      [
        sys.executable,
        str(cluster_world.ROOT / "launch" / "replay.py"),
        f"--workdir={tmp_path}",
        f"--from_step={first}",
      ],
      capture_output=True,
      text=True,
      timeout=300,
      env=cluster_world.ENVIRONMENT,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["bit_exact"] and found["last_step"] == 4
    assert found["first_step"] == first


@pytest.mark.nightly
@pytest.mark.parametrize(
  "flags, error",
  [
    (["--config.cluster.address=127.0.0.1:1"], "cluster.address: 127.0.0.1:1"),
    (["--config.cluster.replica_gpus=1"], "cluster.replica_gpus: no host of"),
  ],
)
def test_a_cluster_that_cannot_be_used_is_one_line(tmp_path, flags, error):
  run = subprocess.run(
    cluster_world.train(tmp_path, *flags),
    capture_output=True,
    text=True,
    timeout=300,
    env=cluster_world.ENVIRONMENT,
  )
  assert run.returncode == 1
  assert run.stderr.splitlines()[-1].startswith(f"error: {error}")
  assert "Traceback" not in run.stderr
  cluster_world.check_nothing_is_left()
