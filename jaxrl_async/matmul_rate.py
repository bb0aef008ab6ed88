"""How fast devices multiply matrices, against which a step is measured."""

from collections.abc import Sequence
import math
import time
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_async import mesh as mesh_lib
from jaxrl_async import topology


def peak_flops(mesh: Mesh, dtype: str) -> float:
  """FLOPs a second of a mesh, by the devices of this process.

  NaN if it has none, or the devices are only described.
  """
  here = mesh.local_devices
  if not here or topology.is_described(here[0]):
    return math.nan
  return measured_matmul_flops(here, dtype) * mesh.size / len(here)


def measured_matmul_flops(
  devices: Sequence[Any], dtype: str, size: int = 1024
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
