"""TPU slices by name; what needs libtpu runs in processes of its own."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
from jax.experimental import topologies
import pytest

from jaxrl_async.config import sections
from jaxrl_async.devices import gpus
from jaxrl_async.devices import topology
from jaxrl_async.devices import tpu_chips

ROOT = pathlib.Path(__file__).parents[1]
needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu is not installed: uv sync --extra tpu-aot",
)
HEAD = """
import sys, time
import jax
from jaxrl_async.devices import topology
from jaxrl_async.devices import tpu_chips
"""
LIMITS = """
import re
for name, chip in tpu_chips.CHIPS.items():
  devices = topology.devices(f"{name}:{chip.slices[0]}")
  assert devices[0].device_kind == chip.kind, devices[0].device_kind
  assert topology.chip_of(devices[0]) is chip
  assert topology.is_described(devices[0])
  for shape in chip.slices:
    size = 1
    for axis in shape.split("x"):
      size *= int(axis)
    if size <= 64:
      assert len(topology.devices(f"{name}:{shape}")) == size
  place = jax.sharding.SingleDeviceSharding(devices[0])
  huge = jax.ShapeDtypeStruct((2**36,), "float32", sharding=place)
  try:
    jax.jit(lambda x: x * 2).lower(huge).compile()
  except jax.errors.JaxRuntimeError as error:
    limit = re.search(r"available HBM \\((\\S+)G\\)", str(error))[1]
    # Versions of libtpu differ by a hundredth.
    assert abs(float(limit) - chip.hbm_bytes / 2**30) < 0.015, (name, limit)
  else:
    raise AssertionError(name)
"""
HALF = """
from jaxrl_async.config import sections
from jaxrl_async.config import mesh_shape
from jaxrl_async.devices import mesh
from jaxrl_async.planning import aot
def compiled(name):
  devices = topology.devices(name)
  half = mesh.make_mesh(devices[:16], mesh_shape.MeshShape(fsdp=16))
  rows = jax.sharding.NamedSharding(half, jax.sharding.PartitionSpec("fsdp"))
  x = jax.ShapeDtypeStruct((16, 128), "float32", sharding=rows)
  program = aot.Program(
    name="sum", function=jax.jit(lambda x: x.sum(0)), arguments=(x,)
  )
  return len(devices), aot.compile_program(program).refusal
assert compiled("2xv5e:4x4") == (32, "")
try:
  compiled("v5e:4x8")
except sections.ConfigError as error:
  print(error)
"""
HOLD = """
topology.devices("v5e:2x2")
print("held", flush=True)
sys.stdin.readline()
print("let go", flush=True)
"""
TAKE = """
devices = topology.devices("v5e:2x2")
print(len(devices))
"""
GIVE_UP = """
from jaxrl_async.config import sections
try:
  topology.devices("v5e:2x2", max_wait_s=0.0)
except sections.ConfigError as error:
  print(error)
"""


def process(code):
  return subprocess.Popen(
    [sys.executable, "-c", HEAD + code],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=ROOT,
    env=os.environ
    | {
      "JAX_PLATFORMS": "cpu",
      "PYTHONPATH": os.pathsep.join(
        [str(ROOT), os.environ.get("PYTHONPATH", "")]
      ),
    },
  )


def test_a_name_may_be_of_several_slices():
  assert tpu_chips.parse("v5p:2x2x1") == (1, "v5p", "2x2x1")
  assert tpu_chips.parse("2xv5e:8x16") == (2, "v5e", "8x16")


@pytest.mark.parametrize(
  ("name", "words"),
  [
    ("v5p:3x3x3", "slices of v5p are 2x2x1"),
    ("v5e:2x4x8", "slices of v5e are 2x2"),
    ("v9:2x2", "chips are v5e, v5p, v6e"),
    ("v5p", "slices of v5p are"),
    ("pod", "chips are"),
    ("0xv5e:4x4", "two slices"),
    ("2xv5e:3x3", "slices of v5e are 2x2"),
    ("2x", "chips are"),
    ("v5e:2x2\n", "slices of v5e are 2x2"),
  ],
)
def test_a_slice_that_does_not_exist_is_refused_with_those_that_do(name, words):
  with pytest.raises(sections.ConfigError, match="^topology: ") as error:
    topology.devices(name)
  assert str(error.value).startswith(f"topology: {name!r} does not exist")
  assert words in str(error.value)


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "libtpu", None)
  with pytest.raises(sections.ConfigError, match="^topology: libtpu.*tpu-aot"):
    topology.devices("v5e:2x4")


def test_a_device_that_is_here_is_not_described():
  assert not topology.is_described(jax.devices()[-1])
  assert topology.chip_of(jax.devices()[0]) is None


@needs_libtpu
@pytest.mark.slow
def test_the_table_of_chips_is_that_of_the_compiler():
  _, errors = (this := process(LIMITS)).communicate(timeout=120)
  assert this.returncode == 0, errors


@needs_libtpu
@pytest.mark.slow
def test_half_of_a_large_v5e_slice_is_refused_and_one_of_two_slices_is_not():
  found, errors = (this := process(HALF)).communicate(timeout=120)
  assert this.returncode == 0, errors
  assert found.startswith("topology: sum: ")
  assert "2xv5e:4x4" in found


@needs_libtpu
@pytest.mark.slow
def test_a_process_waits_until_another_has_let_go_of_libtpu():
  first = process(HOLD)
  try:
    assert first.stdout is not None and first.stdin is not None
    assert first.stdout.readline() == "held\n"
    late, _ = process(GIVE_UP).communicate(timeout=60)
    assert late.startswith("topology: another process held libtpu for 0 s")
    second = process(TAKE)
    assert second.stderr is not None
    # It says so, and is still there.
    assert any("waiting for another" in line for line in second.stderr)
    assert second.poll() is None
    first.communicate("\n", timeout=60)
    found, _ = second.communicate(timeout=60)
    assert found == "4\n"
  finally:
    first.kill()


@pytest.mark.parametrize(
  ("name", "count", "gigabytes"), [("gpu:24GB", 1, 24), ("8xgpu:80GB", 8, 80)]
)
def test_the_name_of_gpus_says_how_many_and_how_large(name, count, gigabytes):
  assert gpus.is_named(name)
  assert gpus.parse(name) == gpus.Gpus(
    count=count, memory_bytes=gigabytes * 10**9
  )


@pytest.mark.parametrize(("name", "count"), [("h200", 1), ("8xh200", 8)])
def test_a_gpu_that_xla_can_be_told_about_has_a_description(
  name, count, monkeypatch
):
  assert gpus.is_named(name)
  found = gpus.parse(name)
  assert (found.count, found.kind) == (count, "h200")
  description = gpus.description(found.kind)
  assert f'name: "{gpus.KINDS[found.kind].kind}"' in description
  whole = int(re.search(r"device_memory_size: (\d+)", description)[1])
  assert found.memory_bytes == whole * 3 // 4

  def not_installed(*arguments, **settings):
    raise NotImplementedError("topology not implemented for cuda")

  monkeypatch.setattr(topologies, "get_topology_desc", not_installed)
  with pytest.raises(sections.ConfigError, match="--extra cuda13"):
    topology.devices(name)


@pytest.mark.parametrize(
  "name", ["gpu", "gpu:24", "0xgpu:24GB", "gpu:0GB", "0xh200"]
)
def test_other_names_of_gpus_are_refused(name):
  assert gpus.is_named(name)
  with pytest.raises(sections.ConfigError, match="^topology: .*8xgpu:80GB"):
    gpus.parse(name)
