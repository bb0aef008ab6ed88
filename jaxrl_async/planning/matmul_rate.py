"""How fast devices multiply matrices, against which a step is measured."""

from collections.abc import Sequence
import math
import time
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Int
import numpy as np

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import topology
from jaxrl_async.models import configs


def peak_flops(mesh: Mesh, dtype: str) -> float:
  """FLOPs a second of a mesh, by the devices of this process.

  NaN if it has none, or the devices are only described.
  """
  here = mesh.local_devices
  if not here or topology.is_described(here[0]):
    return math.nan
  # Large enough for an accelerator that starting it takes no time.
  size = 1024 if here[0].platform == "cpu" else 8192
  return measured_matmul_flops(here, dtype, size) * mesh.size / len(here)


def model_flops(
  model: configs.ModelConfig, lengths: Int[np.ndarray, "trajectories"]
) -> float:
  """FLOPs of forward and backward of trajectories of so many tokens.

  6 a parameter and token, where a table that is only looked up has no products;
  12 a layer, head, its size, and pair of tokens that see each other. What is
  computed twice counts once.
  """
  tables = 0 if model.has_tied_head else model.vocab_size * model.model_dim
  products = (model.num_params - tables) * lengths.sum()
  pairs = (lengths * (lengths + 1) // 2).sum()
  heads = model.num_layers * model.num_heads * model.head_dim
  return float(6 * products + 12 * heads * pairs)


def measured_matmul_flops(
  devices: Sequence[Any], dtype: str, size: int
) -> float:
  """FLOPs a second of square matrix products, best of three.

  Of these devices together, one product on each at the same time: virtual
  devices of a CPU share its cores.
  """
  mesh = mesh_lib.make_mesh(devices, mesh_lib.MeshShape(data=len(devices)))
  each = mesh_lib.sharding(mesh, mesh_lib.TRAIN_RULES, "batch")
  shape = len(devices), size, size
  matrices = jax.jit(lambda: jax.numpy.ones(shape, dtype), out_shardings=each)()
  multiply = jax.jit(
    jax.shard_map(
      lambda x: (x[0] @ x[0])[None],
      mesh=mesh,
      in_specs=each.spec,
      out_specs=each.spec,
    )
  )

  def run_s():
    start_s = time.perf_counter()
    jax.block_until_ready(multiply(matrices))
    return time.perf_counter() - start_s

  run_s()  # compiles
  return 2 * math.prod(shape) * size / min(run_s() for _ in range(3))
