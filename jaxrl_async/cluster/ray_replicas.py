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

from jaxrl_async.cluster import cluster_hosts
from jaxrl_async.cluster import environment as environment_lib
from jaxrl_async.cluster import ray_handle
from jaxrl_async.cluster import tpu_slices
from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib

_NAMESPACE = "jaxrl_async"
# Methods of one actor that may run at a time: an attachment, a collection, an
# evaluation and deliveries, and those of a coordinator that has ended.
_CONCURRENCY = 16
_END_S = 20.0
_CONNECT_S = 10.0
_LOCAL_RAY = "jaxrl_async.cluster.local_ray"
_SLOW_START = "timed out during startup"


class _SlowStart(Exception):
  """Ray has given up its start on this machine, because it took too long."""


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

  Attributes:
    hosts: those of the cluster.
  """

  def __init__(
    self,
    section: sections.ClusterSection,
    *,
    run_name: str,
    environment: Mapping[str, str],
  ):
    """Start Ray on this machine, or connect to the cluster of the section.

    Args:
      section: of the config.
      run_name: the same at every start of this run, and of no other one.
      environment: variables for the processes of replicas.

    Raises:
      ConfigError: Ray is not installed, does not start or cannot be reached.
    """
    environment_lib.set_for_ray(section.address)
    self._ray = _import_ray()
    self._section = section
    self._run_name = run_name
    self._environment = dict(environment)
    self._is_own = not section.address
    self._num_processes = section.replicas * section.replica_processes
    self.hosts = cluster_hosts.ClusterHosts(self._ray, section, environment)
    self._slices: tpu_slices.Slices | None = None
    if section.replica_tpu:
      self._slices = tpu_slices.Slices(
        self._ray,
        importlib.import_module("ray.util.tpu"),
        importlib.import_module("ray.util.scheduling_strategies"),
      )
    if section.address not in ("", "auto"):
      _check_answers(section.address)
    end_s = time.monotonic() + section.start_timeout_s
    with contextlib.ExitStack() as closing:
      address = section.address or self._start(closing, end_s)
      self._within(
        lambda: self._ray.init(
          address=address,
          namespace=_NAMESPACE,
          logging_level=logging.ERROR,
          log_to_driver=False,
        ),
        end_s - time.monotonic(),
      )
      closing.callback(self._ray.shutdown)
      self._closing = closing.pop_all()

  def _start(self, closing: contextlib.ExitStack, end_s: float) -> str:
    """Start Ray on this machine, and return its address.

    Ray has a limit of its own for this, which is too short for a busy machine.
    Then it is started again.

    Raises:
      ConfigError: it does not start.
    """
    section = self._section
    # Replicas share the cores of this machine if it has too few.
    wanted = self._num_processes * section.replica_cpus
    num_cpus = max(os.cpu_count() or 1, math.ceil(wanted))
    while True:
      with contextlib.ExitStack() as starting:
        try:
          address = self._start_once(
            starting, num_cpus, end_s - time.monotonic()
          )
        except _SlowStart:
          continue
        closing.push(starting.pop_all())
        return address

  def _start_once(
    self, closing: contextlib.ExitStack, num_cpus: int, timeout_s: float
  ) -> str:
    """Start Ray on this machine, and return its address.

    Raises:
      _SlowStart: Ray has given its start up.
      ConfigError: it does not start.
    """
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
    self._within(lambda: self._read_address(process, errors), timeout_s)
    return self._address

  def _within(self, function: Callable[[], Any], timeout_s: float) -> None:
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
    # Ray's own text of a wrong token is "Failed to connect".
    hint = (
      "; Ray has to run there, with the token and the TLS settings of this"
      " process"
      if self._section.address
      else ""
    )
    try:
      done.result(timeout=max(timeout_s, 0.0))
    except TimeoutError:
      raise sections.ConfigError(
        f"cluster.address: Ray ({where}) did not answer in {limit_s:g} s"
        f" (cluster.start_timeout_s){hint}"
      ) from None
    except (
      *(RuntimeError, ConnectionError, ValueError, OSError),
      self._ray.exceptions.RayError,
    ) as error:
      raise sections.ConfigError(
        f"cluster.address: Ray ({where}): {ray_handle.one_line(error)}{hint}"
      ) from error

  def _read_address(
    self, process: subprocess.Popen[str], errors: IO[str]
  ) -> None:
    """Wait for the address that `local_ray` prints.

    Raises:
      _SlowStart: Ray has given its start up.
      RuntimeError: it ended before.
    """
    assert process.stdout is not None
    self._address = process.stdout.readline().strip()
    if not self._address:
      errors.seek(0)
      lines = [line for line in errors.read().splitlines() if line.strip()]
      line = lines[-1] if lines else "it ended at once"
      raise _SlowStart(line) if _SLOW_START in line else RuntimeError(line)

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
    """Return a handle that finds or makes the replica of a place."""
    return ray_handle.RayHandle(
      self._ray,
      functools.partial(self._begin, place),
      num_processes=self._section.replica_processes,
      timeout_s=self._section.start_timeout_s,
    )

  def _begin(self, place: int) -> ray_handle.Actors:
    """Return the actors of a place, which an earlier start may have made.

    Any thread may call this.

    Raises:
      ReplicaLost, ReplicaFailed: there is no slice for it.
    """
    ray, section = self._ray, self._section
    if (waiting := self._waiting_actor(place)) is not None:
      return ray_handle.Actors(lead=waiting, is_found=True)
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
    if self._slices is not None:
      places = self._slices.reserve(
        section.replica_tpu,
        len(places),
        self._name(place),
        section.start_timeout_s,
      )
    lead = ray.remote(ray_handle.Actor).options(**options | places[0] | name)
    follower = ray.remote(ray_handle.Follower)
    # They end with the first process of the replica, so they need no names.
    return ray_handle.Actors(
      lead=lead.remote(section.coordinator_timeout_s),
      followers=tuple(
        follower.options(**options | where).remote(section.start_timeout_s)
        for where in places[1:]
      ),
    )

  def close(self) -> None:
    """Disconnect, and end Ray if it was started here.

    The replicas have been killed before.
    """
    if self._slices is not None:
      for place in range(self._section.replicas):
        self._slices.release(self._name(place))
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
  assert process.stdout is not None
  process.stdout.close()


def run_name(workdir: pathlib.Path) -> str:
  """Return a name that is the same at every start on this workdir."""
  digest = hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()
  return f"run-{digest[:16]}"
