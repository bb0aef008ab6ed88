"""The engine on several devices writes what it writes on one."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib

MODEL = dataclasses.replace(tiny.MODEL, vocab_size=96)
CACHES = {
  "slots": {},
  "chunks": {"prefill_chunk": 8},
  "pages": {"num_pages": 12, "page_tokens": 8},
  "kept": {
    "num_pages": 32,
    "page_tokens": 8,
    "prefill_chunk": 8,
    "kept_tokens": 256,
  },
}
BOTH_AXES = mesh_lib.MeshShape(data=2, tensor=2)
ONLY_DATA = mesh_lib.MeshShape(data=4)
ONLY_TENSOR = mesh_lib.MeshShape(tensor=2)


def make_engine(shape, **sizes):
  return engine_lib.Engine(
    MODEL,
    dataclasses.replace(tiny.SIZES, **sizes),
    mesh=mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape),
    seed=7,
    end_tokens=tiny.END_TOKENS,
  )


def load(engine, seed=0):
  stacked = tiny.params(seed, MODEL)
  weights = transformer.unstack(stacked, MODEL.num_layers)
  return engine.load_params(weights, seed)


def written(shape, sizes):
  """Tokens, logprobs and versions of more sequences than there are slots.

  The weights change while they are written.
  """
  engine = make_engine(shape, **sizes)
  scheduler = scheduler_lib.Scheduler(
    engine,
    kv_on_adopt=sections.KvOnAdopt.RECOMPUTE,
    busy=metrics_lib.BusyClock(),
  )
  scheduler.adopt(load(engine), 0)
  sequences = [
    tiny.sequence(tiny.prompt(n), group=n // 2, member=n % 2, limit=32)
    for n in (3, 4, 9, 10, 17, 18, 21)
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  scheduler.step()
  scheduler.step()
  scheduler.adopt(load(engine, seed=1), 1)
  tiny.finish(scheduler)
  return [sequence.trajectory() for sequence in sequences]


@functools.cache
def on_one_device(cache):
  return written(mesh_lib.ONE, CACHES[cache])


@pytest.mark.parametrize(
  ("shape", "cache"),
  [
    pytest.param(BOTH_AXES, "pages", marks=pytest.mark.slow),
    pytest.param(BOTH_AXES, "kept", marks=pytest.mark.slow),
    pytest.param(BOTH_AXES, "chunks", marks=pytest.mark.nightly),
    pytest.param(BOTH_AXES, "slots", marks=pytest.mark.nightly),
    pytest.param(ONLY_DATA, "pages", marks=pytest.mark.nightly),
    pytest.param(ONLY_TENSOR, "chunks", marks=pytest.mark.nightly),
  ],
  ids=str,
)
def test_on_any_mesh_the_same_is_written(shape, cache):
  expected = on_one_device(cache)
  found = written(shape, {"prefill_rows": 4, **CACHES[cache]})
  for ours, theirs in zip(found, expected, strict=True):
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(
      ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-4
    )
  versions = np.concatenate([x.policy_versions[x.loss_mask] for x in found])
  assert set(versions) == {0, 1}


@pytest.mark.parametrize(
  ("data", "prefill_rows", "rows"), [(2, 4, 2), (4, 4, 1), (4, 2, 2)]
)
def test_a_prefill_is_split_over_replicas_where_its_rows_fit(
  data, prefill_rows, rows
):
  flops = {}
  for num in (1, data):
    engine = make_engine(
      mesh_lib.MeshShape(data=num), prefill_rows=prefill_rows
    )
    program = engine.programs(load(engine).weights)[0]
    compiled = program.function.lower(*program.arguments).compile()
    flops[num] = compiled.cost_analysis()["flops"]
  prefix = engine.prefill(
    params=load(engine), padded_tokens=tiny.prompt(16), true_length=16
  )
  keys = prefix.cache[0][0]
  assert keys.sharding.shard_shape(keys.shape)[0] == rows
  assert flops[data] == pytest.approx(flops[1] * rows / prefill_rows, rel=0.02)
