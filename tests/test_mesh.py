"""Cutting devices, naming axes, and a sharded forward pass."""

import dataclasses

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.training import train_step

ONE = mesh_lib.ONE
FOUR = mesh_lib.MeshShape(fsdp=2, tensor=2)
# Even, so that two devices can share it.
MODEL = dataclasses.replace(tiny.MODEL, vocab_size=96)


def test_rules_map_logical_axes_to_mesh_axes():
  rules = mesh_lib.TRAIN_RULES
  spec = mesh_lib.spec(rules, ("embed", "heads", "head"))
  assert spec == P(("fsdp", "context"), "tensor", None)
  spec = mesh_lib.spec(rules, ("batch", "tokens", None))
  assert spec == P(("data", "fsdp"), "context", None)
  spec = mesh_lib.spec(mesh_lib.ROLLOUT_RULES, ("embed", "mlp"))
  assert spec == P(None, "tensor")


def test_an_axis_without_a_rule_is_an_error():
  with pytest.raises(AttributeError, match="hedas"):
    mesh_lib.spec(mesh_lib.TRAIN_RULES, ("hedas",))


@pytest.mark.parametrize(
  "axes", [("heads", "mlp"), ("embed", "embed"), ("batch", "embed")]
)
def test_one_mesh_axis_cannot_split_two_axes_of_an_array(axes):
  with pytest.raises(ValueError, match=f"^{axes[1]}: .* already splits"):
    mesh_lib.spec(mesh_lib.TRAIN_RULES, axes)


def test_an_axis_is_freed_of_what_splits_another():
  mesh = mesh_lib.make_mesh(
    jax.devices()[:4], mesh_lib.MeshShape(data=2, fsdp=2)
  )
  layout = mesh_lib.Layout(mesh=mesh, rules=mesh_lib.TRAIN_RULES)
  freed = layout.freed("batch", "tokens", of="embed")
  assert (freed.rules.batch, freed.rules.tokens) == (("data",), ())
  assert freed.rules.embed == ("fsdp", "context")
  assert [x.parts("batch") for x in (layout, freed)] == [4, 2]


def test_train_devices_come_first_and_the_slices_share_none():
  devices = jax.devices()
  train, rollout = mesh_lib.cut_devices(
    devices, train_shape=FOUR, rollout_shape=mesh_lib.MeshShape(tensor=2)
  )
  assert list(train.devices.flat) == devices[:4]
  assert list(rollout.devices.flat) == devices[4:6]
  assert train.axis_names == rollout.axis_names == mesh_lib.AXES
  sizes = {"data": 1, "fsdp": 2, "context": 1, "tensor": 2}
  assert dict(train.shape) == sizes == dataclasses.asdict(FOUR)


def test_one_device_is_shared():
  device = jax.devices()[:1]
  train, rollout = mesh_lib.cut_devices(
    device, train_shape=ONE, rollout_shape=ONE
  )
  assert list(train.devices.flat) == list(rollout.devices.flat) == device


@pytest.mark.parametrize(
  ("num_devices", "train_shape", "rollout_shape", "needed"),
  [
    (4, FOUR, ONE, 5),
    (2, mesh_lib.MeshShape(fsdp=2), ONE, 3),
    (1, mesh_lib.MeshShape(context=2), ONE, 3),
    (1, ONE, mesh_lib.MeshShape(tensor=2), 3),
  ],
)
def test_too_few_devices_are_an_error_with_the_number(
  num_devices, train_shape, rollout_shape, needed
):
  with pytest.raises(ValueError, match=f"need {needed} devices; there are"):
    mesh_lib.cut_devices(
      jax.devices()[:num_devices],
      train_shape=train_shape,
      rollout_shape=rollout_shape,
    )


@pytest.mark.parametrize("is_stacked", [True, False])
def test_every_parameter_has_a_sharding_of_its_rank(is_stacked):
  mesh = mesh_lib.make_mesh(jax.devices()[:4], FOUR)
  axes = transformer.logical_axes(MODEL, is_stacked=is_stacked)
  params = tiny.params(0, MODEL)
  if not is_stacked:
    params = transformer.unstack(params, MODEL.num_layers)
  names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
  assert [len(n) for n in names] == [x.ndim for x in jax.tree.leaves(params)]
  placed = jax.device_put(
    params, mesh_lib.shardings(mesh, mesh_lib.TRAIN_RULES, axes)
  )
  is_split = [not x.is_fully_replicated for x in jax.tree.leaves(placed)]
  is_matrix = [sum(n is not None for n in name) > 1 for name in names]
  if not is_stacked:
    assert is_split == is_matrix


def test_the_forward_of_four_devices_is_that_of_one():
  mesh = mesh_lib.make_mesh(jax.devices()[:4], FOUR)
  axes = transformer.logical_axes(MODEL, is_stacked=True)
  params = jax.device_put(
    tiny.params(0, MODEL), mesh_lib.shardings(mesh, mesh_lib.TRAIN_RULES, axes)
  )
  assert len(params["layers"]["query"].sharding.device_set) == 4
  settings = train_step.ForwardSettings(
    model=MODEL,
    compute_dtype="float32",
    remat=sections.Remat.FULL,
    attention="xla",
    temperature=1.0,
    vocab_chunk=40,
  )
  sequences = [tiny.prompt(20) % 96, tiny.prompt(30) % 96]
  rows = [tiny.packed(sequences), tiny.packed(sequences[::-1])]
  batch = jax.tree.map(lambda *x: np.concatenate(x), *rows)
  batch = jax.device_put(
    batch,
    mesh_lib.shardings(mesh, mesh_lib.TRAIN_RULES, ("batch", None)),
  )
  forward = jax.jit(
    lambda params, batch: train_step.token_logprobs(settings, params, batch)[0]
  )
  logprobs = np.asarray(forward(params, batch))
  first, second = tiny.trainer_logprobs(
    tiny.params(0, MODEL), sequences, model=MODEL
  )
  np.testing.assert_allclose(logprobs[0, :20], first, atol=1e-5)
  np.testing.assert_allclose(logprobs[0, 20:50], second, atol=1e-5)
  np.testing.assert_allclose(logprobs[1, :30], second, atol=1e-5)
  np.testing.assert_allclose(logprobs[1, 30:50], first, atol=1e-5)
