"""The rate of matrix products: what is multiplied, and what is counted."""

import jax
import numpy as np
import pytest

from jaxrl_async.planning import matmul_rate


@pytest.mark.parametrize("num_devices", [1, 3])
def test_the_matmul_rate_is_that_of_all_devices_at_once(
  monkeypatch, num_devices
):
  """By a clock on which each wait takes a second."""
  ticks = iter(range(100))
  monkeypatch.setattr(matmul_rate.time, "perf_counter", lambda: next(ticks))
  devices = jax.devices()[:num_devices]
  rate = matmul_rate.measured_matmul_flops(devices, "float32", 16)
  assert rate == num_devices * 2 * 16**3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_matmul_rate_is_that_of_numbers_that_differ(monkeypatch, dtype):
  """Equal ones take less power, which makes a GPU faster."""
  products = []
  monkeypatch.setattr(matmul_rate.jax, "block_until_ready", products.append)
  matmul_rate.measured_matmul_flops(jax.devices()[:2], dtype, 16)
  for product in products:
    assert product.shape == (2, 16, 16) and product.dtype == dtype
    assert np.asarray(product, np.float64).std() == pytest.approx(4.0, rel=0.3)
