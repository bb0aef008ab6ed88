"""What rematerialisation keeps of each attention kernel, in bytes.

Nothing is run: JAX tells the shapes of what the backward pass is given. For
Tokamax and cuDNN, their questions for a device are answered here.
"""

import collections
import functools

import jax
from jax import numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.extend import backend
import numpy as np
import pytest

from jaxrl_async.config import sections
from jaxrl_async.models import remat as remat_lib
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.models.attention import tokamax_api

# Tokamax's, under JAX 0.10.
pytestmark = pytest.mark.filterwarnings("ignore:The out_shape and scratch")

N, K, H, T = 12, 2, 128, 1024
FULL, ATTENTION, DOTS = (
  sections.Remat[x] for x in ("FULL", "ATTENTION", "DOTS")
)
# The result in bfloat16, and the log-sums in float32. Tokamax keeps maximum and
# sum apart.
KEPT = {
  "xla": 0,
  "chunks": 0,
  "blocks": 2 * N * H + 4 * N,
  "splash": 2 * N * H + 4 * N,
  "tokamax": 2 * N * H + 8 * N,
  "cudnn": 2 * N * H + 4 * N,
  "pallas_gpu": 2 * N * H + 4 * N,
}
# Calls of kernels in both passes: one forward, and one or two backward.
KERNELS = "pallas_call", "mpmd_map", "dot_product_attention_fwd_wrapper"
CALLS = {"splash": 3, "tokamax": 3, "cudnn": 1, "pallas_gpu": 3}


class Hopper:
  """What Tokamax asks a device for."""

  platform = "gpu"
  compute_capability = "9.0"
  device_kind = "NVIDIA H100 80GB HBM3"
  core_count = 132


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
  monkeypatch.setattr(backend, "get_default_device", Hopper)
  monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91_500)
  for name in ("check_compute_capability", "is_cuda_compute_capability_equal"):
    monkeypatch.setattr(cudnn, name, lambda capability: capability == "9.0")
  kernel = tokamax_api.kernel_named("mosaic_gpu")
  for part in kernel, kernel.vjp:
    monkeypatch.setattr(type(part), "supported_on", lambda self, device: True)


def attention(name, remat):
  """Attention of a layer; its inputs are not those of the layer."""
  attend = packed_attention.IMPLEMENTATIONS[name]
  if name in ("splash", "pallas_gpu"):
    attend = functools.partial(attend, interpret=True)

  def layer(query, key, value, start):
    two = jnp.bfloat16(2)
    return attend(query * two, key * two, value * two, start, start)

  return jax.checkpoint(layer, policy=remat_lib.POLICIES[remat])


def arguments():
  def heads(n):
    return jax.ShapeDtypeStruct((1, T, n, H), jnp.bfloat16)

  start = jax.ShapeDtypeStruct((1, T), jnp.int32)
  return heads(N), heads(K), heads(K), start


def num_bytes(tree):
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def count(jaxpr, calls):
  """Add the calls of kernels in a program to a counter."""
  for equation in jaxpr.eqns:
    calls[equation.primitive.name] += 1
    if equation.primitive.name in KERNELS:
      continue
    for parameter in jax.tree.leaves(
      equation.params, is_leaf=lambda x: hasattr(x, "eqns")
    ):
      inner = getattr(parameter, "jaxpr", parameter)
      if hasattr(inner, "eqns"):
        count(inner, calls)
  return calls


@pytest.mark.parametrize("remat", [FULL, ATTENTION, DOTS])
@pytest.mark.parametrize("name", KEPT)
def test_bytes_of_a_token_that_are_kept_between_the_passes(name, remat, caplog):
  attend = attention(name, remat)
  kept = jax.eval_shape(lambda *x: jax.vjp(attend, *x)[1], *arguments())
  found = (num_bytes(kept) - num_bytes(arguments())) / T
  found -= 0 if remat is FULL else KEPT[name]
  # Splash is given the indices of queries and the blocks to compute as well.
  assert 0 <= found < 5 if name == "splash" else found == 0
  assert "utotuning" not in caplog.text  # nor is a screenful logged


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_is_kept_is_not_called_again(name):
  def calls(remat):
    attend = attention(name, remat)
    mixed = arguments()[0]

    def gradients(query, key, value, start, d_mixed):
      pull = jax.vjp(lambda *x: attend(*x, start), query, key, value)[1]
      return pull(d_mixed)

    program = jax.make_jaxpr(gradients)(*arguments(), mixed)
    found = count(program.jaxpr, collections.Counter())
    return sum(found[kernel] for kernel in KERNELS)

  assert calls(ATTENTION) == calls(DOTS) == CALLS[name]
  assert calls(FULL) == CALLS[name] + 1


def test_tokamax_masks_as_packed_rows_do():
  """Its own plain XLA, under the mask that its kernel is given."""
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.standard_normal((2, 96, n, 16), np.float32))
    for n in (6, 2, 2)
  )
  lengths = [[40, 1, 30, 25], [96]]
  firsts = [np.cumsum([0, *x[:-1]]) for x in lengths]
  start = np.stack(
    [np.repeat(*x) for x in zip(firsts, lengths, strict=True)]
  ).astype(np.int32)
  for window in (None, 7):
    seen = packed_attention.windowed_start(jnp.asarray(start), window)
    found = tokamax_api.attend(query, key, value, seen, kernel="xla")
    expected = packed_attention.xla(query, key, value, seen, seen)
    np.testing.assert_allclose(found, expected, atol=1e-5)
