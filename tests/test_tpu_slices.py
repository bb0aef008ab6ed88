"""TPU slices of replicas, with stand-ins for what Ray says of them."""

import types

import pytest

from jaxrl_async.cluster import tpu_slices
from jaxrl_async.rollout import remote


class Cluster:
  """Slices by the kinds that are free, and the reservations by name."""

  def __init__(self, free, num_hosts=2, is_whole=True, error=None):
    self.free = list(free)
    self.groups = {}
    self.num_hosts, self.is_whole, self.error = num_hosts, is_whole, error
    self.slices = tpu_slices.Slices(
      types.SimpleNamespace(util=self),
      self,
      types.SimpleNamespace(PlacementGroupSchedulingStrategy=dict),
    )

  # -- ray.util.tpu -----------------------------------------------------------

  def slice_placement_group(
    self, *, topology, accelerator_version, name, lifetime
  ):
    assert lifetime == "detached" and name not in self.groups
    if self.error is not None:
      raise self.error
    kind = f"{accelerator_version}:{topology}"
    if kind not in self.free:
      raise TimeoutError("Failed to reserve TPU head for slice")
    self.free.remove(kind)
    self.groups[name] = kind
    return types.SimpleNamespace(
      num_hosts=self.num_hosts,
      chips_per_host=4,
      placement_group=types.SimpleNamespace(
        wait=lambda timeout_s: self.is_whole, name=name
      ),
      shutdown=lambda: self.remove_placement_group(name),
    )

  # -- ray.util ---------------------------------------------------------------

  def get_placement_group(self, name):
    if name not in self.groups:
      raise ValueError(f"Failed to look up placement group with name: {name}")
    return name

  def remove_placement_group(self, name):
    self.free.append(self.groups.pop(name))


def reserve(cluster, name="run-0", num_hosts=2):
  return cluster.slices.reserve("v5e:2x4", num_hosts, name, 1.0)


def test_a_slice_is_found_again_by_its_name():
  cluster = Cluster(["v5litepod:2x4"])
  options = reserve(cluster)
  assert [x["resources"] for x in options] == [{"TPU": 4}, {"TPU": 4}]
  bundles = [x["scheduling_strategy"] for x in options]
  assert [x["placement_group_bundle_index"] for x in bundles] == [0, 1]
  assert {x["placement_group"].name for x in bundles} == {"run-0"}
  # Another start of the run replaces the replica: it has the slice again.
  assert len(reserve(cluster)) == 2 and cluster.free == []
  cluster.slices.release("run-0")
  cluster.slices.release("run-0")
  assert cluster.free == ["v5litepod:2x4"] and not cluster.groups


def test_a_slice_that_is_not_free_may_be_free_later():
  cluster = Cluster(["v5litepod:2x4"])
  reserve(cluster)
  with pytest.raises(remote.ReplicaLost, match="no v5e:2x4 is free"):
    reserve(cluster, "run-1")
  # Its first host is free, and the others are not.
  cluster = Cluster(["v5litepod:2x4"], is_whole=False)
  with pytest.raises(remote.ReplicaLost, match="no v5e:2x4 is free"):
    reserve(cluster)
  assert not cluster.groups


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_what_ray_refuses_is_one_line(kind):
  cluster = Cluster([], error=kind("Failed to\nreserve  TPU slice."))
  with pytest.raises(remote.ReplicaFailed) as found:
    reserve(cluster)
  assert str(found.value) == (
    "cluster.replica_tpu: v5e:2x4: Failed to reserve TPU slice."
  )


def test_a_slice_with_other_hosts_is_given_back():
  cluster = Cluster(["v5litepod:2x4"], num_hosts=1)
  with pytest.raises(remote.ReplicaFailed, match="replica_processes: 2, and"):
    reserve(cluster)
  assert not cluster.groups
