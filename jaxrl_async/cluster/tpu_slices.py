"""TPU slices for replicas, through a part of Ray that may still change."""

import importlib
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips

# Ray's names of the chips, where they differ.
_VERSIONS = {"v5e": "v5litepod"}


def reserve(name: str, num_hosts: int) -> tuple[Any, list[dict[str, Any]]]:
  """Reserve a slice for one replica.

  Args:
    name: such as v5p:2x2x1.
    num_hosts: that the slice has to have.

  Returns:
    The reservation, which has `shutdown`, and for each host the options of the
    actor there.

  Raises:
    ConfigError: the slice has another number of hosts.
  """
  tpu = importlib.import_module("ray.util.tpu")
  strategies = importlib.import_module("ray.util.scheduling_strategies")
  tpu_chips.parse(name)
  version, _, topology = name.partition(":")
  group = tpu.slice_placement_group(
    topology=topology, accelerator_version=_VERSIONS.get(version, version)
  )
  if group.num_hosts != num_hosts:
    group.shutdown()
    raise sections.ConfigError(
      f"cluster.replica_processes: {num_hosts}, and {name} has"
      f" {group.num_hosts} hosts, each of which needs one"
    )
  return group, [
    {
      "resources": {"TPU": group.chips_per_host},
      "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
        placement_group=group.placement_group,
        placement_group_bundle_index=host,
      ),
    }
    for host in range(num_hosts)
  ]
