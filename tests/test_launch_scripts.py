"""The scripts that start runs on clusters, and the page about them."""

import math
import os
import re
import shlex
import signal
import stat
import subprocess
import time
import tomllib

import launch_world
import pytest

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.devices import tpu_chips

ROOT = launch_world.ROOT
SCRIPTS = [
  *(launch_world.TPU_POD, launch_world.SBATCH, launch_world.GKE),
  *(launch_world.OWN_MACHINES, ROOT / ".ci" / "run"),
]
TWO_SLICES = ("--accelerator_type=v5p-16", "--slices=2", "--nfs=10.0.0.2:/s")


def in_order(commands, *parts):
  """Whether the parts occur in commands, one after the other."""
  rest = iter(commands)
  return all(any(part in command for command in rest) for part in parts)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_passes_shellcheck_and_can_be_parsed(script):
  assert not launch_world.shellcheck(script)
  subprocess.run(["bash", "-n", script], check=True, timeout=60)
  assert "set -euo pipefail" in script.read_text()
  assert os.access(script, os.X_OK)


# -- tpu_pod.sh -------------------------------------------------------------


def test_slices_are_requested_one_by_one_and_waited_for():
  options = (*TWO_SLICES, "--spot", "--network=n", "--subnetwork=s")
  commands = launch_world.tpu_pod("create", *options)
  create = "gcloud compute tpus queued-resources create"
  describe = "gcloud compute tpus queued-resources describe"
  assert [c.split(" --")[0] for c in commands] == [
    *(f"{create} run1-0", f"{create} run1-1"),
    *(f"{describe} run1-0", f"{describe} run1-1"),
  ]
  for part in (
    *("--node-id=run1-0", "--project=p", "--zone=z", "--spot"),
    *("--network=n", "--subnetwork=s"),
    *("--accelerator-type=v5p-16", "--runtime-version=v2-alpha-tpuv5"),
  ):
    assert f" {part}" in commands[0]
  assert "--node-count" not in " ".join(commands)


def test_replicas_may_have_another_chip_than_the_trainer():
  options = (*TWO_SLICES, "--rollout_accelerator_type=v6e-8")
  first, second = launch_world.tpu_pod("create", *options)[:2]
  assert "--accelerator-type=v5p-16 --runtime-version=v2-alpha-tpuv5" in first
  assert "--accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e" in second


def test_every_host_gets_the_commit_the_packages_and_the_token(tmp_path):
  token = tmp_path / "token"
  options = (*TWO_SLICES, f"--token={token}")
  commands = launch_world.tpu_pod("install", *options)
  assert in_order(
    commands,
    *("git -C", f"install -m 600 /dev/null {token}", "openssl rand"),
    *("mount -t nfs", "jaxrl_async.tar.gz run1-0:", "uv sync"),
    *(f"scp {token} run1-0:.ray/auth_token", "chmod 600"),
    *("mount -t nfs", "jaxrl_async.tar.gz run1-1:", "uv sync"),
    *(f"scp {token} run1-1:.ray/auth_token", "chmod 600"),
  )
  on_hosts = [c for c in commands if c.startswith("gcloud")]
  assert on_hosts and all("--worker=all" in c for c in on_hosts)
  token.touch()
  commands = launch_world.tpu_pod("install", *options)
  assert not any("openssl" in command for command in commands)


def test_ray_starts_before_the_run_and_gives_away_no_chip_that_trains():
  describe, head, worker, train = launch_world.tpu_pod("start", *TWO_SLICES)
  assert "tpu-vm describe run1-0" in describe
  assert "ssh run1-0" in head and "--worker=0" in head
  for part in (
    *("ray start --head", "--num-gpus=0", '--resources={"TPU": 0}'),
    *("--include-dashboard=false", "RAY_AUTH_MODE=token"),
  ):
    assert part in head
  assert "ssh run1-1" in worker and "--worker=all" in worker
  assert "ray start --address=HEAD_IP:6379" in worker
  assert "RAY_AUTH_MODE=token" in worker
  assert "ssh run1-0" in train and "--worker=all" in train
  # Then a whole slice is visible to Ray under one name.
  assert "TPU_NAME" not in worker
  (run,) = launch_world.runs_in(train)
  assert run[:2] == list(launch_world.A_RUN)
  cluster = launch_world.config_of(run).cluster
  assert cluster.address == "auto" and cluster.replicas == 1
  assert cluster.replica_tpu == "v5p:2x2x2"
  assert cluster.trainer_processes == 2


