"""The scripts for GKE and for machines of your own."""

import os
import re
import subprocess

import launch_world
import pytest
import yaml

MANIFEST = "--manifest=launch/gke/tpu.yaml"
A_RUN = ("--config=configs/gsm8k.py:1.5b", "--workdir=/shared/run1")


def test_a_run_on_gke_is_applied_with_its_image_and_ends_by_name():
  (start,) = launch_world.gke("start", MANIFEST, "--image=repo/image:1")
  assert start.startswith("sed 's|IMAGE|repo/image:1|' launch/gke/tpu.yaml |")
  (check,) = launch_world.gke("check", MANIFEST, "--image=repo/image:1")
  assert check.endswith("kubectl apply -f - --dry-run=server")
  (logs,) = launch_world.gke("logs", MANIFEST)
  (stop,) = launch_world.gke("stop", MANIFEST)
  (status,) = launch_world.gke("status", MANIFEST)
  kinds = launch_world.objects(launch_world.LAUNCH / "gke" / "tpu.yaml")
  trainer = kinds["JobSet"]["metadata"]["name"]
  replicas = kinds["RayCluster"]["metadata"]["name"]
  assert f"jobset-name={trainer}" in logs
  assert f"jobset/{trainer} raycluster/{replicas}" in stop
  (template, *_) = launch_world.templates(kinds["JobSet"])
  assert template["metadata"]["labels"] == {
    "jaxrl-async/run": status.partition("jaxrl-async/run=")[2]
  }
  namespace, shared = launch_world.gke("create")
  assert namespace == "kubectl create namespace jaxrl"
  assert shared.endswith("launch/gke/shared.yaml")


def test_a_real_start_passes_the_manifest_with_the_image(tmp_path):
  launch_world.stand_in(tmp_path / "bin", "kubectl", 'cat >"$CALLS.applied"')
  environment = {
    "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    "CALLS": str(tmp_path / "calls"),
  }
  arguments = ("start", MANIFEST, "--image=repo/image:1")
  launch_world.output(launch_world.GKE, *arguments, **environment)
  assert (tmp_path / "calls").read_text() == "kubectl apply -f -\n"
  applied = (tmp_path / "calls.applied").read_text()
  assert "image: repo/image:1" in applied and "IMAGE\n" not in applied
  assert len(list(yaml.safe_load_all(applied))) == 2


def test_the_dry_mode_shows_the_commands_of_every_machine():
  commands = launch_world.own_machines("up")
  cluster = yaml.safe_load(
    (launch_world.LAUNCH / "ray_cluster.yaml").read_text()
  )
  provider = cluster["provider"]
  hosts = [provider["head_ip"], *provider["worker_ips"]]
  for host in hosts:
    own = [c for c in commands if f"@{host}" in c]
    start = "head" if host == hosts[0] else "worker"
    wanted = cluster["setup_commands"] + cluster[f"{start}_start_ray_commands"]
    assert [
      c.partition(f"@{host} ")[2] for c in own if c.startswith("ssh")
    ] == (wanted)
    assert sum(c.startswith("rsync") for c in own) == len(
      cluster["file_mounts"]
    )
  assert commands[0].endswith("get-auth-token --generate")
  assert re.search("ray up --yes .*ray_cluster.yaml$", commands[-1])


def test_the_run_gets_the_cluster_and_is_stopped_like_by_hand():
  (start,) = launch_world.own_machines(
    "start", *A_RUN, "--config.task.system=a b"
  )
  # As the shell of the first machine reads it.
  done = subprocess.run(
    ["bash", "-c", f"printf '%s\\n' {start}"], capture_output=True, text=True
  )
  command = done.stdout.splitlines()[-1]
  assert command.startswith("tmux new-session -d -s jaxrl ")
  assert "--config.cluster.kind=ray --config.cluster.address=auto" in command
  assert "a b" in command and "tee -ia" in command
  (stop,) = launch_world.own_machines("stop")
  assert "tmux send-keys -t jaxrl C-c" in stop


@pytest.mark.parametrize(
  ("script", "arguments", "part"),
  [
    (launch_world.GKE, ["fly"], "unknown command fly"),
    (launch_world.GKE, ["start"], "--manifest=FILE is missing"),
    (launch_world.GKE, ["start", MANIFEST], "--image=IMAGE is missing"),
    (
      launch_world.GKE,
      ["stop", "--manifest=launch/gke/shared.yaml"],
      "no JobSet whose name ends in -trainer",
    ),
    (launch_world.OWN_MACHINES, ["start"], "--config and --workdir"),
    (launch_world.OWN_MACHINES, ["up", "--x"], "unknown option --x"),
    (launch_world.OWN_MACHINES, ["fly"], "unknown command fly"),
  ],
)
def test_wrong_options_are_reported_in_one_line(script, arguments, part):
  done = subprocess.run(
    [script, *arguments], cwd=launch_world.ROOT, capture_output=True, text=True
  )
  assert done.returncode == 1 and not done.stdout
  assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
  assert part in done.stderr
