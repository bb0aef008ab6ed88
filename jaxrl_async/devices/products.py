"""Products with matrices, summed in float32, and rows of matrices.

XLA's CPU backend multiplies bfloat16 with the processor's instructions for it
(AVX512_BF16, AMX), twice as fast as float32, if the result is float32 and the
left operand is summed over its last axis. From most other products of bfloat16
it makes one of float32, and converts both operands as a whole in each call.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

_BLOCK = 16
_FEW_ROWS = 64


def contract(
  x: jax.Array, matrix: jax.Array, axes: tuple[int, ...], dtype: Any
) -> jax.Array:
  """Return the product of x with a matrix, summed over the last axes of x.

  Args:
    x: at least one of its axes is not summed. It must not be the transpose of
      a matrix, because XLA's CPU backend could then fail.
    matrix: of the dtype of x; its summed axes are its first or its last ones.
    axes: the summed axes of the matrix, as many as are summed of x.
    dtype: of the result.
  """
  kept = x.ndim - len(axes)
  summed = tuple(range(kept, x.ndim)), axes

  def on_cpu(x: jax.Array, matrix: jax.Array) -> jax.Array:
    size = math.prod(x.shape[kept:])
    axis = 0 if axes[0] == 0 else 1
    flat = matrix.reshape((size, -1) if axis == 0 else (-1, size))
    rows = x.reshape(-1, size)
    if axis == 1 and len(rows) <= _FEW_ROWS:
      # XLA reorders the right operand in each call. Few rows take less time
      # than the matrix.
      product = _bfloat16_product(flat, rows, 1).T
    else:
      product = _bfloat16_product(rows, flat, axis)
    others = [n for i, n in enumerate(matrix.shape) if i not in axes]
    return product.reshape(*x.shape[:kept], *others).astype(dtype)

  def plain(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return lax.dot_general(
      x, matrix, (summed, ((), ())), preferred_element_type=dtype
    )

  return _by_platform(on_cpu, plain, x, matrix)


def outer(x: jax.Array, y: jax.Array, num_rows: int, dtype: Any) -> jax.Array:
  """Return the sum over rows of the outer products of x and y.

  Args:
    x: begins with the axes of rows.
    y: likewise, and of the same dtype.
    num_rows: number of these axes.
    dtype: of the result, which has the other axes of x and then those of y.
  """
  rows = tuple(range(num_rows))
  of_x, of_y = x.shape[num_rows:], y.shape[num_rows:]

  def on_cpu(x: jax.Array, y: jax.Array) -> jax.Array:
    # Transposed in two steps. XLA would make a single one part of the product.
    width = math.prod(of_x)
    block = math.gcd(width, _BLOCK)
    turned = x.reshape(-1, width // block, block).transpose(1, 2, 0)
    size = turned.shape[-1]
    product = _bfloat16_product(
      turned.reshape(width, size), y.reshape(size, -1), 0
    )
    return product.reshape(*of_x, *of_y).astype(dtype)

  def plain(x: jax.Array, y: jax.Array) -> jax.Array:
    # XLA's CPU backend transposes the left operand one column at a time,
    # together with all elementwise work before it.
    is_turned = math.prod(of_x) > math.prod(of_y)
    operands = (y, x) if is_turned else (x, y)
    product = lax.dot_general(
      *operands, ((rows, rows), ((), ())), preferred_element_type=dtype
    )
    if not is_turned:
      return product
    first = range(len(of_y), product.ndim)
    return product.transpose(*first, *range(len(of_y)))

  return _by_platform(on_cpu, plain, x, y)


def rows(matrix: jax.Array, index: jax.Array) -> jax.Array:
  """Return `matrix[index]`, rows of a matrix.

  To gather bfloat16, XLA's CPU backend converts the whole matrix to float32,
  which takes three times as long as to copy its bits.
  """

  def on_cpu(matrix: jax.Array, index: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(matrix, jnp.uint16)
    return lax.bitcast_convert_type(bits[index], matrix.dtype)

  return _by_platform(
    on_cpu, lambda matrix, index: matrix[index], matrix, index
  )


def _by_platform(
  on_cpu: Callable[..., jax.Array],
  plain: Callable[..., jax.Array],
  *arrays: jax.Array,
) -> jax.Array:
  """Return what `on_cpu` makes of bfloat16 on a CPU, and else `plain`."""
  if arrays[0].dtype != jnp.bfloat16:
    return plain(*arrays)
  return lax.platform_dependent(*arrays, cpu=on_cpu, default=plain)


def _bfloat16_product(lhs: jax.Array, rhs: jax.Array, axis: int) -> jax.Array:
  """Return the float32 product over the last axis of lhs and `axis` of rhs.

  XLA would turn a product around whose result is transposed. The CPU backend
  compiles that and then cannot run it. Rounding off the last bit prevents it.
  """
  product = lax.dot_general(
    lhs, rhs, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32
  )
  return lax.reduce_precision(product, exponent_bits=8, mantissa_bits=22)
