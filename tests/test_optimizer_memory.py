"""Optimizer state in a smaller type, and in the host's memory."""

import dataclasses

import jax
import numpy as np
import pytest
import test_train_step
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.planning import aot
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import train_step

VERSION = test_train_step.VERSION
ADAMW = test_train_step.ADAMW
OFFLOADED = dataclasses.replace(ADAMW, offload=True)


def trained(optimizer, shape):
  trainer = test_train_step.make_trainer(
    shape, minibatches=2, optimizer=optimizer
  )
  trainer.step(VERSION, trainer.prepare(test_train_step.groups()))
  return trainer.state.policy


def assert_moments_lie_in(memory_kind, opt_state):
  for leaf in jax.tree.leaves(opt_state):
    wanted = memory_kind if leaf.size > 1 else "device"
    assert leaf.sharding.memory_kind == wanted


@pytest.mark.slow
@pytest.mark.nightly
def test_moments_in_the_hosts_memory_change_no_bit():
  shape = mesh_lib.MeshShape(fsdp=2)
  here, there = (trained(x, shape) for x in (ADAMW, OFFLOADED))
  assert_moments_lie_in("device", here.opt_state)
  assert_moments_lie_in("pinned_host", there.opt_state)
  jax.tree.map(np.testing.assert_array_equal, here, there)


def test_a_checkpoint_brings_moments_back_to_the_hosts_memory(tmp_path):
  trainer = test_train_step.make_trainer(
    mesh_lib.MeshShape(fsdp=2), optimizer=OFFLOADED
  )
  state = jax.tree.map(
    lambda x: jax.device_put(np.full(x.shape, 3, x.dtype), x.sharding),
    trainer.state,
  )
  assert_moments_lie_in("pinned_host", state.policy.opt_state)
  checkpoint.save(tmp_path, 1, state, {}, [])
  restored, _, _ = checkpoint.restore(tmp_path, 1, trainer.abstract_state())
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  for found, wanted in zip(
    *map(jax.tree.leaves, (restored, state)), strict=True
  ):
    assert found.sharding == wanted.sharding


def test_what_lies_in_the_hosts_memory_takes_none_of_the_device():
  trainer = test_train_step.make_trainer(optimizer=OFFLOADED)
  state = trainer.abstract_state()
  num_scalars = 2
  assert aot.bytes_a_device(state.policy.opt_state) == 4 * num_scalars
  assert aot.bytes_a_device(state) == 4 * (
    test_train_step.MODEL.num_params + num_scalars
  )


@pytest.mark.parametrize("name", sections.OptimizerName)
def test_only_the_first_moment_takes_the_type_of_the_state(name):
  section = dataclasses.replace(ADAMW, name=name, state_dtype="bfloat16")
  optimizer = train_step.make_optimizer(
    section, train_step.learning_rate_schedule(section)
  )
  state = jax.eval_shape(optimizer.init, tiny.params())
  found = {"mu": set(), "nu": set()}
  for path, leaf in jax.tree_util.tree_leaves_with_path(state):
    for entry in path:
      if getattr(entry, "name", "") in found:
        found[entry.name].add(str(leaf.dtype))
  assert found == {"mu": {"bfloat16"}, "nu": {"float32"}}


def test_a_smaller_first_moment_moves_parameters_alike():
  params = {"x": np.ones(64, np.float32)}
  gradients = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
  after = {}
  for dtype in ("float32", "bfloat16"):
    section = dataclasses.replace(ADAMW, state_dtype=dtype, eps=1e-3)
    optimizer, apply = test_train_step.apply_program(section)
    state = tiny.policy_state(params, optimizer)
    for gradient in gradients:
      state, _ = apply(state, {"x": gradient}, np.float32(1.0))
    after[dtype] = np.asarray(state.policy.params["x"]) - 1
  # bfloat16 keeps eight bits of the moment.
  np.testing.assert_allclose(
    after["bfloat16"], after["float32"], rtol=2e-2, atol=2e-4
  )
  assert not np.array_equal(after["bfloat16"], after["float32"])
