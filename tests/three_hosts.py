"""Hosts of a cluster on one machine: network namespaces joined by a bridge.

Each has an address of its own and one node of Ray. They share the file system,
as hosts with a shared directory do. It takes root, and `ip` of iproute2.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import time

PORT = 6379


def run(*command, **options):
  return subprocess.run(
    command, check=True, capture_output=True, text=True, **options
  )


def why_not():
  """Why hosts cannot be made on this machine; "" if they can."""
  name = f"j{secrets.token_hex(3)}"
  try:
    run("ip", "netns", "add", name)
    run("ip", "netns", "del", name)
  except (OSError, subprocess.CalledProcessError) as error:
    said = getattr(error, "stderr", "") or str(error)
    return " ".join(said.split())
  return ""


class Hosts:
  """Namespaces 0, 1, …; the head of the cluster is in the first."""

  def __init__(self, directory, count=3):
    self.stack = contextlib.ExitStack()
    self.tag = f"j{secrets.token_hex(3)}"
    self.directory = directory
    self.net = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}"
    self.environment = os.environ | {
      "RAY_AUTH_MODE": "token",
      "RAY_AUTH_TOKEN": secrets.token_hex(32),
      "RAY_USAGE_STATS_ENABLED": "0",
      "HOME": str(directory),
      # Ray would give a host up that is away for ten seconds on a busy machine.
      "RAY_health_check_timeout_ms": "60000",
      "RAY_health_check_failure_threshold": "20",
    }
    self.nodes = []
    bridge = f"{self.tag}b"
    run("ip", "link", "add", bridge, "type", "bridge")
    self.stack.callback(run, "ip", "link", "del", bridge)
    run("ip", "link", "set", bridge, "up")
    for i in range(count):
      name, cable = self.name(i), self.cable(i)
      run("ip", "netns", "add", name)
      self.stack.callback(run, "ip", "netns", "del", name)
      self.stack.callback(self.kill, i)
      run(
        *("ip", "link", "add", cable, "type", "veth"),
        *("peer", "name", "eth0", "netns", name),
      )
      run("ip", "link", "set", cable, "master", bridge, "up")
      inside = "ip", "netns", "exec", name, "ip"
      run(*inside, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
      run(*inside, "link", "set", "eth0", "up")
      run(*inside, "link", "set", "lo", "up")

  def name(self, i):
    return f"{self.tag}{i}"

  def cable(self, i):
    return f"{self.tag}v{i}"

  def address(self, i):
    return f"{self.net}.{i + 1}"

  @property
  def cluster(self):
    return f"{self.address(0)}:{PORT}"

  def start(self, i, *command, **options):
    """Start a program on a host."""
    return subprocess.Popen(
      ["ip", "netns", "exec", self.name(i), *map(str, command)],
      env=self.environment,
      text=True,
      **options,
    )

  def start_ray(self, i, num_cpus=1):
    """Start a node of Ray on a host, and wait until it has joined."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    more = [
      f"--node-ip-address={self.address(i)}",
      f"--num-cpus={num_cpus}",
      f"--object-store-memory={100_000_000}",
      "--disable-usage-stats",
    ]
    if i == 0:
      more += [
        "--head",
        f"--port={PORT}",
        "--include-dashboard=false",
        f"--temp-dir={self.directory}",
      ]
    else:
      more.append(f"--address={self.cluster}")
    log = open(self.directory / f"ray{i}.log", "w+")
    self.stack.callback(log.close)
    node = self.start(i, *ray, *more, stdout=log, stderr=log)
    deadline_s = time.monotonic() + 120
    while (
      "Ray runtime started" not in (self.directory / f"ray{i}.log").read_text()
    ):
      assert node.poll() is None and time.monotonic() < deadline_s, (
        self.directory / f"ray{i}.log"
      ).read_text()
      time.sleep(0.2)
    self.nodes.append(node)

  def cut(self, i):
    run("ip", "link", "set", self.cable(i), "down")

  def mend(self, i):
    run("ip", "link", "set", self.cable(i), "up")

  def pids(self, i):
    found = run("ip", "netns", "pids", self.name(i)).stdout.split()
    return [int(pid) for pid in found]

  def kill(self, i):
    """Kill all processes of a host, however many attempts that takes."""
    while pids := self.pids(i):
      for pid in pids:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, 9)
      time.sleep(0.1)

  def close(self):
    self.stack.close()
    for node in self.nodes:
      node.wait(30)
