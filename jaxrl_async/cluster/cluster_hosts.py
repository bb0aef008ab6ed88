"""The hosts of a Ray cluster: whether there are enough, and whether they fit.

Both are looked at before a run begins, so that what is wrong is told at once.
A host that joins later is checked when a replica is attached there.
"""

from collections.abc import Callable, Iterator, Mapping
import importlib
import sys
import time
from typing import Any

from jaxrl_async.cluster import hosts
from jaxrl_async.cluster import ray_handle
from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips
from jaxrl_async.processes import supervisor as supervisor_lib

_LOOK_S = 0.5


class ClusterHosts:
  """The hosts on which replicas may be.

  Threads: one at a time.
  """

  def __init__(
    self,
    ray: Any,
    section: sections.ClusterSection,
    environment: Mapping[str, str],
  ):
    self._ray = ray
    self._section = section
    self._environment = dict(environment)
    # What Ray reserves for each process of a replica.
    needed = {"CPU": section.replica_cpus, "GPU": section.replica_gpus}
    if section.replica_tpu:
      chips = tpu_chips.num_chips(section.replica_tpu)
      needed["TPU"] = chips // section.replica_processes
    self._needed = {name: float(n) for name, n in needed.items() if n}

  def wait_for(
    self,
    num_replicas: int,
    timeout_s: float,
    check: Callable[[], None],
    note: Callable[[str], None],
  ) -> None:
    """Wait until the cluster has hosts for so many replicas, and for a pool.

    Hosts may join the cluster after this process.

    Args:
      num_replicas: that the run needs at the start.
      check: is called now and then, and may raise.
      note: is called with a line if there is something to wait for.

    Raises:
      ConfigError: the cluster has no such hosts in time.
    """
    deadline = supervisor_lib.Deadline(timeout_s)
    has_told = False
    while (lack := self._lack(num_replicas)) is not None:
      field, text = lack
      if deadline.next_wait_s() == 0:
        raise sections.ConfigError(f"{field}: {text}")
      if not has_told:
        note(f"waiting for hosts to join the Ray cluster: {text} ({field})")
        has_told = True
      check()
      time.sleep(_LOOK_S)

  def check(
    self,
    versions: dict[str, str],
    probe: hosts.Probe,
    check: Callable[[], None],
  ) -> None:
    """Check that all hosts on which a replica may be can work with this one.

    Args:
      versions: those that a replica's process has to have.
      probe: what this process has written for others to see.
      check: is called now and then, and may raise.

    Raises:
      ConfigError: a host does not fit or does not answer.
    """
    timeout_s = self._section.start_timeout_s
    deadline = supervisor_lib.Deadline(timeout_s)
    asked = self._ask_all(probe)
    while asked:
      check()
      if (wait_s := deadline.next_wait_s()) == 0:
        raise sections.ConfigError(
          f"cluster.replicas: {next(iter(asked.values()))} in {timeout_s:g} s"
          f" (cluster.start_timeout_s); {self.missing()}"
        )
      for found in self._answers(asked, wait_s):
        why_not = hosts.difference(found, probe, versions)
        if why_not is not None:
          raise sections.ConfigError(why_not)

  def missing(self) -> str:
    """Return what the cluster has and what all replicas need, as a sentence."""
    total = self._ray.cluster_resources()
    free = self._ray.available_resources()
    count = self._section.replicas * self._section.replica_processes
    parts = [
      f"{count * each:g} {name} of which the cluster has"
      f" {total.get(name, 0):g}, {free.get(name, 0):g} of them free"
      for name, each in self._needed.items()
    ]
    return f"{self._section.replicas} replicas need {', '.join(parts)}"

  def _nodes(self) -> list[dict[str, Any]]:
    return [node for node in self._ray.nodes() if node["Alive"]]

  def _room(self, node: Mapping[str, Any]) -> int:
    """Return how many processes of replicas a host can hold if it is free."""
    return min(
      (
        int(node["Resources"].get(name, 0.0) // each)
        for name, each in self._needed.items()
      ),
      default=sys.maxsize,
    )

  def _lack(self, num_replicas: int) -> tuple[str, str] | None:
    """Return which field asks for more than there is, and what; or None."""
    nodes = self._nodes()

    def most(resource: str) -> float:
      return max((n["Resources"].get(resource, 0.0) for n in nodes), default=0)

    for name, count in self._needed.items():
      if most(name) < count:
        field = "tpu" if name == "TPU" else f"{name.lower()}s"
        return (
          f"cluster.replica_{field}",
          f"no host of the cluster has {count:g} {name}; the largest has"
          f" {most(name):g}",
        )
    room = sum(map(self._room, nodes))
    wanted = num_replicas * self._section.replica_processes
    if room < wanted:
      return (
        "cluster.replicas",
        f"the hosts of the cluster can hold {room} of the {wanted} processes of"
        f" {num_replicas} replicas (cluster.min_replicas)",
      )
    return None

  def _ask_all(self, probe: hosts.Probe) -> dict[Any, str]:
    """Ask all hosts that can hold a replica, whatever is there now.

    Returns:
      From each call to what it means if it does not end.
    """
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    asked = {}
    for node in self._nodes():
      if self._room(node):
        where = strategies.NodeAffinitySchedulingStrategy(
          node["NodeID"], soft=False
        )
        task = self._ray.remote(
          num_cpus=0,
          num_gpus=0,
          max_retries=0,
          runtime_env={"env_vars": self._environment},
          scheduling_strategy=where,
        )(hosts.facts)
        asked[task.remote(probe)] = (
          f"{node['NodeManagerHostname']} did not answer"
        )
    return asked

  def _answers(
    self, asked: dict[Any, str], wait_s: float
  ) -> Iterator[hosts.Facts]:
    """Yield what hosts have answered, but for those that have left.

    Raises:
      ConfigError: one could not answer.
    """
    errors = self._ray.exceptions
    for call in self._ray.wait(list(asked), timeout=wait_s)[0]:
      what = asked.pop(call)
      try:
        yield self._ray.get(call)
      except (errors.TaskUnschedulableError, errors.NodeDiedError):
        continue
      except errors.RayError as error:
        raise sections.ConfigError(
          f"cluster.address: {what}: {ray_handle.one_line(error)}"
        ) from error
