"""Between different compiled shapes: late digits, and tokens at boundaries.

With the same shapes everything is bit-identical; that is tested where the
shapes are (test_engine, test_scheduler, test_page_pool). Another number of
slots, another chunk or bucket is another program. Then logprobs agree to 1e-4,
and a token differs only where its uniform falls on the edge between two.
"""

import jax
import numpy as np
import pytest
import tiny

from jaxrl_async.engine import sampling

NEAR = 1e-5
SHAPES = {
  "2 slots": {"num_slots": 2},
  "7 slots": {"num_slots": 7},
  "chunks of 8": {"prefill_chunk": 8},
  "one bucket": {"prefill_buckets": (32,)},
  "pages": {"num_pages": 40, "page_tokens": 4},
}


def sequences(count=40):
  return [
    tiny.sequence(tiny.prompt(1 + 7 * i % 18, seed=i), limit=32, group=i)
    for i in range(count)
  ]


def write(**sizes):
  scheduler = tiny.ready(**sizes)
  written = sequences()
  for sequence in written:
    sequence.settings = sampling.SamplingSettings(ignore_eos=True)
    scheduler.submit(sequence)
  tiny.finish(scheduler, max_calls=1000)
  return written


@pytest.fixture(scope="module")
def reference():
  return write()


def distance_to_edge(sequence, at, other, params):
  """How far the uniform of a token is from the edge to the other token."""
  keys = jax.jit(sampling.row_keys)(
    np.int32(tiny.engine().seed),
    np.array([sequence.stream], np.int32),
    np.array([sequence.group], np.int32),
    np.array([sequence.member], np.int32),
  )
  key = jax.random.fold_in(jax.random.wrap_key_data(keys[0]), at)
  uniform = float(jax.random.uniform(key, (), np.float32))
  logits = tiny.logits(params, sequence.written())[at - 1].astype(np.float64)
  weights = np.exp(logits - logits.max())
  cdf = np.cumsum(weights) / weights.sum()
  low, high = sorted((int(sequence.tokens[at]), int(other)))
  return max(abs(uniform - cdf[low]), abs(uniform - cdf[high - 1]))


def differing_tokens(written, reference, params):
  """Distances to the edge where two runs part; what came before agrees."""
  distances = []
  for one, other in zip(written, reference, strict=True):
    n = min(one.length, other.length)
    differ = np.flatnonzero(one.tokens[:n] != other.tokens[:n])
    same = differ[0] if len(differ) else n
    np.testing.assert_allclose(
      one.behavior_logprobs[:same], other.behavior_logprobs[:same], atol=1e-4
    )
    if len(differ):
      distances.append(distance_to_edge(other, same, one.tokens[same], params))
  return distances


@pytest.mark.parametrize(
  "shape",
  [
    shape if shape in ("7 slots", "chunks of 8")
    else pytest.param(shape, marks=pytest.mark.nightly) if shape == "pages"
    else pytest.param(shape, marks=pytest.mark.slow)
    for shape in SHAPES
  ],
)  # fmt: skip
def test_tokens_differ_only_where_their_uniform_is_on_an_edge(
  reference, shape, record_property
):
  distances = differing_tokens(write(**SHAPES[shape]), reference, tiny.params())
  record_property("differing_tokens", len(distances))
  assert all(d < NEAR for d in distances)
  num_tokens = sum(s.loss_mask.sum() for s in reference)
  assert num_tokens > 800 and len(distances) < 3
