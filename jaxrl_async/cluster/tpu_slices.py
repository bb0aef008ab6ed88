"""TPU slices for replicas, through a part of Ray that may still change."""

import importlib
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.devices import tpu_chips

# Ray's names of the chips, where they differ.
_VERSIONS = {"v5e": "v5litepod"}


def reserve(name: str) -> tuple[Any, dict[str, Any]]:
  """Reserve a slice for one replica.

  Args:
    name: such as v5p:2x2x1.

  Returns:
    The reservation, which has `shutdown`, and the options of the actor.

  Raises:
    ConfigError: the slice has several hosts, which one process cannot use.
  """
  tpu = importlib.import_module("ray.util.tpu")
  strategies = importlib.import_module("ray.util.scheduling_strategies")
  tpu_chips.parse(name)
  version, _, topology = name.partition(":")
  group = tpu.slice_placement_group(
    topology=topology, accelerator_version=_VERSIONS.get(version, version)
  )
  if group.num_hosts != 1:
    group.shutdown()
    raise sections.ConfigError(
      f"cluster.replica_tpu: {name} has {group.num_hosts} hosts, and a replica"
      " is one process; use a slice of one host"
    )
  strategy = strategies.PlacementGroupSchedulingStrategy(
    placement_group=group.placement_group
  )
  return group, {
    "resources": {"TPU": group.chips_per_host},
    "scheduling_strategy": strategy,
  }
