"""Settings of a cluster that cannot be right are told in one line."""

import ast
import pathlib
import types

import pytest
import test_run

from jaxrl_async.assembly import checks
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import device_checks
from jaxrl_async.cluster import environment as environment_lib
from jaxrl_async.config import mesh_shape
from jaxrl_async.config import sections
from jaxrl_async.devices import xla_flags
from jaxrl_async.rewards import reward_terms
from jaxrl_async.run import rollout_start
from jaxrl_async.weights import weight_transfer

RAY = sections.ClusterKind.RAY
PACKAGE = pathlib.Path(config_checks.__file__).parents[1]


def config(mesh=None, channel=sections.Channel.ORBAX, **cluster):
  made = test_run.make_config()
  made.transfer.channel = channel
  for name, value in (mesh or {}).items():
    setattr(made.mesh, name, value)
  for name, value in ({"kind": RAY} | cluster).items():
    setattr(made.cluster, name, value)
  return made


def test_replicas_elsewhere_leave_all_devices_to_the_trainer():
  made = config({"train_data": -1, "rollout_tensor": 2, "rollout_data": 2})
  train, rollout = mesh_shape.of_slices(made.mesh, 3, are_apart=True)
  assert train.num_devices == 3 and rollout.num_devices == 4
  config_checks.check(made)
  with pytest.raises(sections.ConfigError, match="train_\\* need 4 devices"):
    mesh_shape.of_slices(sections.MeshSection(train_data=4), 3, are_apart=True)


def test_on_gpus_a_run_is_exact_only_with_the_flag_of_xla(
  tmp_path, monkeypatch
):
  elsewhere, here = config(replica_gpus=1), test_run.make_config()
  for made in (elsewhere, here):
    device_checks.check_repeats(made, "gpu")  # promises nothing
    made.run.exact_resume = True
  wanted = "^run.exact_resume: .* XLA_FLAGS=--xla_gpu_deterministic_ops=true$"
  with pytest.raises(sections.ConfigError, match=wanted):
    device_checks.check_repeats(here, "gpu")
  with pytest.raises(sections.ConfigError, match=wanted):
    test_run.start(elsewhere, tmp_path)
  device_checks.check_repeats(here, "cpu")
  monkeypatch.setenv("XLA_FLAGS", "--x=1 --xla_gpu_deterministic_ops=true")
  device_checks.check_repeats(elsewhere, "gpu")
  found = environment_lib.of_replicas(elsewhere)
  assert found["XLA_FLAGS"] == xla_flags.REPEATS_ON_GPU


@pytest.mark.parametrize(
  "platform, mesh, cluster, error",
  [
    ("gpu", {}, {}, "cluster.replica_gpus: missing; .* while a GPU .* use 1"),
    (
      *("gpu", {"rollout_tensor": 4}, {"replica_processes": 2}),
      "cluster.replica_gpus: .* use 2$",
    ),
    ("tpu", {}, {}, "cluster.replica_tpu: missing; .* such as v5e:2x2$"),
    ("gpu", {}, {"replica_gpus": 1}, None),
    ("tpu", {"rollout_tensor": 4}, {"replica_tpu": "v5e:2x2"}, None),
    ("gpu", {}, {"kind": sections.ClusterKind.LOCAL}, None),
    ("cpu", {}, {}, None),
  ],
)
def test_replicas_have_accelerators_where_the_trainer_has(
  platform, mesh, cluster, error, monkeypatch
):
  made = config(mesh, **cluster)
  devices = [types.SimpleNamespace(platform=platform)] * 8
  # What comes after this check.
  monkeypatch.setattr(reward_terms, "of_task", lambda _: 1 / 0)
  wanted = sections.ConfigError if error else ZeroDivisionError
  with pytest.raises(wanted, match=error and f"^{error}"):
    checks.checked(made, devices)


def test_limits_grow_with_the_size_of_a_version():
  channel = object.__new__(weight_transfer.OrbaxChannel)
  channel.num_bytes = 65_000_000_000
  made = config()
  assert rollout_start._start_timeout_s(made, [channel]) == 300 + 650
  # It is written, and then it is read.
  made.run.stall_timeout_s = 300.0
  made.cluster = sections.ClusterSection()
  assert rollout_start.stall_timeout_s(made, channel) == 300 + 2 * 650
  # A silent replica is killed, and another one has time to begin.
  made.cluster = sections.ClusterSection(kind=sections.ClusterKind.RAY)
  assert rollout_start.stall_timeout_s(made, channel) == 60 + 600 + 2 * 650


def test_only_one_module_imports_ray_and_none_that_others_import():
  found = set()
  for path in PACKAGE.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names]
        names.append(getattr(node, "module", None) or "")
        if any(name.split(".")[0] == "ray" for name in names):
          found.add(path.relative_to(PACKAGE).as_posix())
  assert found == {"cluster/local_ray.py"}
