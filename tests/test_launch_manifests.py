"""The objects of Kubernetes and of Ray's cluster launcher in launch/."""

import math
import re

import custom_resources
import jsonschema
import kubernetes_validate
import launch_world
import pytest
from ray.autoscaler._private import util as ray_launcher
import yaml

from jaxrl_async.devices import tpu_chips

KUBERNETES = "1.37"
OWN_SCHEMAS = {
  "JobSet": custom_resources.JOB_SET,
  "RayCluster": custom_resources.RAY_CLUSTER,
}
RUNS = [launch_world.LAUNCH / "gke" / name for name in ("tpu.yaml", "gpu.yaml")]


def by_name(path):
  return path.name


def as_job(spec):
  about = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
  return about | {"spec": spec}


def as_template(template):
  about = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
  return about | {"template": template}


def check(thing):
  """Raise an error if Kubernetes, JobSet or KubeRay would refuse an object."""
  if thing["kind"] not in OWN_SCHEMAS:
    kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    return
  jsonschema.validate(thing, OWN_SCHEMAS[thing["kind"]])
  if thing["kind"] == "JobSet":
    for job in thing["spec"]["replicatedJobs"]:
      assert job["template"].keys() == {"spec"}
      job_object = as_job(job["template"]["spec"])
      kubernetes_validate.validate(job_object, KUBERNETES, strict=True)
  for template in launch_world.templates(thing):
    # KubeRay fills in what a pod lacks, as Kubernetes does.
    kubernetes_validate.validate(as_template(template), KUBERNETES, strict=True)


@pytest.mark.parametrize("path", launch_world.MANIFESTS, ids=by_name)
def test_objects_have_the_fields_that_their_kinds_define(path):
  for thing in launch_world.objects(path).values():
    check(thing)


def pod_of(thing):
  return next(launch_world.templates(thing))["spec"]


@pytest.mark.parametrize("path", RUNS, ids=by_name)
def test_scripts_in_pods_pass_shellcheck(path, tmp_path):
  scripts = list(launch_world.scripts_in(path))
  assert len(scripts) == 1
  script = tmp_path / "script.sh"
  script.write_text(scripts[0])
  assert not launch_world.shellcheck(script)


@pytest.mark.parametrize("path", RUNS, ids=by_name)
def test_pods_are_inside_the_boundary_and_have_the_token(path):
  shared = launch_world.objects(launch_world.LAUNCH / "gke" / "shared.yaml")
  policy, claim = shared["NetworkPolicy"], shared["PersistentVolumeClaim"]
  labels = policy["spec"]["podSelector"]["matchLabels"]
  assert policy["spec"]["ingress"] == [
    {"from": [{"podSelector": {"matchLabels": labels}}]}
  ]
  cluster, trainer = launch_world.objects(path).values()
  for thing in (cluster, trainer):
    assert thing["metadata"]["namespace"] == policy["metadata"]["namespace"]
    for template in launch_world.templates(thing):
      assert template["metadata"]["labels"] == labels
      pod = template["spec"]
      assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
      for volume in pod.get("volumes", []):
        name = volume["persistentVolumeClaim"]["claimName"]
        assert name == claim["metadata"]["name"]
  assert (
    claim["spec"]["storageClassName"]
    == (shared["StorageClass"]["metadata"]["name"])
  )
  # KubeRay names the secret after the cluster.
  (container,) = pod_of(trainer)["containers"]
  environment = {variable["name"]: variable for variable in container["env"]}
  assert environment["RAY_AUTH_MODE"]["value"] == "token"
  assert environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
    "name": cluster["metadata"]["name"],
    "key": "auth_token",
  }
  assert (
    f"--address={cluster['metadata']['name']}-head-svc:6379"
    in (container["args"][0])
  )


def accelerators(pod):
  (container,) = pod["containers"]
  limits = container["resources"]["limits"]
  (name,) = limits.keys() & {"google.com/tpu", "nvidia.com/gpu"}
  assert container["resources"]["requests"][name] == limits[name]
  return int(limits[name])


@pytest.mark.parametrize("path", RUNS, ids=by_name)
def test_pods_processes_and_meshes_fit_together(path):
  cluster, trainer = launch_world.objects(path).values()
  (run,) = launch_world.runs_in(next(launch_world.scripts_in(path)))
  config = launch_world.config_of(run)
  (jobs,) = trainer["spec"]["replicatedJobs"]
  spec = jobs["template"]["spec"]
  assert spec["completions"] == spec["parallelism"]
  # A pod that fails is not restarted alone.
  assert spec["template"]["spec"]["restartPolicy"] == "Never"
  assert spec["parallelism"] == config.cluster.trainer_processes
  mesh = config.mesh
  assert accelerators(spec["template"]["spec"]) * spec["parallelism"] == (
    mesh.train_data * mesh.train_fsdp * mesh.train_context * mesh.train_tensor
  )
  (group,) = cluster["spec"]["workerGroupSpecs"]
  assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
  hosts = group["replicas"] * group.get("numOfHosts", 1)
  devices = hosts * accelerators(group["template"]["spec"])
  of_replica = mesh.rollout_data * mesh.rollout_tensor
  assert devices == config.cluster.replicas * of_replica
  assert config.transfer.directory.startswith("/shared/")
  if path.name == "gpu.yaml":
    assert config.cluster.replica_gpus == of_replica
    name, job = trainer["metadata"]["name"], jobs["name"]
    assert f"--coordinator_address={name}-{job}-0-0.{name}:8476" in run
    assert f"--num_processes={spec['parallelism']}" in run
    return
  _, chip, shape = tpu_chips.parse(config.cluster.replica_tpu)
  assert group["replicas"] == config.cluster.replicas
  for pod, topology, size in (
    (group["template"]["spec"], shape, of_replica),
    (spec["template"]["spec"], "2x2x2", 8),
  ):
    assert pod["nodeSelector"] == {
      "cloud.google.com/gke-tpu-accelerator": f"tpu-{chip}-slice",
      "cloud.google.com/gke-tpu-topology": topology,
    }
    assert math.prod(map(int, topology.split("x"))) == size


def test_ray_accepts_the_file_of_its_cluster_launcher():
  path = launch_world.LAUNCH / "ray_cluster.yaml"
  config = yaml.safe_load(path.read_text())
  ray_launcher.validate_config(ray_launcher.prepare_config(config))
  with pytest.raises(jsonschema.ValidationError):
    ray_launcher.validate_config(
      ray_launcher.prepare_config(config | {"setup_command": []})
    )


def test_ray_on_machines_of_your_own_has_a_token_and_keeps_the_trainers_gpus():
  path = launch_world.LAUNCH / "ray_cluster.yaml"
  config = yaml.safe_load(path.read_text())
  head = config["head_start_ray_commands"][-1]
  worker = config["worker_start_ray_commands"][-1]
  assert "--head" in head and "--num-gpus=0" in head
  assert "--include-dashboard=false" in head
  assert "--num-gpus" not in worker
  for command in (head, worker):
    assert re.match(r"RAY_AUTH_MODE=token \S+/ray start ", command)
  assert "~/.ray/auth_token" in config["file_mounts"]
