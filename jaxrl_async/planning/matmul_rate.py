"""The rate of matrix products, against which a train step is measured."""

from collections.abc import Sequence
import math
import time
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Int
import numpy as np

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import products
from jaxrl_async.devices import topology
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib


def peak_flops(mesh: Mesh, dtype: str) -> float:
  """Return the FLOPs per second of a mesh, measured on this process's devices.

  The result is NaN if this process has none of its devices, or if they are only
  described.
  """
  here = mesh.local_devices
  if not here or topology.is_described(here[0]):
    return math.nan
  # Large enough that launching the product takes no noticeable time.
  size = 1024 if here[0].platform == "cpu" else 8192
  return measured_matmul_flops(here, dtype, size) * mesh.size / len(here)


def model_flops(
  model: configs.ModelConfig, lengths: Int[np.ndarray, "trajectories"]
) -> float:
  """Return the FLOPs of a forward and a backward pass over trajectories.

  6 per token and parameter that it uses, without an embedding that is only
  looked up, plus 12 per layer, head, element of a head, and pair of tokens of
  which one sees the other. Tokens outside of a layer's sliding window are not
  seen. A layer with the gated delta rule looks at no pairs, and counts 18 per
  token and element of its state. Activations that are computed twice count
  once. A base under LoRA's adapters has no gradient of its own, so its
  parameters count 4.

  Args:
    model: the architecture.
    lengths: tokens of each trajectory.
  """
  # A table of which rows are looked up, and nothing is multiplied.
  is_product = model.has_tied_head and not model.has_scalar_head
  tables = 0 if is_product else model.vocab_size * model.model_dim
  products = (model.num_active_params - tables) * lengths.sum()
  pairs = updates = 0
  if model.delta is not None:
    wide, _ = model.delta.state_sizes
    updates = sum(model.is_delta) * wide * lengths.sum()
  windows = model.windows_within(int(lengths.max(initial=0)))
  for layer in model.layers_with("query"):
    window = windows[layer]
    seen = lengths if window is None else np.minimum(lengths, window)
    # The first tokens see all before them, and the others a whole window.
    pairs += (seen * (seen + 1) // 2 + (lengths - seen) * seen).sum()
  heads = model.num_heads * model.head_dim
  per_parameter = 6 if model.lora is None else 4
  adapters = 6 * lora_lib.num_params(model) * lengths.sum()
  return float(
    per_parameter * products + adapters + 12 * heads * pairs + 18 * updates
  )


def measured_matmul_flops(
  devices: Sequence[Any], dtype: str, size: int
) -> float:
  """Return the FLOPs per second of square matrix products, best of three.

  All devices compute one product each at the same time, and the result is their
  sum. Virtual devices of a CPU share its cores, so measuring one alone would be
  wrong. The matrices are random: products of ones take less power, and a GPU
  computes them faster than those of a model.

  Args:
    devices: of this process.
    dtype: of the matrices.
    size: rows and columns of each matrix.
  """
  mesh = mesh_lib.make_mesh(devices, mesh_lib.MeshShape(data=len(devices)))
  each = mesh_lib.sharding(mesh, mesh_lib.TRAIN_RULES, "batch")
  shape = len(devices), size, size
  matrices = jax.jit(
    lambda: jax.random.normal(jax.random.key(0), shape, dtype),
    out_shardings=each,
  )()
  multiply = jax.jit(
    jax.shard_map(
      lambda x: products.contract(x[0], x[0], (0,), x.dtype)[None],
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
