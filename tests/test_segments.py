"""Segments of packed rows, cut among devices and processes."""

import pickle

import jax
import numpy as np
import pytest
import test_train_step

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.training import batch_parts
from jaxrl_async.training import packing
from jaxrl_async.training import segments as segments_lib

SHAPES = [
  mesh_lib.MeshShape(fsdp=8),
  mesh_lib.MeshShape(data=2, context=4),
  mesh_lib.MeshShape(fsdp=2, context=2, tensor=2),
]


def planned(num_groups=6, **more):
  """Segments of groups whose trajectories have different lengths."""
  groups = test_train_step.groups(count=num_groups)
  trajectories = [t for group in groups for t in group.trajectories]
  rng = np.random.default_rng(0)
  settings = {
    "tokens_per_row": 16,
    "rows_per_microbatch": 8,
    "num_minibatches": 2,
    "min_microbatches": 3,
    "num_shards": 2,
    "fields": {
      "scores": [
        rng.normal(size=len(t.tokens)).astype(np.float32) for t in trajectories
      ]
    },
  }
  return packing.plan(
    groups, rng.normal(size=len(trajectories)), **(settings | more)
  )


def whole(segments):
  return dict(segments.filled())


def test_parts_are_cuts_of_the_whole():
  segments = planned()
  wanted = whole(segments)
  assert list(wanted) == segments.names
  _, microbatches, rows, tokens = segments.shape
  for bounds in [
    ((0, 2), (0, microbatches), (2, 5), (0, tokens)),
    ((1, 2), (1, microbatches), (0, rows), (3, 11)),
    ((0, 1), (0, 1), (7, 8), (15, 16)),
  ]:
    cut = tuple(slice(*bound) for bound in bounds)
    for name, part in segments.filled(bounds):
      np.testing.assert_array_equal(part, wanted[name][cut], err_msg=name)
      assert part.dtype == segments_lib.dtype_of(name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_parts_of_devices_form_the_batch(shape):
  segments = planned()
  mesh = mesh_lib.make_mesh(jax.devices(), shape)
  sharding = mesh_lib.sharding(
    mesh, mesh_lib.TRAIN_RULES, None, None, "batch", "tokens"
  )
  placed = batch_parts.placed(segments, sharding)
  wanted = packing.packed_batch(whole(segments))
  jax.tree.map(np.testing.assert_array_equal, placed, wanted)
  abstract = batch_parts.abstract(segments, sharding)
  assert jax.tree.structure(abstract) == jax.tree.structure(placed)
  for here, there in zip(
    jax.tree.leaves(placed), jax.tree.leaves(abstract), strict=True
  ):
    assert (here.shape, here.dtype) == (there.shape, there.dtype)
    assert here.sharding == there.sharding == sharding


def test_a_process_packs_its_rows_of_what_it_is_sent():
  segments, wanted = planned(), whole(planned())
  _, microbatches, rows, tokens = segments.shape
  for own in (range(0, 4), range(4, 8), range(2, 3)):
    received = pickle.loads(pickle.dumps(segments.of_rows(list(own))))
    assert received.names == segments.names
    assert sum(received.lengths) < sum(segments.lengths)
    bounds = (0, 2), (0, microbatches), (own.start, own.stop), (0, tokens)
    for name, part in received.filled(bounds):
      np.testing.assert_array_equal(
        part, wanted[name][:, :, own.start : own.stop], err_msg=name
      )


def test_a_process_without_rows_is_sent_the_shape_alone():
  received = planned().of_rows([])
  assert received.names == planned().names
  assert not any(
    part.any() for name, part in received.filled() if name != "policy_versions"
  )


def test_the_rows_of_a_process_are_those_of_its_devices():
  mesh = mesh_lib.make_mesh(jax.devices(), mesh_lib.MeshShape(fsdp=8))
  sharding = mesh_lib.sharding(
    mesh, mesh_lib.TRAIN_RULES, None, None, "batch", "tokens"
  )
  found = batch_parts.rows_of_processes((2, 3, 16, 16), sharding)
  assert found == {0: list(range(16))}


def test_a_batch_is_never_whole_on_the_host(monkeypatch):
  segments = planned(min_microbatches=64)
  made = []
  full = np.full
  monkeypatch.setattr(
    segments_lib.np, "full", lambda *a: made.append(full(*a)) or made[-1]
  )
  mesh = mesh_lib.make_mesh(jax.devices(), mesh_lib.MeshShape(fsdp=8))
  sharding = mesh_lib.sharding(
    mesh, mesh_lib.TRAIN_RULES, None, None, "batch", "tokens"
  )
  batch_parts.placed(segments, sharding)
  of_one_array = 4 * np.prod(segments.shape)
  assert len(made) == 8 * len(segments.names)
  assert max(x.nbytes for x in made) == of_one_array // 8
