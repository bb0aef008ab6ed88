"""How much of the host's memory pretrained weights take, and whose they are."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import hf_tensors
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.training import train_state

# 590 MB in float32; its largest tensor has 17 MB.
MODEL = configs.ModelConfig(
  vocab_size=8_192,
  model_dim=512,
  num_layers=50,
  num_heads=8,
  num_kv_heads=2,
  head_dim=64,
  mlp_dim=1_536,
)
SHARD_BYTES = 100_000_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  """A model in shards, one of which is at no time in this process's memory."""
  path = tmp_path_factory.mktemp("large") / "model"
  shapes = jax.eval_shape(
    lambda key: transformer.init_params(MODEL, key), jax.random.key(0)
  )
  params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), shapes)
  hf_weights.save(path, MODEL, params, max_shard_bytes=SHARD_BYTES)
  return path


def measured(action, directory, num_processes=1):
  script = pathlib.Path(__file__).with_name("host_memory.py")
  command = [sys.executable, str(script), action, str(directory)]
  with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
  processes = []
  for process in range(num_processes):
    more = [port, num_processes, process] if num_processes > 1 else []
    processes.append(
      subprocess.Popen(
        [*command, *map(str, more)],
        stdout=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        | {
          "JAX_PLATFORMS": "cpu",
          # Of a single device's arrays, the host has no copy on a CPU. Loading
          # must not gain from that. Writing may, as it gathers a whole tensor.
          "JAX_NUM_CPU_DEVICES": "2" if action == "load" else "1",
          "PYTHONPATH": str(script.parents[1]),
        },
      )
    )
  try:
    outputs = [process.communicate(timeout=300)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert not any(process.returncode for process in processes)
  return [json.loads(output.splitlines()[-1]) for output in outputs]


def largest_shard(directory):
  sizes = [path.stat().st_size for path in directory.glob("*.safetensors")]
  assert len(sizes) > 4
  return max(sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
  "num_processes", [pytest.param(1, marks=pytest.mark.nightly), 2]
)
def test_loading_takes_less_than_a_shard_beyond_the_arrays(
  directory, num_processes
):
  found = measured("load", directory, num_processes)
  total = 4 * MODEL.num_params
  for process in found:
    # The norms are on every device.
    assert process["held"] == pytest.approx(total / num_processes, rel=0.01)
    beyond = process["growth"] - process["held"]
    assert beyond < 1.2 * largest_shard(directory)


@pytest.mark.slow
def test_writing_takes_about_a_shard(directory):
  (found,) = measured("save", directory)
  assert found["growth"] < 1.2 * largest_shard(directory)
  copy = directory.with_name("model.copy")
  for path in directory.iterdir():
    assert (copy / path.name).read_bytes() == path.read_bytes()


UNTIED = dataclasses.replace(
  tiny.MODEL,
  vocab_size=96,
  has_tied_head=False,
  has_qkv_bias=True,
  has_qk_norm=False,
)


@pytest.mark.parametrize(
  "rules",
  [
    mesh_lib.TRAIN_RULES,
    sections.ShardingRules(heads=(), kv_heads=(), head=("tensor",)),
  ],
  ids=["heads", "parts of heads"],
)
def test_every_device_reads_its_own_part(tmp_path, rules, monkeypatch):
  shape = mesh_lib.MeshShape(data=2, fsdp=2, tensor=2)
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda key: transformer.init_params(UNTIED, key), jax.random.key(0)
  )
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), shapes)
  hf_weights.save(tmp_path, UNTIED, params, max_shard_bytes=20_000)
  mesh = mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape)
  shardings = train_state.params_sharding(mesh, rules, UNTIED)
  read = []
  part = hf_tensors.StoredTensor.part

  def counted(self, *arguments):
    found = part(self, *arguments)
    read.append(found.size)
    return found

  monkeypatch.setattr(hf_tensors.StoredTensor, "part", counted)
  _, placed = hf_weights.load(tmp_path, shardings=shardings)
  jax.tree.map(np.testing.assert_array_equal, placed, params)
  for array, sharding in zip(
    *map(jax.tree.leaves, (placed, shardings)), strict=True
  ):
    assert array.sharding.is_equivalent_to(sharding, array.ndim)
  # Copies are read once.
  assert sum(read) == UNTIED.num_params
  table = UNTIED.vocab_size * UNTIED.model_dim
  assert max(read) == table // (shape.fsdp * shape.tensor)
