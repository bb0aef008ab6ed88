"""Products of groups of rows, each group with a matrix of its own.

TPUs have an instruction for them, `jax.lax.ragged_dot`. XLA's CPU backend would
multiply all rows by every matrix. Here it multiplies blocks of rows, in a loop.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.devices import products

_LEAST_ROWS, _MOST_ROWS = 8, 128  # of a block
# Sums over the rows of each group, which give a matrix for each of them.
_SUM_OVER_ROWS = lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(((0,), (0,)), ((), ())),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[],
)


@jax.custom_vjp
def product(
  x: Float[Array, "M K"],
  matrices: Float[Array, "E K N"],
  sizes: Int[Array, "E"],
) -> Float[Array, "M N"]:
  """Return each row of x times the matrix of its group.

  Args:
    x: rows in the order of their groups.
    matrices: of each group, in the dtype of x.
    sizes: number of rows of each group. Rows beyond their sum have results of
      no meaning.
  """
  return _by_platform(
    lambda *given: _blocks_product(*given, axis=0),
    lax.ragged_dot,
    x,
    matrices,
    sizes,
  )


def _forward(x: jax.Array, matrices: jax.Array, sizes: jax.Array):
  return product(x, matrices, sizes), (x, matrices, sizes)


def _backward(inputs: tuple[jax.Array, ...], d_out: jax.Array):
  x, matrices, sizes = inputs
  d_out = d_out.astype(x.dtype)
  d_x = _by_platform(
    lambda *given: _blocks_product(*given, axis=1),
    lambda d, w, sizes: lax.ragged_dot(d, w.swapaxes(1, 2), sizes),
    d_out,
    matrices,
    sizes,
  )
  d_matrices = _by_platform(
    _blocks_outer,
    lambda x, d, sizes: lax.ragged_dot_general(x, d, sizes, _SUM_OVER_ROWS),
    x,
    d_out,
    sizes,
  )
  return d_x, d_matrices.astype(matrices.dtype), None


product.defvjp(_forward, _backward)


def _by_platform(
  on_cpu: Callable[..., jax.Array],
  plain: Callable[..., jax.Array],
  *arrays: jax.Array,
) -> jax.Array:
  return lax.platform_dependent(*arrays, cpu=on_cpu, default=plain)


class _Blocks:
  """Blocks of rows, each of which begins with rows of a single group.

  Attributes:
    size: rows of a block. It depends on shapes only.
    number: of blocks that have rows.
  """

  def __init__(self, num_rows: int, sizes: Int[Array, "E"]):
    per_group = -(-num_rows // len(sizes))
    size = 1 << (per_group - 1).bit_length()
    self.size = min(max(size, _LEAST_ROWS), _MOST_ROWS)
    in_group = (sizes + self.size - 1) // self.size
    self._last = jnp.cumsum(in_group)
    self._first = self._last - in_group
    self._ends = jnp.cumsum(sizes)
    self._starts = self._ends - sizes
    self.number = self._last[-1]

  def at(self, block: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a block's group, its first row, and how many rows are its own."""
    group = jnp.sum(self._last <= block, dtype=jnp.int32)
    start = self._starts[group] + (block - self._first[group]) * self.size
    return group, start, self._ends[group] - start


def _blocks_product(
  x: jax.Array, matrices: jax.Array, sizes: jax.Array, *, axis: int
) -> jax.Array:
  """Return the products, summed over `axis` of each matrix.

  A block may end with rows of the next groups. Their results are overwritten by
  the blocks of these groups, which follow.
  """
  blocks = _Blocks(len(x), sizes)
  padded = jnp.pad(x, ((0, blocks.size), (0, 0)))

  def step(block: jax.Array, out: jax.Array) -> jax.Array:
    group, start, _ = blocks.at(block)
    rows = lax.dynamic_slice_in_dim(padded, start, blocks.size)
    matrix = lax.dynamic_index_in_dim(matrices, group, keepdims=False)
    found = products.contract(rows, matrix, (axis,), x.dtype)
    return lax.dynamic_update_slice_in_dim(out, found, start, 0)

  shape = len(padded), matrices.shape[2 - axis]
  out = lax.fori_loop(0, blocks.number, step, jnp.zeros(shape, x.dtype))
  return out[: len(x)]


def _blocks_outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
  """Return for each group the sum of the outer products of its rows."""
  blocks = _Blocks(len(x), sizes)
  padding = (0, blocks.size), (0, 0)
  padded_x, padded_y = jnp.pad(x, padding), jnp.pad(y, padding)
  order = jnp.arange(blocks.size)[:, None]

  def step(block: jax.Array, sums: jax.Array) -> jax.Array:
    group, start, num_own = blocks.at(block)
    own = lax.dynamic_slice_in_dim(padded_x, start, blocks.size)
    own = jnp.where(order < num_own, own, jnp.zeros_like(own))
    other = lax.dynamic_slice_in_dim(padded_y, start, blocks.size)
    other = jnp.where(order < num_own, other, jnp.zeros_like(other))
    added = products.outer(own, other, 1, jnp.float32)
    before = lax.dynamic_index_in_dim(sums, group, keepdims=False)
    return lax.dynamic_update_index_in_dim(sums, before + added, group, 0)

  shape = len(sizes), x.shape[1], y.shape[1]
  return lax.fori_loop(0, blocks.number, step, jnp.zeros(shape, jnp.float32))
