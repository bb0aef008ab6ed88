"""Trainers of adapters on meshes: the same numbers as on one device."""

import dataclasses

import jax
import lora_world
import mesh_world
import numpy as np
import pytest
import test_train_step
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import trainer as trainer_lib

pytestmark = pytest.mark.slow

MODEL = dataclasses.replace(mesh_world.MODEL, lora=lora_world.LORA)
SPLIT = mesh_lib.MeshShape(fsdp=2, context=2, tensor=2)


def make_trainer(shape, base_dtype):
  policy = train_state.ModelSettings(
    model=MODEL,
    optimizer=sections.OptimizerSection(learning_rate=1e-2, eps=1e-3),
    is_trainable=lora_lib.is_adapter,
    frozen_dtype=base_dtype,
  )
  return trainer_lib.Trainer(
    mesh=mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape),
    models={train_state.POLICY: policy},
    forward=dataclasses.replace(test_train_step.FORWARD, model=MODEL),
    loss=test_train_step.LOSS,
    stages=test_train_step.STAGES,
    batch=packing.BatchSettings(
      tokens_per_row=16,
      rows_per_microbatch=8,
      num_minibatches=2,
      min_microbatches=1,
      advantages=test_train_step.ADVANTAGES,
    ),
    num_steps=mesh_world.NUM_STEPS,
    decay=1.0,
    rollout_dtype="float32",
    busy=metrics_lib.BusyClock(),
  )


def train(trainer):
  """Starts from noisy parameters; gives the arrays of each step."""
  params = jax.tree.map(np.array, tiny.params(model=MODEL))
  trainer.start({train_state.POLICY: params})
  before = jax.tree.map(np.array, trainer.state.policy.frozen)
  steps = []
  for step in range(mesh_world.NUM_STEPS):
    groups = test_train_step.groups(seed=step)
    batch = trainer.prepare(groups)
    sums = trainer.step(test_train_step.VERSION + step, batch).sums
    steps.append({name: np.asarray(x) for name, x in sums.items()})
  after = trainer.state.policy.frozen
  jax.tree.map(np.testing.assert_array_equal, after, before)
  return steps


@pytest.mark.nightly
@pytest.mark.parametrize("base_dtype", ["int8", "float32"])
def test_a_mesh_trains_the_adapters_that_one_device_trains(base_dtype):
  one = make_trainer(mesh_lib.MeshShape(), base_dtype)
  many = make_trainer(SPLIT, base_dtype)
  for x, y in zip(train(one), train(many), strict=True):
    for name in x:
      np.testing.assert_allclose(x[name], y[name], rtol=1e-4, atol=1e-5)
  trainable = [t.state.policy.trainable["layers"] for t in (one, many)]
  start = lora_lib.adapters(tiny.params(model=MODEL))["layers"]
  for name, leaf in trainable[0].items():
    np.testing.assert_allclose(leaf, trainable[1][name], atol=2e-5)
    assert np.abs(leaf - start[name]).max() > 1e-3, name
  # Split like the kernel's axes; the rank is whole.
  a = trainable[1]["up_lora_a"]
  assert a.sharding.shard_shape(a.shape) == (2, 32 // 4, 3)
  b = trainable[1]["up_lora_b"]
  assert b.sharding.shard_shape(b.shape) == (2, 3, 64 // 2)
  check_published(many)


def check_published(trainer):
  """What travels: the base once, and adapters with each version."""
  base = trainer.published_base()
  version = trainer.published()
  shapes = jax.tree.map(lambda x: x.shape, trainer.published_shapes())
  assert jax.tree.map(lambda x: x.shape, version) == shapes
  assert all(lora_lib.is_adapter((n,)) for n in version["layers"][0])
  assert not any(lora_lib.is_adapter((n,)) for n in base["layers"][0])
  mesh = mesh_lib.make_mesh(jax.devices()[:2], mesh_lib.MeshShape(tensor=2))
  engine = engine_lib.Engine(
    MODEL, tiny.SIZES, mesh=mesh, seed=7, end_tokens=tiny.END_TOKENS
  )
  engine.hold_base(base)
  held = engine.load_params(version, 1).weights
  np.testing.assert_array_equal(
    held["layers"][1]["up_lora_a"],
    trainer.state.policy.trainable["layers"]["up_lora_a"][1],
  )
  kernel = held["layers"][1]["up"]
  assert kernel.sharding.shard_shape(kernel.shape) == (32, 32)