def test_settings_of_tls_reach_all_hosts(monkeypatch):
  def told(command):
    return re.findall(r"--setenv=(RAY_\w*TLS\w*=\S+)", command)

  *_, train = launch_world.tpu_pod("start", *TWO_SLICES)
  assert not told(train)
  settings = {
    "RAY_USE_TLS": "1",
    "RAY_TLS_SERVER_CERT": "/mnt/jaxrl/ray.crt",
    "RAY_TLS_SERVER_KEY": "/mnt/jaxrl/ray.key",
    "RAY_TLS_CA_CERT": "/mnt/jaxrl/ray.crt",
  }
  for name, value in settings.items():
    monkeypatch.setenv(name, value)
  _, *on_hosts = launch_world.tpu_pod("start", *TWO_SLICES)
  assert len(on_hosts) == 3
  for command in on_hosts:
    assert told(command) == [f"{name}={x}" for name, x in settings.items()]


def test_a_slice_of_one_host_needs_no_cluster():
  (train,) = launch_world.tpu_pod("start", "--accelerator_type=v6e-8")
  assert "config.cluster" not in train and "config.transfer" not in train


def test_hosts_of_a_single_slice_are_slices_of_their_own():
  commands = launch_world.tpu_pod("start", "--accelerator_type=v5litepod-16")
  _, head, workers, train = commands
  assert "--worker=0" in head and "--worker=0" in train
  assert "--worker=1-3" in workers
  for command in (head, workers, train):
    for part in (
      *("TPU_ACCELERATOR_TYPE=v5litepod-4", "TPU_TOPOLOGY=2x2"),
      *("TPU_WORKER_ID=0", "TPU_NAME=$(hostname)"),
    ):
      assert part in command
  cluster = launch_world.config_of(launch_world.runs_in(train)[0]).cluster
  assert cluster.replicas == 3 and cluster.replica_tpu == "v5e:2x2"
  assert cluster.trainer_processes == 1


