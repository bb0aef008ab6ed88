"""Runs on a Ray cluster that was there before them and stays."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time

import cluster_world
import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


# Python runs this first in the processes of a cluster, which then say what a
# host says that does not fit.
UNFIT = """
import importlib.metadata
import pathlib
import time

fault = pathlib.Path(__file__).with_name("fault")
version, seconds = importlib.metadata.version, time.time
read_text = pathlib.Path.read_text


def what():
  return read_text(fault) if fault.exists() else ""


def read(path, *arguments, **options):
  if path.name == "probe" and what() == "directory":
    raise FileNotFoundError
  return read_text(path, *arguments, **options)


importlib.metadata.version = lambda name: (
  "0.1" if name == "jax" and what() == "version" else version(name)
)
time.time = lambda: seconds() - 9 * (what() == "clock")
pathlib.Path.read_text = read
"""


def test_a_run_needs_the_token_the_encryption_and_hosts_that_fit(tmp_path):
  fault = tmp_path / "fault"
  (tmp_path / "sitecustomize.py").write_text(UNFIT)
  variables = cluster_world.certificate(tmp_path) | {
    "PYTHONPATH": str(tmp_path)
  }
  with cluster_world.ray_cluster(**variables) as (address, environment):
    del environment["PYTHONPATH"]

    def run(name, start_timeout_s, *flags, **variables):
      return subprocess.run(
        cluster_world.train(
          tmp_path / name,
          f"--config.cluster.address={address}",
          "--config.train.num_steps=2",
          "--config.eval.every=0",
          f"--config.cluster.start_timeout_s={start_timeout_s}",
          *flags,
        ),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment | variables,
      )

    def refusal(*arguments, **variables):
      begin_s = time.monotonic()
      refused = run("refused", *arguments, **variables)
      assert refused.returncode == 1, refused.stderr[-4000:]
      assert "Traceback" not in refused.stderr
      assert time.monotonic() - begin_s < 240
      assert not any(
        "launch/train.py" in line for line in cluster_world.marked().values()
      )
      return refused.stderr.splitlines()[-1]

    of_ray = cluster_world.marked()
    for variables in (
      {"RAY_AUTH_TOKEN": secrets.token_hex(32)},
      {"RAY_USE_TLS": "0"},
    ):
      line = refusal(30, **variables)
      assert line.startswith(f"error: cluster.address: Ray ({address})")
      assert "the token and the TLS settings" in line
      assert cluster_world.marked().keys() <= of_ray.keys()
    for what, error in {
      "version": "error: cluster: .* has jax 0.1 instead of",
      "clock": r"error: cluster: the clock of .* is -[789] s off",
      "directory": "error: transfer.directory: .* is not the directory that",
    }.items():
      fault.write_text(what)
      assert re.match(error, refusal(100))
    fault.unlink()
    line = refusal(5, "--config.cluster.replicas=1000")
    assert line.startswith("error: cluster.replicas: the hosts of the cluster")
    done = run("right", 300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["train_steps"] == 2
  # Something else listens there, and says nothing.
  with socket.create_server(("127.0.0.1", 0)) as mute:
    address = f"127.0.0.1:{mute.getsockname()[1]}"
    line = refusal(10)
    assert line.startswith(f"error: cluster.address: Ray ({address})")
  cluster_world.check_nothing_is_left()


def test_replicas_wait_for_a_trainer_that_is_started_again(tmp_path):
  with cluster_world.ray_cluster() as (address, environment):
    check_that_replicas_wait(tmp_path, address, environment)


def check_that_replicas_wait(tmp_path, address, environment):
  said = tmp_path / "err"
  with open(said, "w") as err:
    run = subprocess.Popen(
      [
        sys.executable,
        str(cluster_world.ROOT / "launch" / "trainer_world.py"),
        "--num_processes=2",
        "--max_restarts=1",
        "--",
        *cluster_world.train(
          tmp_path / "work",
          f"--config.cluster.address={address}",
          "--config.cluster.trainer_processes=2",
          "--config.cluster.replicas=2",
          "--config.mesh.train_data=-1",
          "--config.train.num_steps=24",
          "--config.run.checkpoint_every=4",
          "--config.eval.every=0",
        )[2:],
      ],
      stderr=err,
      stdout=subprocess.DEVNULL,
      env=environment,
    )
    try:
      metrics = tmp_path / "work" / "metrics.jsonl"
      cluster_world.until(
        lambda: len(cluster_world.lines(metrics)) >= 6, run, "some steps", 500
      )
      replicas = {
        x: y
        for x, y in cluster_world.marked().items()
        if y.startswith("ray::Act")
      }
      assert len(replicas) == 2, cluster_world.marked()
      (victim,) = (
        pid
        for pid, line in cluster_world.marked().items()
        if "--process_id=1" in line
      )
      os.kill(victim, signal.SIGKILL)
      cluster_world.until(
        lambda: "starting all 2" in said.read_text(), run, "a restart"
      )
      again = said.stat().st_size
      cluster_world.until(
        lambda: said.read_text()[again:].count("is ready") >= 2,
        run,
        "that the replicas are attached again",
      )
      assert replicas.keys() <= cluster_world.marked().keys()
      assert run.wait(500) == 0, said.read_text()[-4000:]
    finally:
      run.kill()
      run.wait()
  summary = json.loads((tmp_path / "work" / "summary.json").read_text())
  assert summary["train_steps"] == 24 and summary["staleness_max"] <= 2
  indices = [
    line["index"]
    for line in cluster_world.lines(tmp_path / "work/ledger.jsonl")
  ]
  assert len(indices) == len(set(indices))
  # The run has ended well: its replicas have not stayed.
  deadline_s = time.monotonic() + 60
  while replicas.keys() & cluster_world.marked().keys():
    assert time.monotonic() < deadline_s
    time.sleep(0.2)
