"""Whether the bits of a matrix product depend on the row of a sequence.

If they do, a sequence that is generated again in another slot may have other
bits. Some libraries of products have this on some processors.
"""

import itertools

import jax
from jax import numpy as jnp
import numpy as np

from jaxrl_async.devices import products
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.models import configs


def depends_on_row(
  model: configs.ModelConfig,
  sizes: decode_state_lib.EngineSizes,
  dtype: str,
  *,
  num_parts: int,
) -> bool:
  """Multiply equal rows by a matrix, and return whether any result differs.

  The products are those of the model's MLP, with as many rows as the programs
  of the engine have on one device. Each is compiled, in about 30 ms.

  Args:
    model: architecture of the model.
    sizes: of the engine.
    dtype: of the engine's activations.
    num_parts: the parts into which the rollout slice divides the rows.
  """
  rng = np.random.default_rng(0)
  product = jax.jit(
    lambda rows, matrix: products.contract(rows, matrix, (0,), rows.dtype)
  )
  tokens = (sizes.prefill_rows * n for n in sizes.prefill_buckets)
  numbers = {-(-rows // num_parts) for rows in (sizes.num_slots, *tokens)}
  widths = model.model_dim, model.mlp_dim
  for num_rows, (d, n) in itertools.product(numbers, (widths, widths[::-1])):
    row = jnp.asarray(rng.normal(size=(1, d)), dtype)
    matrix = jnp.asarray(rng.normal(size=(d, n)), dtype)
    found = np.asarray(product(jnp.repeat(row, num_rows, 0), matrix))
    if (found != found[:1]).any():
      return True
  return False
