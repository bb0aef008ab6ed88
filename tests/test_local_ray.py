"""Ray on this machine: started again when it is slow, and what it leaves."""

import contextlib
import fcntl
import os
import pathlib
import subprocess
import sys
import time
import types

import other_user
import pytest

from jaxrl_async.cluster import environment as environment_lib
from jaxrl_async.cluster import local_ray
from jaxrl_async.cluster import ray_replicas
from jaxrl_async.config import sections

SLOW = """
import pathlib, sys
starts = pathlib.Path(__file__).with_name("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) < {count}:
  raise Exception("The current node timed out during startup. This could")
print("127.0.0.1:6379", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
  """Starts a stand-in that gives up some times before it succeeds."""
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  monkeypatch.setattr(ray_replicas, "_LOCAL_RAY", "slow_ray")
  cluster = object.__new__(ray_replicas.Cluster)
  cluster._num_processes = cluster._reward_workers = 1
  cluster._ray = types.SimpleNamespace(
    exceptions=types.SimpleNamespace(RayError=ArithmeticError)
  )

  def start(count, timeout_s):
    (tmp_path / "slow_ray.py").write_text(SLOW.format(count=count))
    cluster._section = sections.ClusterSection(start_timeout_s=timeout_s)
    with contextlib.ExitStack() as closing:
      address = cluster._start(closing, time.monotonic() + timeout_s)
      return address, len((tmp_path / "starts").read_text())

  return start


def test_ray_is_started_again_when_it_has_given_up(start):
  assert start(3, 60.0) == ("127.0.0.1:6379", 3)


def test_ray_is_not_started_for_ever(start):
  start_s = time.monotonic()
  with pytest.raises(sections.ConfigError, match="did not answer in 1 s"):
    start(1_000, 1.0)
  assert time.monotonic() - start_s < 30


@pytest.mark.slow
@pytest.mark.other_user
def test_another_user_can_do_nothing_with_the_directories_of_ray(monkeypatch):
  for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # forgotten afterwards
    monkeypatch.setenv(name, "")
  environment_lib.set_for_ray("")
  process = subprocess.Popen(
    [sys.executable, "-m", local_ray.__name__, "1"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    start_new_session=True,
  )
  with process:
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline()
    opened = [
      pathlib.Path(os.readlink(path))
      for path in pathlib.Path(f"/proc/{process.pid}/fd").iterdir()
      if path.exists()
    ]
    (directory,) = (p.parent for p in opened if p.name == local_ray._LOCK)
    (session,) = (directory / "ray").glob("session_2*")
    assert (session / "sockets" / "raylet").is_socket()
    for path in (directory, directory / "ray", session, session / "sockets"):
      assert other_user.can(path) == []
    process.stdin.close()
    assert process.wait(60) == 0
  assert not directory.exists()


def test_what_killed_processes_left_is_removed(tmp_path):
  def directory(name, lock):
    made = tmp_path / name
    (made / "session").mkdir(parents=True)
    if lock:
      (made / local_ray._LOCK).touch()
    return made

  left = directory("ray-left", True)
  others = [directory("ray-other", False), directory("other-left", True)]
  used = directory("ray-used", True)
  with open(used / local_ray._LOCK, "wb") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    local_ray.remove_leftovers(tmp_path)
  assert not left.exists()
  assert used.exists() and all(other.exists() for other in others)
