"""TPU slices for replicas, through a part of Ray that may still change.

A slice is reserved under the name of its replica, and detached: like the
replica, the reservation outlives the process that made it, so that the next
start of the run finds both. A replica that ends by itself gives it back; see
`ray_handle.Actor`.

To reserve a slice of several hosts, Ray looks for one whose first host is free,
and waits for that. So `reserve` is called in a thread that nothing waits for.
"""

from typing import Any

from jaxrl_async.devices import tpu_chips
from jaxrl_async.rollout import remote

# Ray's names of the chips, where they differ.
_VERSIONS = {"v5e": "v5litepod"}
_FIELD = "cluster.replica_tpu"


class Slices:
  """Reserves slices, and gives them back.

  Threads: any, as each replica has a name of its own.
  """

  def __init__(self, ray: Any, tpu: Any, strategies: Any):
    self._ray = ray
    self._tpu = tpu
    self._strategies = strategies

  def reserve(
    self, kind: str, num_hosts: int, name: str, timeout_s: float
  ) -> list[dict[str, Any]]:
    """Reserve a slice for a replica, and give its earlier one back.

    Args:
      kind: of the slice, such as v5p:2x2x1.
      num_hosts: that it has to have.
      name: of the reservation.
      timeout_s: how long to wait for all hosts of a slice to be free.

    Returns:
      For each host of the slice the options of the actor there.

    Raises:
      ReplicaLost: no slice is free; another attempt may find one.
      ReplicaFailed: there is no such slice, or it has another number of hosts.
    """
    self.release(name)
    tpu_chips.parse(kind)
    version, _, topology = kind.partition(":")
    try:
      group = self._tpu.slice_placement_group(
        topology=topology,
        accelerator_version=_VERSIONS.get(version, version),
        name=name,
        lifetime="detached",
      )
    except TimeoutError as error:
      raise remote.ReplicaLost(_not_free(kind)) from error
    except (RuntimeError, ValueError) as error:
      raise remote.ReplicaFailed(
        f"{_FIELD}: {kind}: {' '.join(str(error).split())}"
      ) from error
    if group.num_hosts != num_hosts:
      group.shutdown()
      raise remote.ReplicaFailed(
        f"cluster.replica_processes: {num_hosts}, and {kind} has"
        f" {group.num_hosts} hosts, each of which needs one"
      )
    # The first host may be free while others are not. So it is with a replica
    # of an earlier start, which still has its slice.
    if not group.placement_group.wait(timeout_s):
      group.shutdown()
      raise remote.ReplicaLost(_not_free(kind))
    strategy = self._strategies.PlacementGroupSchedulingStrategy
    return [
      {
        "resources": {"TPU": group.chips_per_host},
        "scheduling_strategy": strategy(
          placement_group=group.placement_group,
          placement_group_bundle_index=host,
        ),
      }
      for host in range(num_hosts)
    ]

  def release(self, name: str) -> None:
    """Give back the slice that is reserved under a name, if there is one."""
    try:
      group = self._ray.util.get_placement_group(name)
    except ValueError:
      return
    self._ray.util.remove_placement_group(group)


def _not_free(kind: str) -> str:
  return f"{_FIELD}: no {kind} is free"
