"""Arrays come to another mesh from device to device, never through NumPy."""

import collections
import contextlib
import dataclasses

import jax
from jax._src import array as jax_array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import lora_world
import numpy as np
import pytest
import test_weight_transfer
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import shard_copies
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.training import publishing
from jaxrl_async.weights import weight_transfer

MeshShape = mesh_lib.MeshShape
MODEL = test_weight_transfer.MODEL
LORA_MODEL = dataclasses.replace(MODEL, lora=lora_world.LORA)
PAIRS = [
  (MeshShape(fsdp=2), MeshShape(tensor=2)),
  (MeshShape(fsdp=2), MeshShape(data=2)),
  (MeshShape(data=2), MeshShape(tensor=2)),
  (MeshShape(fsdp=4), MeshShape(tensor=2)),
  (MeshShape(fsdp=2, tensor=2), MeshShape(data=2, tensor=2)),
  (MeshShape(), MeshShape(tensor=2)),
  (MeshShape(tensor=4), MeshShape()),
]
INT8 = sections.WeightFormat.INT8


@contextlib.contextmanager
def nothing_in_numpy(*, runs_programs=True):
  """Raises if an array of a device becomes one of NumPy."""

  def value(_):
    raise AssertionError("an array goes through the host's memory")

  def program(*_):
    raise AssertionError("a program runs")

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax_array.ArrayImpl, "_value", property(value))
    if not runs_programs:
      patch.setattr(shard_copies, "_cut", program)
      patch.setattr(shard_copies, "_joined", program)
    yield


def cut_devices(train_shape, rollout_shape):
  return mesh_lib.cut_devices(
    jax.devices(), train_shape=train_shape, rollout_shape=rollout_shape
  )


def trainer_params(model, mesh):
  """Parameters with adapters that are not zero, as a trainer holds them."""
  axes = transformer.logical_axes(model, is_stacked=True)
  return mesh_lib.put(
    jax.tree.map(np.asarray, tiny.params(0, model)),
    mesh_lib.shardings(mesh, mesh_lib.TRAIN_RULES, axes),
  )


def make_publish(model, mesh, weights, **part):
  layout = mesh_lib.Layout(mesh=mesh, rules=mesh_lib.TRAIN_RULES)
  return publishing.make_publish(
    model, layout, dtype="bfloat16", weights=weights, **part
  )


def make_engine(model, mesh, weights):
  return engine_lib.Engine(
    model,
    tiny.SIZES,
    mesh=mesh,
    seed=7,
    end_tokens=tiny.END_TOKENS,
    dtype="bfloat16",
    weights=weights,
  )


def sent(published, shardings):
  """Publishes and adopts by a channel, with nothing in NumPy."""
  channel = weight_transfer.DirectChannel(aot.placed(published, shardings))
  with nothing_in_numpy():
    channel.publish(published, 3)
  with nothing_in_numpy(runs_programs=False):
    adopted, version = channel.adopt(-1)
  assert version == 3
  return adopted


def assert_same(found, wanted, shardings):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)

  def check(x, y, sharding):
    assert (x.dtype, x.sharding) == (y.dtype, sharding)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()

  jax.tree.map(check, found, wanted, shardings)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [sections.WeightFormat.FLOAT, INT8])
@pytest.mark.parametrize("shapes", PAIRS, ids=lambda x: f"{x[0]} to {x[1]}")
def test_a_version_reaches_the_engine_from_device_to_device(shapes, weights):
  train_mesh, rollout_mesh = cut_devices(*shapes)
  publish = make_publish(MODEL, train_mesh, weights)
  published = publish(trainer_params(MODEL, train_mesh))
  engine = make_engine(MODEL, rollout_mesh, weights)
  shardings = engine.params_sharding.weights
  adopted = sent(published, shardings)
  assert_same(adopted, published, shardings)
  if rollout_mesh.size == 1 and weights is sections.WeightFormat.FLOAT:
    # One device of a CPU has its bfloat16 matrices in another order.
    expected = quantization.channels_first(adopted)
    with nothing_in_numpy():
      loaded = engine.load_params(published, 3).weights
    assert jax.tree.structure(loaded) == jax.tree.structure(expected)
    assert all(
      np.asarray(x).tobytes() == np.asarray(y).tobytes()
      for x, y in zip(*map(jax.tree.leaves, (loaded, expected)), strict=True)
    )
    return
  with nothing_in_numpy(runs_programs=False):
    loaded = engine.load_params(adopted, 3).weights
  assert jax.tree.all(jax.tree.map(lambda x, y: x is y, loaded, adopted))
  # Also without a channel, as in a replay.
  with nothing_in_numpy():
    loaded = engine.load_params(published, 3).weights
  assert_same(loaded, published, shardings)


