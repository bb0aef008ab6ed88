"""Replicas as actors of Ray. Nothing but this folder imports Ray."""

from collections.abc import Callable, Mapping
from concurrent import futures
import contextlib
import functools
import hashlib
import importlib
import logging
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import ray_handle
from jaxrl_async.cluster import ray_rewards
from jaxrl_async.config import sections
from jaxrl_async.coordination import supervisor as supervisor_lib

_NAMESPACE = "jaxrl_async"
# Methods of one actor that may run at a time: an attachment, a collection, an
# evaluation and deliveries, and those of a coordinator that has ended.
_CONCURRENCY = 16
_END_S = 20.0
_CONNECT_S = 10.0
_LOCAL_RAY = "jaxrl_async.cluster.local_ray"


def _import_ray() -> Any:
  """Return the module.

  Raises:
    ConfigError: it is not installed.
  """
  try:
    return importlib.import_module("ray")
  except ImportError as error:
    raise sections.ConfigError(
      f"cluster.kind: Ray cannot be imported ({error}); install the extra: uv"
      " sync --extra ray, or pip install 'jaxrl_async[ray]'"
    ) from error


class Cluster:
  """A connection to Ray, and the actors that this run has there.

  Threads: all methods belong to one thread at a time.
  """

  def __init__(
    self,
    section: sections.ClusterSection,
    *,
    run_name: str,
    environment: Mapping[str, str],
    reward_workers: int = 0,
  ):
    """Start Ray on this machine, or connect to the cluster of the section.

    Args:
      section: of the config.
      run_name: the same at every start of this run, and of no other one.
      environment: variables for the processes of replicas.
      reward_workers: processes of each pool that scores, and the cores that Ray
        reserves for it.

    Raises:
      ConfigError: Ray is not installed, does not start or cannot be reached.
    """
    self._ray = _import_ray()
    self._section = section
    self._run_name = run_name
    self._environment = dict(environment)
    self._reward_workers = reward_workers
    self._is_own = not section.address
    self._num_processes = section.replicas * section.replica_processes
    self._groups: dict[int, Any] = {}  # TPU slices by place
    if section.address not in ("", "auto"):
      _check_answers(section.address)
    with contextlib.ExitStack() as closing:
      address = section.address or self._start(closing)
      self._within(
        lambda: self._ray.init(
          address=address,
          namespace=_NAMESPACE,
          logging_level=logging.ERROR,
          log_to_driver=False,
        )
      )
      closing.callback(self._ray.shutdown)
      self._check_resources()
      self._closing = closing.pop_all()

  def _start(self, closing: contextlib.ExitStack) -> str:
    """Start Ray on this machine, and return its address.

    Args:
      closing: ends it.

    Raises:
      ConfigError: it does not start.
    """
    section = self._section
    # Replicas share the cores of this machine if it has too few.
    wanted = self._num_processes * section.replica_cpus
    wanted += section.reward_pools * self._reward_workers
    num_cpus = max(os.cpu_count() or 1, math.ceil(wanted))
    errors = closing.enter_context(tempfile.TemporaryFile("w+"))
    process = subprocess.Popen(
      [sys.executable, "-m", _LOCAL_RAY, str(num_cpus)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=errors,
      text=True,
      start_new_session=True,  # signals are for this process alone
    )
    closing.callback(_end, process)
    self._within(lambda: self._read_address(process, errors))
    return self._address

  def _within(self, function: Callable[[], Any]) -> None:
    """Call a function of Ray's, with a deadline.

    Raises:
      ConfigError: it failed, or is not done in time.
    """
    done: futures.Future = futures.Future()

    def call() -> None:
      function()
      done.set_result(None)

    supervisor_lib.start_thread("ray", call, done.set_exception)
    limit_s = self._section.start_timeout_s
    where = self._section.address or "on this machine"
    try:
      done.result(timeout=limit_s)
    except TimeoutError:
      raise sections.ConfigError(
        f"cluster.address: Ray ({where}) did not answer in {limit_s:g} s"
        " (cluster.start_timeout_s)"
      ) from None
    except (
      *(RuntimeError, ConnectionError, ValueError, OSError),
      self._ray.exceptions.RayError,
    ) as error:
      # Ray's own text of a wrong token is "Failed to connect".
      hint = (
        "; Ray has to run there, with the token of this process"
        if self._section.address
        else ""
      )
      raise sections.ConfigError(
        f"cluster.address: Ray ({where}): {ray_handle.one_line(error)}{hint}"
      ) from error

  def _read_address(
    self, process: subprocess.Popen[str], errors: IO[str]
  ) -> None:
    """Wait for the address that `local_ray` prints.

    Raises:
      RuntimeError: it ended before.
    """
    assert process.stdout is not None
    self._address = process.stdout.readline().strip()
    if not self._address:
      errors.seek(0)
      lines = [line for line in errors.read().splitlines() if line.strip()]
      raise RuntimeError(lines[-1] if lines else "it ended at once")

  def _resources(self) -> dict[str, float]:
    """Return what Ray reserves for each process of a replica."""
    section = self._section
    needed = {"CPU": section.replica_cpus, "GPU": section.replica_gpus}
    return {name: float(count) for name, count in needed.items() if count}

  def _most(self, resource: str) -> float:
    """Return how much of a resource the largest host of the cluster has."""
    return max(
      (
        node["Resources"].get(resource, 0.0)
        for node in self._ray.nodes()
        if node["Alive"]
      ),
      default=0.0,
    )

  def _check_resources(self) -> None:
    """Check that the cluster can hold a process of a replica, and a pool.

    Raises:
      ConfigError: it has no such host.
    """
    section, needed = self._section, self._resources()
    best = {name: self._most(name) for name in needed}
    for name, count in needed.items():
      sections.require(
        best[name] >= count,
        f"cluster.replica_{name.lower()}s",
        f"no host of the cluster has {count:g} {name}; the largest has"
        f" {best[name]:g}",
      )
    if section.reward_pools:
      most = self._most("CPU")
      sections.require(
        most >= self._reward_workers,
        "cluster.reward_pools",
        f"no host of the cluster has {self._reward_workers} CPU"
        f" (task.reward_workers); the largest has {most:g}",
      )

  def check_hosts(
    self,
    versions: dict[str, str],
    probe: tuple[pathlib.Path, str],
    check: Callable[[], None],
  ) -> None:
    """Check that at least one host of the cluster can have a replica.

    If replicas of an earlier start wait there, they hold what this would need.
    They are checked when they are attached.

    Args:
      versions: those that a replica's process has to have.
      probe: a file that its host has to see, and what it contains.
      check: is called now and then, and may raise.

    Raises:
      ConfigError: no host has room for a replica in time, or the first that has
        does not fit.
    """
    if any(map(self._waiting_actor, range(self._section.replicas))):
      return
    options: dict[str, Any] = {
      "num_cpus": self._section.replica_cpus,
      "num_gpus": self._section.replica_gpus,
      "scheduling_strategy": "SPREAD",
      "max_retries": 0,
      "runtime_env": {"env_vars": self._environment},
    }
    task = self._ray.remote(**options)(hosts.facts)
    asked_s = time.time()
    waiting = [task.remote(probe[0]) for _ in range(self._num_processes)]
    deadline = supervisor_lib.Deadline(self._section.start_timeout_s)
    done: list[Any] = []
    while not done:
      check()
      if (wait_s := deadline.next_wait_s()) == 0:
        raise sections.ConfigError(
          f"cluster.replicas: no host had room for a replica in"
          f" {self._section.start_timeout_s:g} s (cluster.start_timeout_s);"
          f" {self.missing()}"
        )
      done, waiting = self._ray.wait(waiting, timeout=wait_s)
    for reference in done:
      try:
        why_not = hosts.difference(
          self._ray.get(reference), probe, versions, asked_s
        )
      except self._ray.exceptions.RayError as error:
        why_not = f"cluster.address: {ray_handle.one_line(error)}"
      if why_not is not None:
        raise sections.ConfigError(why_not)
    for reference in waiting:
      self._ray.cancel(reference)

  def missing(self) -> str:
    """Return what the cluster has and what all replicas need, as a sentence."""
    total = self._ray.cluster_resources()
    free = self._ray.available_resources()
    needed = self._resources()
    parts = [
      f"{self._num_processes * count:g} {name} of which the cluster has"
      f" {total.get(name, 0):g}, {free.get(name, 0):g} of them free"
      for name, count in needed.items()
    ]
    return f"{self._section.replicas} replicas need {', '.join(parts)}"

  def _name(self, place: int) -> str:
    return f"{self._run_name}-{place}"

  def _waiting_actor(self, place: int) -> Any:
    """Return the replica of a place that an earlier start left, or None."""
    if self._is_own:
      return None
    try:
      return self._ray.get_actor(self._name(place), namespace=_NAMESPACE)
    except ValueError:
      return None

  def launch(self, place: int) -> ray_handle.RayHandle:
    """Return the replica of a place, which an earlier start may have made."""
    ray, section = self._ray, self._section
    handle = functools.partial(
      ray_handle.RayHandle,
      ray,
      num_processes=section.replica_processes,
      timeout_s=section.start_timeout_s,
    )
    if (waiting := self._waiting_actor(place)) is not None:
      return handle(waiting)
    options: dict[str, Any] = {
      "num_cpus": section.replica_cpus,
      "num_gpus": section.replica_gpus,
      "max_concurrency": _CONCURRENCY,
      "max_restarts": 0,
      "namespace": _NAMESPACE,
      "runtime_env": {"env_vars": self._environment},
    }
    name: dict[str, Any] = {}
    if not self._is_own:
      # It outlives this process, and waits for the next start of the run, which
      # finds it by its name. A process that has just ended may still have that
      # name. Then `attach` says that it is lost.
      options["lifetime"] = "detached"
      name = {"name": self._name(place), "get_if_exists": True}
    places: list[dict[str, Any]] = [{}] * section.replica_processes
    if section.replica_tpu:
      tpu_slices = importlib.import_module("jaxrl_async.cluster.tpu_slices")
      if (before := self._groups.pop(place, None)) is not None:
        before.shutdown()
      self._groups[place], places = tpu_slices.reserve(
        section.replica_tpu, len(places)
      )
    lead = ray.remote(ray_handle.Actor).options(**options | places[0] | name)
    follower = ray.remote(ray_handle.Follower)
    # They end with the first process of the replica, so they need no names.
    followers = [
      follower.options(**options | where).remote(section.start_timeout_s)
      for where in places[1:]
    ]
    return handle(lead.remote(), followers)

  def launch_rewards(self, place: int) -> ray_rewards.RewardHandle:
    """Start the process of a pool that scores; any thread may call this."""
    del place  # all are alike
    return ray_rewards.launch(self._ray, self._reward_workers)

  def close(self) -> None:
    """Disconnect, and end Ray if it was started here."""
    for group in self._groups.values():
      group.shutdown()
    self._closing.close()


def _check_answers(address: str) -> None:
  """Check that something listens at an address.

  Ray would end this process if nothing did.

  Raises:
    ConfigError: nothing does.
  """
  host, _, port = address.rpartition(":")
  try:
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
  except OSError as error:
    raise sections.ConfigError(
      f"cluster.address: {address} does not answer ({error}); start Ray there"
      " with `ray start --head`"
    ) from error


def _end(process: subprocess.Popen[str]) -> None:
  """End `local_ray`, and all processes of Ray with it."""
  assert process.stdin is not None
  process.stdin.close()
  try:
    process.wait(_END_S)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_name(workdir: pathlib.Path) -> str:
  """Return a name that is the same at every start on this workdir."""
  digest = hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()
  return f"run-{digest[:16]}"
