"""Weights whose every element says which version they are."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

DEADLINE_S = 60.0
INCARNATION = "now"


def _mesh(first: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
  devices = np.array(jax.devices()[first : first + int(np.prod(shape))])
  types = (AxisType.Auto,) * len(shape)
  return Mesh(devices.reshape(shape), names, axis_types=types)


def _train_shardings():
  mesh = _mesh(0, (2, 2), ("fsdp", "tensor"))
  specs = {
    "embedding": P("fsdp", "tensor"),
    "layers": [{"query": P("tensor", "fsdp")}, {"query": P(None, "tensor")}],
    "scale": P(),
  }
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


@functools.partial(jax.jit, out_shardings=_train_shardings())
def _jitted_params(stamp):
  return {
    "embedding": jnp.full((8, 6), stamp, jnp.float32),
    "layers": [
      {"query": jnp.full((4, 8), stamp, jnp.bfloat16)},
      {"query": jnp.full((4, 8), stamp, jnp.bfloat16)},
    ],
    "scale": jnp.full((), stamp, jnp.int32),
  }


def params(stamp: int):
  """Params whose every element says which version they are, on (2, 2)."""
  return _jitted_params(np.int32(stamp))


def target(first_device: int = 4, num_devices: int = 2):
  """The rollout side's shardings: other devices, another axis."""
  mesh = _mesh(first_device, (num_devices,), ("data",))

  def abstract(leaf):
    spec = P("data") if leaf.ndim and leaf.shape[0] == 8 else P()
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
    )

  return jax.tree.map(abstract, params(0))


def publish_and_wait(channel, version):
  channel.publish(params(version), version)
  assert channel.wait_for_version(version - 1, DEADLINE_S)


def assert_all(weights, version):
  for leaf in jax.tree.leaves(weights):
    assert (np.asarray(leaf).astype(np.int64) == version).all()
