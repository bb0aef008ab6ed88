"""The hosts of a cluster, with a stand-in for what Ray says of them."""

import dataclasses
import shutil
import threading
import time
import types

import pytest

from jaxrl_async.cluster import cluster_hosts
from jaxrl_async.cluster import hosts
from jaxrl_async.config import sections


def node(name, *, is_alive=True, **resources):
  return {
    "NodeID": f"{len(name):056x}",
    "NodeManagerHostname": name,
    "Alive": is_alive,
    "Resources": resources,
  }


class RayError(Exception):
  pass


class TaskUnschedulable(RayError):
  pass


class Ray:
  """A cluster whose hosts answer as they are told to."""

  exceptions = types.SimpleNamespace(
    RayError=RayError,
    TaskUnschedulableError=TaskUnschedulable,
    NodeDiedError=type("NodeDiedError", (RayError,), {}),
  )

  def __init__(self, *nodes):
    self.all = list(nodes)
    self.answers = {}  # by NodeID; None is for the first with room
    self.asked = []

  def nodes(self):
    return self.all

  def cluster_resources(self):
    return {"CPU": 8.0}

  available_resources = cluster_resources

  def remote(self, *, scheduling_strategy, **options):
    where = getattr(scheduling_strategy, "node_id", None)

    def ask(function):
      assert function is hosts.facts
      self.asked.append(where)
      return types.SimpleNamespace(remote=lambda probe: (where, probe))

    return ask

  def wait(self, calls, timeout):
    ready = [c for c in calls if self.answers.get(c[0]) != "silence"]
    if not ready:
      time.sleep(timeout)
    return ready[:1], calls

  def get(self, call):
    where, probe = call
    answer = self.answers.get(where)
    if isinstance(answer, Exception):
      raise answer
    return dataclasses.replace(hosts.facts(probe), **(answer or {}))


def made(ray, **named):
  section = sections.ClusterSection(kind=sections.ClusterKind.RAY, **named)
  return cluster_hosts.ClusterHosts(ray, section, {})


def wait(found, num_replicas=1, timeout_s=20.0):
  notes = []
  found.wait_for(num_replicas, timeout_s, lambda: None, notes.append)
  return notes


def test_hosts_may_join_after_the_run(monkeypatch):
  monkeypatch.setattr(cluster_hosts, "_LOOK_S", 0.02)
  ray = Ray(node("head", CPU=4.0))
  assert wait(made(ray)) == []
  joining = threading.Timer(0.3, ray.all.append, [node("b", CPU=4.0, GPU=8.0)])
  joining.start()
  (note,) = wait(made(ray, replica_gpus=8))
  assert note == (
    "waiting for hosts to join the Ray cluster: no host of the cluster has 8"
    " GPU; the largest has 0 (cluster.replica_gpus)"
  )
  joining.join()


@pytest.mark.parametrize(
  "named, num_replicas, error",
  [
    ({"replica_gpus": 9}, 1, "cluster.replica_gpus: no host of .* has 9 GPU"),
    ({"replica_cpus": 5.0}, 1, "cluster.replica_cpus: no host"),
    (
      {"replica_tpu": "v5e:2x2"},
      1,
      "cluster.replica_tpu: no host of the cluster has 4 TPU; .* has 0",
    ),
    (
      {"replica_gpus": 4, "replica_processes": 2},
      2,
      "cluster.replicas: .* can hold 2 of the 4 processes of 2 replicas",
    ),
  ],
)
def test_too_few_hosts_are_one_line(named, num_replicas, error):
  ray = Ray(
    node("head", CPU=4.0),
    node("b", CPU=4.0, GPU=8.0),
    node("dead", is_alive=False, CPU=64.0, GPU=64.0, TPU=4.0),
  )
  found = made(ray, **named)
  with pytest.raises(sections.ConfigError, match=error):
    wait(found, num_replicas, timeout_s=0.0)


@pytest.fixture
def probe(tmp_path):
  path = tmp_path / "probe"
  path.write_text("here")
  return path, "here"


def check(ray, probe, **named):
  # Only where a host keeps silent does it matter how long they may take.
  timeout_s = 1.0 if "silence" in ray.answers.values() else 60.0
  found = made(ray, replica_gpus=8, start_timeout_s=timeout_s, **named)
  found.check(hosts.versions(), probe, lambda: None)


def gpu_hosts():
  return Ray(
    node("head", CPU=4.0),
    node("b", CPU=4.0, GPU=8.0),
    node("cc", CPU=4.0, GPU=8.0),
  )


def test_all_hosts_that_can_have_a_replica_are_asked(probe):
  ray = gpu_hosts()
  first, second = (x["NodeID"] for x in ray.all[1:])
  check(ray, probe)
  assert ray.asked == [first, second]


@pytest.mark.parametrize(
  "answer, error",
  [
    ({"versions": {}, "host": "cc"}, "cluster: cc has python None instead of"),
    ({"probe": None, "host": "cc"}, "transfer.directory: .* on cc is not the"),
    ("silence", "cluster.replicas: cc did not answer in 1 s .*; 1 replicas"),
    (RayError("a\nproblem"), "cluster.address: cc did not answer: a problem"),
  ],
)
def test_a_host_that_does_not_fit_is_named_whoever_answers_first(
  probe, answer, error
):
  ray = gpu_hosts()
  ray.answers[ray.all[2]["NodeID"]] = answer
  with pytest.raises(sections.ConfigError, match=f"^{error}"):
    check(ray, probe)


def test_a_host_that_leaves_meanwhile_is_no_error(probe):
  ray = gpu_hosts()
  ray.answers[ray.all[2]["NodeID"]] = TaskUnschedulable("the node is gone")
  check(ray, probe)


def test_the_file_by_which_hosts_know_a_directory_is_made_again(tmp_path):
  probe = tmp_path / "transfer" / "probe", "of this run"
  hosts.write_probe(probe)
  written = probe[0].stat().st_ino
  hosts.write_probe(probe)  # a host may be reading it
  assert probe[0].stat().st_ino == written
  shutil.rmtree(tmp_path / "transfer")
  hosts.write_probe(probe)
  assert probe[0].read_text() == "of this run"
  # What a start that was killed has left is replaced.
  hosts.write_probe((probe[0], "of the next start"))
  assert probe[0].read_text() == "of the next start"