@pytest.mark.parametrize("chip", tpu_chips.CHIPS)
def test_types_of_slices_have_the_shapes_and_hosts_of_their_chips(chip):
  for shape in tpu_chips.CHIPS[chip].slices:
    chips = math.prod(map(int, shape.split("x")))
    if chips > 512:
      continue
    name = {"v5e": "v5litepod"}.get(chip, chip)
    count = 2 * chips if chip == "v5p" else chips
    options = ("--slices=2", f"--accelerator_type={name}-{count}")
    train = launch_world.tpu_pod("start", *options)[-1]
    cluster = launch_world.config_of(launch_world.runs_in(train)[0]).cluster
    assert cluster.replica_tpu == f"{chip}:{shape}"
    is_one_host = chips <= (4 if chip == "v5p" else 8)
    assert cluster.trainer_processes == (1 if is_one_host else chips // 4)


def test_resume_requests_slices_again_and_runs_the_same_command():
  commands = launch_world.tpu_pod("resume", *TWO_SLICES)
  assert in_order(
    commands,
    *("describe run1-0", "delete run1-0", "create run1-0"),
    *("delete run1-1", "create run1-1", "describe run1-1"),
    *("systemctl stop jaxrl-train", "systemctl stop jaxrl-ray"),
    *("uv sync", "ray start --head", "launch/train.py"),
  )
  assert commands[-1] == launch_world.tpu_pod("start", *TWO_SLICES)[-1]


def test_the_run_is_stopped_before_ray_and_status_asks_all_slices():
  stop = launch_world.tpu_pod("stop", *TWO_SLICES)
  units = [re.search(r"stop (\S+)", command) for command in stop]
  assert [unit[1] for unit in units if unit] == 2 * [
    *("jaxrl-train", "jaxrl-ray")
  ]
  status = launch_world.tpu_pod("status", *TWO_SLICES)
  assert in_order(status, "describe run1-0", "is-active", "describe run1-1")
  (logs,) = launch_world.tpu_pod("logs", *TWO_SLICES)
  assert "journalctl --unit=jaxrl-train" in logs


def test_delete_gives_every_slice_back():
  commands = launch_world.tpu_pod("delete", *TWO_SLICES)
  delete = "gcloud compute tpus queued-resources delete"
  assert [c.split(" --")[0] for c in commands] == [
    f"{delete} run1-{i}" for i in range(2)
  ]
  assert all("--force --quiet" in command for command in commands)


GCLOUD = """
case "$*" in
  *"queued-resources create"*) echo ACTIVE >"$STATES/$5" ;;
  *"queued-resources delete"*) rm "$STATES/$5" ;;
  *"queued-resources describe"*) cat "$STATES/$5" ;;
  *"tpu-vm describe"*) echo 10.0.0.9 ;;
esac
"""


def test_a_real_resume_keeps_the_slices_that_are_still_there(tmp_path):
  launch_world.stand_in(tmp_path / "bin", "gcloud", GCLOUD)
  states, calls = tmp_path / "states", tmp_path / "calls"
  states.mkdir()
  (states / "run1-0").write_text("ACTIVE\n")
  (states / "run1-1").write_text("SUSPENDED\n")
  (tmp_path / "token").touch()
  launch_world.output(
    *(launch_world.TPU_POD, "resume", *launch_world.SLICES, *TWO_SLICES),
    *(f"--token={tmp_path}/token", "--", *launch_world.A_RUN),
    PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
    CALLS=str(calls),
    STATES=str(states),
    HOME=str(tmp_path),
  )
  made = calls.read_text().splitlines()
  assert in_order(
    made, "delete run1-1", "create run1-1", "systemctl stop", "uv sync"
  )
  assert in_order(made, "--head", "--address=10.0.0.9:6379", "launch/train.py")
  assert not any("delete run1-0" in call for call in made)
  assert not any("create run1-0" in call for call in made)


@pytest.mark.parametrize(
  ("arguments", "part"),
  [
    (["create"], "--name is missing"),
    (["create", "--nane=x"], "unknown option --nane=x"),
    (["create", *launch_world.SLICES], "--accelerator_type is missing"),
    (
      ["create", *launch_world.SLICES, "--accelerator_type=v5p-9"],
      "v5p-9 is no known type",
    ),
    (
      ["mend", *launch_world.SLICES, "--accelerator_type=v5p-8"],
      "unknown command 'mend'",
    ),
    (
      ["start", *launch_world.SLICES, "--accelerator_type=v5p-8", "--dry_run"],
      "--config=FILE is missing",
    ),
    (
      ["install", *launch_world.SLICES, "--accelerator_type=v5p-16"],
      "a shared directory: --nfs",
    ),
  ],
)
def test_wrong_options_are_reported_in_one_line(arguments, part):
  done = subprocess.run(
    [launch_world.TPU_POD, *arguments], capture_output=True, text=True
  )
  assert done.returncode == 1 and not done.stdout
  assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
  assert part in done.stderr


# -- slurm.sbatch -----------------------------------------------------------

GSM8K = ("--config=configs/gsm8k.py:1.5b", "--workdir=/shared/run1")


def test_the_first_node_trains_and_the_others_generate():
  commands = launch_world.slurm(*GSM8K)
  assert in_order(
    commands,
    *("scontrol show hostnames", "ray get-auth-token --generate"),
    *("--nodelist=node1 bash", "ray status"),
    *("--nodelist=node2 bash", "--nodelist=node3 bash"),
    *("launch/train.py", "scontrol requeue 1"),
  )
  head, *workers = [c for c in commands if "ray start" in c]
  assert "--head" in head and "--num-gpus=0" in head
  assert all("--num-gpus=8" in worker for worker in workers)
  (run,) = launch_world.runs_in("\n".join(commands))
  config = launch_world.config_of(run)
  assert config.cluster.replicas == 2 and config.cluster.replica_gpus == 8
  assert config.cluster.trainer_processes == 1
  assert config.transfer.directory == "/shared/weights"


def test_ray_of_a_job_is_in_a_directory_of_its_user_alone(tmp_path):
  for command in launch_world.slurm(*GSM8K):
    if "ray start" in command:
      words = shlex.split(command)
      private = words[words.index("bash") : words.index(".venv/bin/ray")]
      directory = tmp_path / f"made{len(list(tmp_path.iterdir()))}"
      variables = os.environ | {"RAY_TMPDIR": str(directory)}
      # Another start, or somebody else, has made it already.
      for is_first in (True, False):
        done = subprocess.run(
          [*private, "echo", "Ray"], env=variables, capture_output=True
        )
        assert done.stdout == b"Ray\n" * is_first
        assert bool(done.returncode) != is_first
      assert stat.S_IMODE(directory.stat().st_mode) == 0o700
  assert len(list(tmp_path.iterdir())) == 3


def test_two_nodes_train_in_two_processes_and_replicas_share_a_node():
  commands = launch_world.slurm(*GSM8K, TRAIN_NODES="2", REPLICA_GPUS="1")
  nodes = [re.search(r"--nodelist=(\S+)", command) for command in commands]
  assert [node[1] for node in nodes if node] == [
    "node1",
    "node3",
    "node1,node2",
  ]
  train = next(c for c in commands if "launch/train.py" in c)
  assert "--nodes=2 --ntasks=2" in train and "--nodelist=node1,node2" in train
  assert '--process_id="$SLURM_PROCID"' in train
  assert "--num_processes=2 --coordinator_address=node1:" in train
  (run,) = launch_world.runs_in(train)
  cluster = launch_world.config_of(run).cluster
  assert cluster.replicas == 8 and cluster.replica_gpus == 1
  assert cluster.trainer_processes == 2


@pytest.mark.parametrize(
  ("settings", "part"),
  [
    ({"TRAIN_NODES": "3"}, "3 nodes are too few"),
    ({"REPLICA_GPUS": "3"}, "REPLICA_GPUS=3 does not divide"),
  ],
)
def test_nodes_that_do_not_suffice_are_reported(settings, part):
  with pytest.raises(AssertionError, match=part):
    launch_world.slurm(*GSM8K, **settings)


class Job:
  """A job of slurm.sbatch among stand-ins for SLURM and Ray."""

  def __init__(self, folder, run):
    """Start it; `run` is the shell script in place of launch/train.py."""
    self._calls = folder / "calls"
    is_run = f'case "$*" in *launch/train.py*) {run} ;; esac'
    launch_world.stand_in(folder / "bin", "srun", is_run)
    launch_world.stand_in(
      folder / "bin", "scontrol", "[[ $1 = requeue ]] || printf 'a\\nb\\n'"
    )
    launch_world.stand_in(folder / ".venv" / "bin", "ray", "")
    path = f"{folder}/bin:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "[ab]"}
    self.process = subprocess.Popen(
      ["bash", launch_world.SBATCH, *GSM8K],
      cwd=folder,
      env=os.environ | job | {"PATH": path, "CALLS": str(self._calls)},
      stdout=subprocess.DEVNULL,
    )

  def calls(self):
    return self._calls.read_text() if self._calls.exists() else ""

  def wait_for(self, text):
    deadline = time.monotonic() + 60
    while text not in self.calls():
      assert time.monotonic() < deadline and self.process.poll() is None
      time.sleep(0.02)


def test_a_job_whose_time_ends_stops_the_run_and_is_requeued(tmp_path):
  run = (
    'trap \'echo checkpoint >>"$CALLS"; exit 130\' TERM; echo up >>"$CALLS";'
    " while :; do sleep 0.02; done"
  )
  job = Job(tmp_path, run)
  job.wait_for("\nup\n")
  job.process.send_signal(signal.SIGTERM)
  assert job.process.wait(60) == 130
  assert job.calls().endswith("checkpoint\nscontrol requeue 7\n")


@pytest.mark.parametrize("status", [75, 137])
def test_a_job_that_lost_a_process_is_requeued_but_not_for_ever(
  tmp_path, monkeypatch, status
):
  job = Job(tmp_path / "first", f"exit {status}")
  assert job.process.wait(60) == status
  # A node that was started in the background may write its line later.
  assert "scontrol requeue 7\n" in job.calls()
  monkeypatch.setenv("SLURM_RESTART_COUNT", "100")
  job = Job(tmp_path / "last", f"exit {status}")
  assert job.process.wait(60) == status
  assert "launch/train.py" in job.calls() and "requeue" not in job.calls()


@pytest.mark.parametrize("status", [0, 1, 3, 130])
def test_a_job_whose_run_ends_by_itself_is_not_requeued(tmp_path, status):
  job = Job(tmp_path, f"exit {status}")
  assert job.process.wait(60) == status
  assert "launch/train.py" in job.calls() and "requeue" not in job.calls()


# -- all of them, and the page ----------------------------------------------


def all_runs():
  """Return the flags of every run in scripts, manifests and the page."""
  texts = [
    *launch_world.tpu_pod("start", *TWO_SLICES),
    *launch_world.slurm(*GSM8K, TRAIN_NODES="2"),
    *(
      s
      for path in launch_world.MANIFESTS
      for s in launch_world.scripts_in(path)
    ),
    launch_world.code_of_pages(),
  ]
  return [run for text in texts for run in launch_world.runs_in(text)]


def test_every_setting_that_scripts_and_page_use_exists():
  runs = all_runs()
  assert len(runs) >= 10
  sources = [path.read_text() for path in (ROOT / "launch").glob("*.py")]
  defined = set(re.findall(r'flags\.DEFINE_\w+\(\s*"(\w+)"', "".join(sources)))
  for run in runs:
    fields_lib.check(launch_world.config_of(run))
    for flag in run:
      name = re.match(r"--([^=]*)", flag)[1]
      if not name.startswith("config"):
        assert name in defined, flag


def test_settings_that_the_page_mentions_exist():
  config = launch_world.config_of(["--config=configs/tiny.py"])
  page = launch_world.text_of_pages()
  sections = "cluster|mesh|rollout|train|transfer|run|algorithm|task"
  metrics = (ROOT / "docs/reference/metrics.md").read_text()
  named = re.findall(rf"`((?:{sections})\.\w+)[`=]", page)
  for name in (n for n in named if not n.endswith("_")):
    section, field = name.split(".")
    assert hasattr(getattr(config, section), field), name
  of_metrics = re.findall(r"`((?:time|rollout|staleness|transfer)/\w+)`", page)
  assert len(named) >= 20 and len(of_metrics) > 5
  assert not [name for name in of_metrics if f"`{name}`" not in metrics]


def test_files_that_scripts_and_page_mention_exist():
  files = [*SCRIPTS, *launch_world.PAGES, *(ROOT / "launch").glob("*.yaml")]
  files += (ROOT / "launch" / "gke").iterdir()
  folders = "launch|configs|docs|tests|benchmarks|jaxrl_async"
  name = rf"(?<![\w/])(?:{folders})/[\w./-]*\.(?:py|sh|md|yaml|sbatch)\b"
  for file in files:
    for mentioned in re.findall(name, file.read_text()):
      assert (ROOT / mentioned).exists(), f"{file}: {mentioned}"
  page = launch_world.text_of_pages()
  for mentioned in re.findall(r"`(tpu_\w+\.py):", page):
    assert (ROOT / "configs" / mentioned).exists()


def rows_of(page, first):
  """Return the cells of a table's rows, whose header begins like this."""
  text = page.read_text()
  lines = text[text.index(f"\n| {first} |") + 1 :].splitlines()[2:]
  for line in lines:
    if not line.startswith("|"):
      return
    yield [cell.strip() for cell in line.strip("|").split("|")]


def test_sizes_of_slices_are_those_of_the_page_on_scaling():
  scaling = ROOT / "docs/project/scaling.md"
  expected = []
  for row in rows_of(scaling, "model | tokens | slice"):
    model, tokens, name, _, train, _, rollout, of, _, update = row[:10]
    seconds = update.split()[0] if row[13] == "yes" else "does not fit"
    expected.append([model, tokens, name, train, rollout, of, seconds])
  found = []
  for row in rows_of(launch_world.SIZES, "model | tokens | config"):
    model, tokens, config, trains, train, replica, rollout, of, update = row
    variant, name = re.fullmatch(r"`tpu_\w+\.py:(\w+)@(.*)`", config).groups()
    assert variant == tokens and trains == replica
    found.append([model, tokens, name, train, rollout, of, update])
    launch_world.config_of([f"--config=configs/{config.strip('`')}"])
    # Each half has a slice of its own, of as many chips.
    count, _, shape = tpu_chips.parse(name)
    half = count * math.prod(map(int, shape.split("x"))) // 2
    chips = int(trains.split("-")[1]) // (2 if "v5p" in trains else 1)
    assert half == (chips // 2 if trains.startswith("half") else chips)
  assert found == expected


def test_image_and_manifests_have_the_version_of_ray_that_was_tested():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())
  constraints = project["tool"]["uv"]["constraint-dependencies"]
  (version,) = [c[5:] for c in constraints if c.startswith("ray==")]
  image = (ROOT / "launch" / "gke" / "Dockerfile").read_text()
  assert f"ARG RAY_VERSION={version}\n" in image
  named = re.findall(r"--extra=(\w+)", image)
  assert set(named) <= project["project"]["optional-dependencies"].keys()
  for path in launch_world.MANIFESTS:
    cluster = launch_world.objects(path).get("RayCluster")
    assert cluster is None or cluster["spec"]["rayVersion"] == version
