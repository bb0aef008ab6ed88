"""Soft caps of scores and of logits: equation, gradients, refusals by name."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.algorithms import likelihood
from jaxrl_async.engine import kv_cache
from jaxrl_async.models.attention import choice
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.models.attention import paged_attention
from jaxrl_async.models.attention import reference

CAP = 1.5
T, N, K, H = 150, 4, 2, 8  # several blocks


def qkv(rows=1):
  rng = np.random.default_rng(0)
  shapes = (rows, T, N, H), (rows, T, K, H), (rows, T, K, H)
  q, k, v = (rng.normal(size=x).astype(np.float32) for x in shapes)
  return tuple(map(jnp.asarray, (3 * q, k, v)))


def looped(query, key, value, start):
  """The equation, in float64, for the last query: softmax(c tanh(s / c))."""
  query, key, value = map(np.asarray, (query, key, value))
  mixed = np.zeros((N, H))
  for n in range(N):
    k, v = key[start:, n // (N // K)], value[start:, n // (N // K)]
    scores = k.astype(np.float64) @ query[n] / np.sqrt(H)
    scores = CAP * np.tanh(scores / CAP)
    weights = np.exp(scores - scores.max())
    mixed[n] = weights @ v / weights.sum()
  return mixed


BEGINNINGS = np.repeat([0, 40, 41], [40, 1, T - 41])[None].astype(np.int32)


@pytest.mark.parametrize("name", packed_attention.PLAIN)
def test_scores_over_packed_rows_have_the_cap(name):
  query, key, value = qkv()
  attend = packed_attention.over_rows(
    name, jnp.asarray(BEGINNINGS), N, soft_cap=CAP
  )
  found = jax.jit(attend)(query, key, value)
  for t in (0, 39, 40, 60, T - 1):
    expected = looped(
      query[0, t], key[0, : t + 1], value[0, : t + 1], BEGINNINGS[0, t]
    )
    np.testing.assert_allclose(found[0, t], expected, atol=1e-5)


@pytest.mark.parametrize("name", ["blocks", "chunks"])
def test_gradients_under_the_cap_are_those_of_plain_xla(name):
  def gradients(name):
    attend = packed_attention.over_rows(
      name, jnp.asarray(BEGINNINGS), N, soft_cap=CAP
    )
    weights = qkv()[0] - 0.3

    def loss(*arguments):
      return (attend(*arguments) * weights).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv())

  for found, expected in zip(gradients(name), gradients("xla"), strict=True):
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_the_engines_attention_has_the_cap():
  query, key, value = qkv()
  expected = looped(query[0, T - 1], key[0], value[0], 0)
  lengths = jnp.array([T], jnp.int32)
  whole = reference.causal_xla(query, key, value, lengths, soft_cap=CAP)
  np.testing.assert_allclose(whole[0, -1], expected, atol=1e-5)
  layer = kv_cache.from_prefill(key, value, jnp.dtype("float32"))
  chunk = kv_cache.attend_rows(layer, query[:, -3:], T - 3, soft_cap=CAP)
  np.testing.assert_allclose(chunk[0, -1], expected, atol=1e-5)
  last = query[:, -1], lengths - 1
  parts = [tuple(jnp.asarray(x) for x in layer)]
  decoded = paged_attention.attend_cached(last[0], parts, last[1], soft_cap=CAP)
  np.testing.assert_allclose(decoded[0], expected, atol=1e-5)
  pool = tuple(
    jnp.moveaxis(x[0].reshape(15, 10, K, H), 2, 0) for x in (key, value)
  )
  pages = jnp.arange(15, dtype=jnp.int32)[None]
  paged = paged_attention.xla(pool, *last, pages, soft_cap=CAP)
  np.testing.assert_allclose(paged[0], expected, atol=1e-5)


def test_kernels_without_a_cap_are_refused_by_name():
  heads, dtype = (N, K, H), jnp.dtype("float32")
  trials = {
    "packed": (
      {
        name: choice.with_gradients(name, None, CAP)
        for name in packed_attention.IMPLEMENTATIONS
      },
      choice.packed_trial(heads, 256, dtype),
      packed_attention.PLAIN,
    ),
    "prefill": (
      {
        name: choice.of_tokens(attend, soft_cap=CAP)
        for name, attend in reference.CAUSAL.items()
      },
      choice.prefill_trial(heads, 2, 256, dtype),
      ("xla",),
    ),
    "decode": (
      {
        name: functools.partial(attend, soft_cap=CAP)
        for name, attend in paged_attention.IMPLEMENTATIONS.items()
      },
      choice.decode_trial(
        heads,
        slots=2,
        num_pages=9,
        page_tokens=16,
        pages_per_slot=4,
        dtype=dtype,
      ),
      ("xla",),
    ),
  }
  for implementations, trial, plain in trials.values():
    kernels = [name for name in implementations if name not in plain]
    assert kernels
    name, refused = choice.first_right(kernels, implementations, trial)
    assert name == "xla" and list(refused) == kernels
    for reason in refused.values():
      assert reason == "NotImplementedError: it has no soft caps of scores"


@pytest.mark.parametrize("vocab_chunk", [5, 100])
@pytest.mark.parametrize("cap", [None, 0.8])
def test_logprobs_of_divided_and_capped_logits(cap, vocab_chunk):
  rng = np.random.default_rng(0)
  batch = tiny.packed([rng.integers(0, 13, n) for n in (9, 4)], 16)
  batch = jax.tree.map(jnp.asarray, batch)
  hidden = rng.normal(size=(1, 16, 6)).astype(np.float32)
  head = rng.normal(size=(13, 6)).astype(np.float32)
  weights = rng.normal(size=(2, 1, 16)).astype(np.float32)
  options = {"temperature": 0.7, "divisor": 2.5, "soft_cap": cap}

  def chunked(hidden, head):
    return likelihood.token_logprobs_and_entropy(
      hidden,
      head,
      batch.tokens,
      batch.segment_ids,
      vocab_chunk=vocab_chunk,
      **options,
    )

  def plain(hidden, head):
    logits = hidden @ head.T / 2.5
    if cap is not None:
      logits = cap * jnp.tanh(logits / cap)
    logprobs = jax.nn.log_softmax(logits / 0.7)
    entropy = -(jnp.exp(logprobs) * logprobs).sum(-1)
    found = jnp.take_along_axis(
      logprobs[:, :-1], batch.tokens[:, 1:, None], axis=2
    )[..., 0]
    same = batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1]
    same &= batch.segment_ids[:, 1:] > 0
    pad = ((0, 0), (1, 0))
    return (
      jnp.pad(jnp.where(same, found, 0), pad),
      jnp.pad(jnp.where(same, entropy[:, :-1], 0), pad),
    )

  def with_gradients(fn):
    def loss(*arguments):
      results = fn(*arguments)
      return sum(
        (x * w).sum() for x, w in zip(results, weights, strict=True)
      ), results

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head)

  for found, expected in zip(
    jax.tree.leaves(with_gradients(chunked)),
    jax.tree.leaves(with_gradients(plain)),
    strict=True,
  ):
    np.testing.assert_allclose(found, expected, atol=1e-5)
