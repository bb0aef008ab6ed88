"""Prefill in chunks: the same caches."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.engine import kv_cache
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.reporting import metrics as metrics_lib

CHUNKED = {"prefill_chunk": 8}
SYSTEM = tiny.prompt(17, seed=5)  # two whole chunks and a rest


def make(**sizes):
  scheduler = scheduler_lib.Scheduler(
    tiny.engine(**CHUNKED, **sizes), busy=metrics_lib.BusyClock()
  )
  scheduler.adopt(tiny.engine_params(), 0)
  return scheduler


def with_system(*lengths, limit=32):
  return [
    tiny.sequence(
      np.concatenate([SYSTEM, tiny.prompt(n, seed=n)]), group=n, limit=limit
    )
    for n in lengths
  ]


def assert_scored(sequences):
  for sequence in sequences:
    t = sequence.trajectory()
    (expected,) = tiny.trainer_logprobs(tiny.params(), [t.tokens])
    np.testing.assert_allclose(
      t.behavior_logprobs[t.loss_mask], expected[t.loss_mask], atol=1e-4
    )


def test_chunks_of_any_length_cache_what_the_trainer_computes():
  scheduler = make()
  lengths = 7, 8, 9, 15, 16, 17, 23, 24, 25, 31
  sequences = [
    tiny.sequence(tiny.prompt(n), group=n, limit=32) for n in lengths
  ]
  tiny.write_all(scheduler, sequences)
  assert_scored(sequences)
  assert scheduler.stats.prefill_tokens == sum(lengths)


def test_running_sequences_are_written_between_two_chunks():
  scheduler = make()
  running = tiny.sequence(tiny.prompt(3), group=8, member=2, limit=30)
  scheduler.submit(running)
  scheduler.step()
  late = tiny.sequence(tiny.prompt(31), group=9, limit=32)
  scheduler.submit(late)
  before = running.length
  scheduler.step()
  assert running.length > before
  assert scheduler._prefilling  # not yet whole
  tiny.finish(scheduler)
  assert_scored([running, late])


def test_running_sequences_wait_for_one_chunk_a_call(monkeypatch):
  scheduler = make()
  running = tiny.sequence(tiny.prompt(5), group=8, member=2)
  scheduler.submit(running)
  scheduler.step()
  chunks = []
  extend = scheduler.engine.extend_prefix

  def counted(*args):
    chunks.append(scheduler.stats.generated_tokens)
    return extend(*args)

  monkeypatch.setattr(scheduler.engine, "extend_prefix", counted)
  # More rows than one prefill takes.
  late = [tiny.sequence(tiny.prompt(31, seed=i), limit=32) for i in range(3)]
  for sequence in late:
    scheduler.submit(sequence)
  num_calls = 0
  while not running.finish_reason:
    scheduler.step()
    num_calls += 1
    assert len(chunks) <= num_calls
  assert len(chunks) > 2
  tiny.finish(scheduler)
  assert_scored([running, *late])


def test_chunks_fill_pages_as_well():
  scheduler = make(num_pages=32, page_tokens=4)
  sequences = with_system(3, 3, 6, 9)
  tiny.write_all(scheduler, sequences)
  assert_scored(sequences)


def attended(layer, query, window):
  attend = functools.partial(kv_cache.attend_rows, sliding_window=window)
  return np.asarray(jax.jit(attend)(layer, query, 8), np.float32)


@pytest.mark.parametrize(
  ("queries", "dtype", "kv_heads", "tolerance", "window"),
  [
    (1, "float32", 2, 1e-5, None),
    (3, "float32", 2, 1e-5, 5),  # 3 divides nothing
    (8, "float32", 2, 1e-5, 5),
    # Not every XLA for CPUs has the products of two kv heads in bfloat16.
    (3, "bfloat16", 1, 2e-2, None),
  ],
)
def test_a_chunk_in_pieces_attends_as_a_whole(
  monkeypatch, queries, dtype, kv_heads, tolerance, window
):
  rows, length, heads, width = 3, 16, 3 * kv_heads, 24
  keys = jax.random.split(jax.random.key(0), 3)
  layer = (
    jax.random.normal(keys[0], (rows, kv_heads, 8, width), dtype),
    jax.random.normal(keys[1], (rows, kv_heads, width, 8), dtype),
  )
  query = jax.random.normal(keys[2], (rows, length, heads, 8), dtype)
  whole = attended(layer, query, window)
  of_query = 4 * rows * heads * width
  monkeypatch.setattr(kv_cache, "SCORES_BYTES", queries * of_query)
  pieces = attended(layer, query, window)
  np.testing.assert_allclose(pieces, whole, atol=tolerance)
  # Nor does a row depend on what the others hold.
  others = jax.tree.map(lambda x: x.at[1:].multiply(3), layer)
  np.testing.assert_array_equal(
    attended(others, query.at[1:].set(1), window)[0], pieces[0]
  )


@pytest.mark.parametrize("window", [None, 4_096])
def test_a_chunk_of_long_rows_takes_little_memory(window):
  rows, chunk, width = 8, 1_024, 32_768
  layer = (
    jax.ShapeDtypeStruct((rows, 2, 128, width), jnp.bfloat16),
    jax.ShapeDtypeStruct((rows, 2, width, 128), jnp.bfloat16),
  )
  query = jax.ShapeDtypeStruct((rows, chunk, 12, 128), jnp.bfloat16)
  attend = functools.partial(kv_cache.attend_rows, sliding_window=window)
  memory = jax.jit(attend).lower(layer, query, 0).compile().memory_analysis()
  # Scores of all queries at once take 24 GiB.
  assert memory.temp_size_in_bytes < 1 << 30