@pytest.mark.slow
def test_adapters_and_their_base_reach_the_engine_from_device_to_device():
  train_mesh, rollout_mesh = cut_devices(
    MeshShape(fsdp=2, context=2), MeshShape(data=2, tensor=2)
  )
  params = trainer_params(LORA_MODEL, train_mesh)
  engine = make_engine(LORA_MODEL, rollout_mesh, INT8)
  shardings = engine.params_sharding.weights
  published, adopted = [], []
  for part in (lora_lib.base, lora_lib.adapters):
    publish = make_publish(LORA_MODEL, train_mesh, INT8, part=part)
    published.append(publish(part(params)))
    adopted.append(sent(published[-1], part(shardings)))
  with nothing_in_numpy(runs_programs=False):
    engine.hold_base(adopted[0])
    loaded = engine.load_params(adopted[1], 3).weights
  assert_same(loaded, lora_lib.joined(*published), shardings)


def sharding(first_device, sizes, spec):
  devices = jax.devices()[first_device : first_device + np.prod(sizes)]
  mesh = Mesh(
    np.array(devices).reshape(sizes),
    ("x", "y")[: len(sizes)],
    axis_types=(AxisType.Auto,) * len(sizes),
  )
  return NamedSharding(mesh, spec)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
  ("here", "there"),
  [
    (sharding(0, (3,), P("x")), sharding(3, (2,), P("x"))),
    (sharding(0, (2,), P("x")), sharding(2, (6,), P("x"))),
    (sharding(0, (4,), P(None, "x")), sharding(4, (3,), P("x"))),
    (sharding(0, (2, 2), P("x", "y")), sharding(4, (2, 2), P("y", None, "x"))),
    (sharding(0, (2, 2), P(None, "y")), sharding(4, (4,), P(None, None, "x"))),
    # On the same devices, and on some of them.
    (sharding(0, (2, 2), P("x", "y")), sharding(0, (4,), P(None, None, "x"))),
    (sharding(0, (2, 2), P("x", "y")), sharding(3, (2,), P(None, "x"))),
  ],
  ids=str,
)
def test_every_bit_arrives_whatever_the_cuts(here, there, dtype):
  dtype = jax.numpy.dtype(dtype)
  rng = np.random.default_rng(0)
  # NaNs with payloads and subnormal numbers among them.
  bits = np.frombuffer(rng.bytes(6 * 8 * 4 * dtype.itemsize), dtype)
  array = jax.device_put(bits.reshape(6, 8, 4), here)
  with nothing_in_numpy():
    (found,) = shard_copies.put([array], [there])
  assert found.sharding == there
  assert np.asarray(found).tobytes() == bits.tobytes()


def test_no_device_makes_much_more_than_its_part():
  """Where all devices of the other mesh want whole arrays, one makes each."""
  train_mesh, rollout_mesh = cut_devices(MeshShape(fsdp=4), MeshShape(data=2))
  axes = transformer.logical_axes(MODEL, is_stacked=True)
  split, whole = (
    jax.tree.leaves(mesh_lib.shardings(mesh, rules, axes))
    for mesh, rules in (
      (train_mesh, mesh_lib.TRAIN_RULES),
      (rollout_mesh, mesh_lib.ROLLOUT_RULES),
    )
  )
  arrays = jax.device_put(jax.tree.leaves(tiny.params(0, MODEL)), split)
  num_bytes = collections.Counter()
  for x in shard_copies.regrouped(arrays, whole):
    if isinstance(x, shard_copies.Regrouped):
      first, second = x.shards
      assert first is second
      num_bytes[first.device] += first.nbytes
  assert len(num_bytes) == 4
  largest = max(x.nbytes for x in arrays)
  assert max(num_bytes.values()) - min(num_bytes.values()) <= largest


def test_what_is_in_place_is_not_copied():
  here = sharding(0, (2, 2), P("x", "y"))
  array = jax.device_put(np.zeros((4, 4), np.float32), here)
  (found,) = shard_copies.put([array], [here])
  assert found is array
  # Another sharding on the same device shares its memory.
  one = sharding(0, (1,), P())
  whole = jax.device_put(np.zeros((4, 4), np.float32), one)
  (found,) = shard_copies.put([whole], [sharding(0, (1,), P("x"))])
  assert found.unsafe_buffer_pointer() == whole.unsafe_buffer_pointer()
