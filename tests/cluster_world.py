"""Runs with replicas in other processes, and Ray clusters on this machine."""

import contextlib
import json
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOR_EVER = 100_000
COMPILE_CACHE = pathlib.Path(tempfile.gettempdir()) / "jaxrl_async_test_cache"
# Without the eight devices of the tests' own process. All that a test starts
# has the mark, however it is named.
MARK = f"JAXRL_TEST={os.getpid()}"
ENVIRONMENT = os.environ | {"XLA_FLAGS": ""} | dict([MARK.split("=")])


def train(workdir, *more):
  return [
    sys.executable,
    str(ROOT / "launch" / "train.py"),
    f"--config={ROOT / 'configs' / 'tiny.py'}",
    f"--workdir={workdir}",
    f"--compile_cache={COMPILE_CACHE}",
    "--config.cluster.kind=ray",
    *more,
  ]


def lines(path):
  text = path.read_text() if path.exists() else ""
  return [json.loads(line) for line in text.splitlines()]


def until(is_so, run, what, timeout_s=240):
  deadline_s = time.monotonic() + timeout_s
  while not is_so():
    assert run.poll() is None, f"{what}: the run has ended"
    assert time.monotonic() < deadline_s, what
    time.sleep(0.1)


def marked():
  """The command lines of processes that a test has started."""
  found = {}
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
      if MARK.encode() in (path / "environ").read_bytes():
        line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        found[int(path.name)] = line
  return found


def check_nothing_is_left():
  deadline_s = time.monotonic() + 20
  while left := marked():
    assert time.monotonic() < deadline_s, left
    time.sleep(0.1)


@contextlib.contextmanager
def ray_cluster(**variables):
  """Start Ray on this machine, and yield its address and the environment.

  It outlives the runs, and has a token of its own.
  """
  with (
    tempfile.TemporaryDirectory(prefix="jr", dir="/tmp") as directory,
    socket.socket() as free,
  ):
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    environment = ENVIRONMENT | {
      "RAY_AUTH_MODE": "token",
      "RAY_AUTH_TOKEN": secrets.token_hex(32),
      "RAY_USAGE_STATS_ENABLED": "0",
      "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
      "RAY_worker_register_timeout_seconds": "300",
      "HOME": directory,
      **variables,
    }
    command = [
      *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
      *("--block", "--disable-usage-stats", "--include-dashboard=false"),
      *("--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"),
      *("--object-store-memory=100000000", f"--temp-dir={directory}/ray"),
    ]
    log = pathlib.Path(directory) / "ray.log"
    with open(log, "w") as out:
      head = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
      try:
        deadline_s = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
          assert head.poll() is None, log.read_text()
          assert time.monotonic() < deadline_s, log.read_text()
          time.sleep(0.2)
        yield f"127.0.0.1:{port}", environment
      finally:
        head.terminate()
        head.wait(60)


def certificate(directory):
  """Return the settings with which Ray encrypts what it sends."""
  key, cert = directory / "key.pem", directory / "cert.pem"
  subprocess.run(
    [
      *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes"),
      *("-keyout", key, "-out", cert, "-subj", "/CN=127.0.0.1"),
      *("-addext", "subjectAltName=IP:127.0.0.1"),
    ],
    check=True,
    capture_output=True,
  )
  return {
    "RAY_USE_TLS": "1",
    "RAY_TLS_SERVER_KEY": str(key),
    "RAY_TLS_SERVER_CERT": str(cert),
    "RAY_TLS_CA_CERT": str(cert),
  }
