"""Products of activations with a kernel, with gradients of their own."""

import math
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float


def _product(
  equation: str, dtype: Any, x: Float[Array, "..."], kernel: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Return the product in `dtype`, with the kernel cast to the type of x."""
  return jnp.einsum(
    equation, x, kernel.astype(x.dtype), preferred_element_type=dtype
  )


def _backward(
  equation: str, dtype: Any, inputs: Any, d_out: Float[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
  """Return the gradients that JAX would compute, with operands reordered.

  In JAX's order, XLA's CPU backend transposes the wider operand of the kernel's
  gradient one column at a time, together with all elementwise work before it.
  That took a third of a train step. The kernel's gradient is accumulated in the
  kernel's own dtype.
  """
  del dtype
  x, kernel = inputs
  num_out = len(equation.partition("->...")[2])
  num_in = kernel.ndim - num_out
  rows = tuple(range(x.ndim - num_in))
  d_out = d_out.astype(x.dtype)

  def kernel_gradient(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
      lhs, rhs, ((rows, rows), ((), ())), preferred_element_type=kernel.dtype
    )

  outer = tuple(range(num_in, kernel.ndim))
  last = tuple(range(len(rows), d_out.ndim))
  d_x = jax.lax.dot_general(
    d_out, kernel.astype(x.dtype), ((last, outer), ((), ()))
  )
  if math.prod(kernel.shape[:num_in]) <= math.prod(kernel.shape[num_in:]):
    return d_x, kernel_gradient(x, d_out)
  d_kernel = kernel_gradient(d_out, x)
  return d_x, d_kernel.transpose(*range(num_out, kernel.ndim), *range(num_out))


_project = jax.custom_vjp(_product, nondiff_argnums=(0, 1))
_project.defvjp(
  lambda equation, dtype, x, kernel: (
    _product(equation, dtype, x, kernel),
    (x, kernel),
  ),
  _backward,
)


def project(
  equation: str, dtype: Any, x: Float[Array, "..."], kernel: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Return `jnp.einsum(equation, x, kernel)` in `dtype`.

  Args:
    equation: such as "...d,dnh->...nh". The axes of x that are summed are its
      last and the kernel's first ones, in the same order.
    dtype: of the result; None is the dtype of x.
    x: activations.
    kernel: is cast to the dtype of x.
  """
  num_in = kernel.ndim - len(equation.partition("->...")[2])
  if num_in > 1:
    # Two summed axes are one axis in memory. XLA's CPU backend does not see
    # that, and transposes the kernel in each decode step.
    letters = equation.partition(",")[2][:num_in]
    equation = equation.replace(letters, letters[0])
    x = x.reshape(*x.shape[: x.ndim - num_in], -1)
    kernel = kernel.reshape(-1, *kernel.shape[num_in:])
  return _project(equation, dtype, x, kernel)
