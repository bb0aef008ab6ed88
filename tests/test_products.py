"""Products and rows of matrices, against NumPy in float64."""

import itertools
import os
import pathlib
import subprocess
import sys

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from jaxrl_async.devices import products

DTYPES = ["float32", "bfloat16"]
# Both operands of a sum are rounded already; it has up to 192 terms.
ATOL = 1e-4


def drawn(shape, dtype, seed):
  values = np.random.default_rng(seed).standard_normal(shape, np.float32)
  return jnp.asarray(values, dtype)


def wide(x):
  return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
  ("x", "matrix", "axes"),
  [
    ((2, 7, 96), (96, 3, 32), (0,)),
    ((2, 7, 3, 64), (3, 64, 40), (0, 1)),
    ((2, 7, 3, 32), (96, 3, 32), (1, 2)),
    ((5, 96), (50, 96), (1,)),
    ((70, 96), (50, 96), (1,)),
    ((1, 9), (9, 5), (0,)),
  ],
)
def test_a_product_is_summed_in_float32(dtype, x, matrix, axes):
  x, matrix = drawn(x, dtype, 0), drawn(matrix, dtype, 1)
  found = jax.jit(
    lambda x, matrix: products.contract(x, matrix, axes, jnp.float32)
  )(x, matrix)
  last = range(x.ndim - len(axes), x.ndim)
  expected = np.tensordot(wide(x), wide(matrix), (tuple(last), axes))
  np.testing.assert_allclose(found, expected, atol=ATOL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
  ("x", "y"),
  [
    ((2, 7, 96), (2, 7, 3, 32)),
    ((2, 7, 3, 64), (2, 7, 40)),
    ((2, 7, 5), (2, 7, 50)),
  ],
)
def test_outer_products_are_summed_in_float32(dtype, x, y):
  x, y = drawn(x, dtype, 0), drawn(y, dtype, 1)
  found = jax.jit(lambda x, y: products.outer(x, y, 2, jnp.float32))(x, y)
  expected = np.tensordot(wide(x), wide(y), ((0, 1), (0, 1)))
  np.testing.assert_allclose(found, expected, atol=ATOL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_matrix(dtype):
  matrix = drawn((40, 6), dtype, 0)
  index = np.array([[0, 39, 7], [7, 7, 1]])
  found = jax.jit(products.rows)(matrix, index)
  assert found.dtype == matrix.dtype
  np.testing.assert_array_equal(wide(found), wide(matrix)[index])


# XLA would turn these products around.
TRANSPOSED = (
  lambda x, y: products.contract(x, y, (0,), jnp.float32).T,
  lambda x, y: products.contract(x, y, (1,), jnp.float32).T,
  lambda x, y: products.contract(x, y.T, (1,), jnp.float32).T,
  lambda x, y: products.outer(x, x, 1, jnp.float32).T,
  lambda x, y: products.outer(x.T, y.T, 1, jnp.float32).T,
)


def check_transposed():
  for product, size in itertools.product(TRANSPOSED, (16, 64, 576)):
    x, y = (drawn((size, size), "bfloat16", seed) for seed in range(2))
    found = jax.jit(product)(x, y)
    expected = product(x.astype("float32"), y.astype("float32"))
    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_a_product_runs_whatever_is_transposed():
  """With XLA's own products, which tests use, and with those of a run."""
  check_transposed()
  flags = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  command = "import test_products; test_products.check_transposed()"
  subprocess.run(
    [sys.executable, "-c", command],
    check=True,
    cwd=pathlib.Path(__file__).parent,
    env=flags,
  )
