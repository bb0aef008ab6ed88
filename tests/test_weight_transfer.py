"""What both channels promise."""

import dataclasses
import functools
import threading
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stamped
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.training import publishing
from jaxrl_async.weights import weight_transfer

KINDS = sections.Channel.DIRECT, sections.Channel.ORBAX


@pytest.fixture(params=KINDS, ids=lambda kind: kind.value)
def channel(request, tmp_path):
  made = weight_transfer.make_channel(
    request.param,
    directory=tmp_path / "transfer",
    target=stamped.target(),
    coalesce=True,
  )
  yield made
  made.close()


def _join(threads):
  for thread in threads:
    thread.join(stamped.DEADLINE_S)
    assert not thread.is_alive()


def test_params_arrive_bit_for_bit_in_the_rollout_shardings(channel):
  rng = np.random.default_rng(0)

  def noise(leaf):
    data = rng.bytes(leaf.size * leaf.dtype.itemsize)
    bits = np.frombuffer(data, leaf.dtype).reshape(leaf.shape)
    return jax.device_put(bits, leaf.sharding)

  # Random bits: NaNs with payloads and subnormal numbers among them.
  params = jax.tree.map(noise, stamped.params(0))
  channel.publish(params, 3)
  assert channel.wait_for_version(-1, stamped.DEADLINE_S)
  adopted, version = channel.adopt(newer_than=2)
  assert version == 3
  assert jax.tree.structure(adopted) == jax.tree.structure(params)
  triples = zip(
    jax.tree.leaves(adopted),
    jax.tree.leaves(params),
    jax.tree.leaves(stamped.target()),
    strict=True,
  )
  for got, sent, wanted in triples:
    assert got.dtype == sent.dtype
    assert np.asarray(got).tobytes() == np.asarray(sent).tobytes()
    assert got.sharding == wanted.sharding


MODEL = dataclasses.replace(
  tiny.MODEL, vocab_size=96, num_heads=8, num_kv_heads=8
)
TRAIN_SHAPES = [
  mesh_lib.MeshShape(fsdp=4),
  mesh_lib.MeshShape(data=2, context=2),
  mesh_lib.MeshShape(fsdp=2, tensor=2),
  mesh_lib.MeshShape(tensor=2),
]
ROLLOUT_SHAPES = [
  mesh_lib.ONE,
  mesh_lib.MeshShape(data=2, tensor=2),
  mesh_lib.MeshShape(tensor=4),
]


def random_params(mesh):
  """Finite float32 numbers of all magnitudes, on a train mesh."""
  rng = np.random.default_rng(0)

  def noise(leaf):
    bits = rng.integers(0, 2**32, leaf.shape, np.uint32).view(np.float32)
    return np.where(np.isfinite(bits), bits, 1)

  axes = transformer.logical_axes(MODEL, is_stacked=True)
  shardings = mesh_lib.shardings(mesh, mesh_lib.TRAIN_RULES, axes)
  return mesh_lib.put(jax.tree.map(noise, tiny.params(0, MODEL)), shardings)


@pytest.mark.slow
@pytest.mark.parametrize("train_shape", TRAIN_SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda x: x.value)
def test_the_cast_arrives_bit_for_bit_on_any_pair_of_meshes(
  kind, train_shape, tmp_path
):
  devices = jax.devices()
  mesh = mesh_lib.make_mesh(devices[: train_shape.num_devices], train_shape)
  params = random_params(mesh)
  publish = functools.partial(
    publishing.published_params,
    num_layers=MODEL.num_layers,
    dtype="bfloat16",
    weights=sections.WeightFormat.FLOAT,
  )
  published = jax.jit(publish)(params)
  host = transformer.unstack(jax.tree.map(np.asarray, params), MODEL.num_layers)
  sent = jax.tree.map(lambda x: x.astype(jnp.bfloat16), host)
  axes = transformer.logical_axes(MODEL, is_stacked=False)
  for index, shape in enumerate(ROLLOUT_SHAPES):
    rollout_mesh = mesh_lib.make_mesh(devices[-shape.num_devices :], shape)
    target = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      sent,
      mesh_lib.shardings(rollout_mesh, mesh_lib.ROLLOUT_RULES, axes),
    )
    made = weight_transfer.make_channel(
      kind,
      directory=tmp_path / str(index),
      target=target,
      coalesce=True,
    )
    made.publish(published, 1)
    assert made.wait_for_version(0, stamped.DEADLINE_S)
    adopted, _ = made.adopt(0)
    made.close()

    def check(got, wanted, leaf):
      assert np.asarray(got).tobytes() == wanted.tobytes()
      assert got.sharding == leaf.sharding

    jax.tree.map(check, adopted, sent, target)


def test_direct_lets_go_of_what_was_copied_or_overtaken():
  channel = weight_transfer.DirectChannel(stamped.target())
  sent = [stamped.params(version) for version in range(3)]
  gone = [weakref.ref(params["scale"]) for params in sent]
  channel.publish(sent[0], 0)
  channel.publish(sent[1], 1)
  assert channel.adopt(-1)[1] == 1
  channel.publish(sent[2], 2)
  sent.clear()
  assert [ref() is None for ref in gone] == [True, True, False]


def test_nothing_is_adopted_before_the_first_and_twice(channel):
  assert channel.newest_version() == -1
  assert channel.adopt(newer_than=-1) is None
  stamped.publish_and_wait(channel, 0)
  assert channel.newest_version() == 0
  assert channel.adopt(newer_than=0) is None
  assert channel.adopt(newer_than=-1) is not None


def test_the_newest_version_is_adopted(channel):
  for version in (4, 5, 9):
    stamped.publish_and_wait(channel, version)
  params, version = channel.adopt(newer_than=4)
  assert version == 9
  stamped.assert_all(params, 9)


def test_versions_must_increase(channel):
  channel.publish(stamped.params(2), 2)
  for version in (2, 1):
    with pytest.raises(weight_transfer.WeightTransferError, match="not newer"):
      channel.publish(stamped.params(2), version)


@pytest.mark.parametrize("wrong", ["dtype", "shape", "name"])
def test_params_that_do_not_fit_the_target_are_refused_by_name(channel, wrong):
  params = stamped.params(0)
  if wrong == "name":
    params["bias"] = params.pop("scale")
  elif wrong == "dtype":
    params["scale"] = params["scale"].astype(jnp.float32)
  else:
    params["scale"] = params["scale"][None]
  name = "bias" if wrong == "name" else "scale"
  with pytest.raises(weight_transfer.WeightTransferError, match=name):
    channel.publish(params, 0)


def test_a_waiting_engine_wakes_at_publish_and_at_close(channel):
  answers = []

  def wait_twice():
    answers.append(channel.wait_for_version(-1, stamped.DEADLINE_S))
    answers.append(channel.wait_for_version(0, stamped.DEADLINE_S))

  thread = threading.Thread(target=wait_twice)
  thread.start()
  stamped.publish_and_wait(channel, 0)
  while not answers:
    assert thread.is_alive()
  channel.close()
  _join([thread])
  assert answers == [True, False]


def test_waiting_gives_up_at_its_timeout(channel):
  start = time.monotonic()
  assert not channel.wait_for_version(-1, 0.02)
  assert time.monotonic() - start >= 0.02


def test_nothing_can_be_published_after_close(channel):
  channel.close()
  with pytest.raises(weight_transfer.WeightTransferError, match="closed"):
    channel.publish(stamped.params(0), 0)


@pytest.mark.slow
def test_engines_see_whole_and_increasing_versions_under_load(channel):
  num_versions, failures, adopted = 50, [], {0: [], 1: []}
  done = threading.Event()

  def guarded(function):
    def run():
      try:
        function()
      except BaseException as error:
        failures.append(error)
        done.set()

    return threading.Thread(target=run)

  def train():
    for version in range(num_versions):
      channel.publish(stamped.params(version), version)
      if version % 5 == 4:
        assert channel.wait_for_version(version - 1, stamped.DEADLINE_S)

  def engine(key):
    newest = -1
    while newest < num_versions - 1:
      if not channel.wait_for_version(newest, stamped.DEADLINE_S):
        raise AssertionError(f"nothing newer than {newest}")
      params, version = channel.adopt(newest)
      stamped.assert_all(params, version)
      adopted[key].append(version)
      newest = version

  def decode():
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jax.device_put(np.ones((300, 300), np.float32), jax.devices()[4])
    while not done.is_set():
      x = step(x)

  workers = [guarded(train)] + [
    guarded(lambda key=key: engine(key)) for key in adopted
  ]
  decoder = guarded(decode)
  for thread in [decoder, *workers]:
    thread.start()
  _join(workers)
  done.set()
  _join([decoder])
  assert not failures, failures
  for versions in adopted.values():
    assert versions == sorted(set(versions))
    assert versions[-1] == num_versions - 1


def test_direct_shares_memory_on_the_same_device_as_documented():
  params = {"w": jnp.arange(4096, dtype=jnp.float32)}
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    params,
  )
  channel = weight_transfer.DirectChannel(target)
  channel.publish(params, 0)
  adopted, _ = channel.adopt(-1)
  here = params["w"].unsafe_buffer_pointer()
  assert adopted["w"].unsafe_buffer_pointer() == here
