"""Token logprobs and entropies, in chunks of the vocabulary."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms import likelihood

B, T, D, V = 2, 9, 6, 23
TEMPERATURE = 0.7
# Rows of three and of one segment, padding behind each; one segment of 1 token.
SEGMENT_IDS = np.array(
  [[1, 1, 1, 2, 3, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0]], np.int32
)
HAS_LOGPROB = np.array(
  [[0, 1, 1, 0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0, 0]], bool
)


def make_inputs():
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(B, T, D)).astype(np.float32)
  head = rng.normal(size=(D, V)).astype(np.float32)
  tokens = rng.integers(0, V, (B, T), np.int32)
  tokens[0, 1], tokens[0, 2] = 0, V - 1  # both ends of the vocabulary
  return hidden, head, tokens


@pytest.fixture
def inputs():
  return make_inputs()


def logprobs_and_entropy(
  hidden, head, tokens, *, vocab_chunk, temperature=TEMPERATURE
):
  return likelihood.token_logprobs_and_entropy(
    jnp.asarray(hidden),
    jnp.asarray(head).T,
    jnp.asarray(tokens),
    jnp.asarray(SEGMENT_IDS),
    temperature=temperature,
    vocab_chunk=vocab_chunk,
  )


def plain(hidden, head, tokens, temperature):
  """The same on all logits at once, differentiated by JAX."""
  logits = jnp.einsum("btd,dv->btv", hidden[:, :-1], head) / temperature
  all_logprobs = jax.nn.log_softmax(logits)
  logprobs = jnp.take_along_axis(all_logprobs, tokens[:, 1:, None], -1)[..., 0]
  entropy = -(jnp.exp(all_logprobs) * all_logprobs).sum(-1)
  return tuple(
    jnp.where(HAS_LOGPROB, jnp.pad(x, ((0, 0), (1, 0))), 0)
    for x in (logprobs, entropy)
  )


@pytest.mark.parametrize("vocab_chunk", [5, 100])
def test_logprobs_and_entropy_equal_the_formula(inputs, vocab_chunk):
  hidden, head, tokens = (x.astype(np.float64) for x in inputs)
  expected = np.zeros((2, B, T))
  for b, t in np.argwhere(HAS_LOGPROB):
    logits = [
      sum(hidden[b, t - 1, d] * head[d, v] for d in range(D)) / TEMPERATURE
      for v in range(V)
    ]
    log_z = math.log(sum(map(math.exp, logits)))
    expected[0, b, t] = logits[int(tokens[b, t])] - log_z
    expected[1, b, t] = -sum(math.exp(x - log_z) * (x - log_z) for x in logits)
  actual = logprobs_and_entropy(*inputs, vocab_chunk=vocab_chunk)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
  assert (np.asarray(actual)[:, ~HAS_LOGPROB] == 0).all()


@pytest.mark.parametrize(
  ("vocab_chunk", "temperature"),
  [(4, 0.5), (7, 2.0), (22, 1.0), (23, 0.5), (24, 2.0)],
)
def test_chunks_equal_plain_log_softmax_in_value_and_gradient(
  inputs, vocab_chunk, temperature
):
  hidden, head, tokens = map(jnp.asarray, inputs)
  weights = np.random.default_rng(1).normal(size=(2, B, T)).astype(np.float32)

  def weighted(function):
    def scalar(hidden, head):
      outputs = function(hidden, head)
      return sum((w * x).sum() for w, x in zip(weights, outputs, strict=True))

    return jax.jit(jax.value_and_grad(scalar, (0, 1)))

  actual = weighted(
    functools.partial(
      logprobs_and_entropy,
      tokens=tokens,
      vocab_chunk=vocab_chunk,
      temperature=temperature,
    )
  )(hidden, head)
  expected = weighted(
    functools.partial(plain, tokens=tokens, temperature=temperature)
  )(hidden, head)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
    actual,
    expected,
  )


def test_large_logits_stay_finite_and_right():
  # 1e4 apart: exp of any of them alone overflows or vanishes.
  head = jnp.asarray([[1e4, 0.0, 1e4, -1e4, 5e3]], jnp.float32)
  hidden = jnp.ones((1, 2, 1), jnp.float32)
  logprobs, entropy = likelihood.token_logprobs_and_entropy(
    hidden,
    head.T,
    jnp.asarray([[0, 2]]),
    jnp.ones((1, 2), jnp.int32),
    temperature=1.0,
    vocab_chunk=2,
  )
  np.testing.assert_allclose(logprobs, [[0, -math.log(2)]], rtol=1e-6)
  np.testing.assert_allclose(entropy, [[0, math.log(2)]], rtol=1e-6)


def test_nan_in_hidden_states_that_draw_nothing_changes_no_bit(inputs):
  hidden, head, tokens = inputs
  draws_nothing = ~np.roll(HAS_LOGPROB, -1, axis=1)
  poisoned = np.where(draws_nothing[..., None], np.nan, hidden)
  assert np.isnan(poisoned).any()

  def scalar(hidden, head):
    logprobs, entropy = logprobs_and_entropy(
      hidden, head, tokens, vocab_chunk=5
    )
    return logprobs.sum() + entropy.sum()

  gradient = jax.jit(jax.value_and_grad(scalar, (0, 1)))
  both = [
    gradient(jnp.asarray(h), jnp.asarray(head)) for h in (hidden, poisoned)
  ]
  jax.tree.map(np.testing.assert_array_equal, *both)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(both))


def test_bfloat16_hidden_states_give_float32_close_to_float32(inputs):
  hidden, head, tokens = inputs
  hidden = jnp.asarray(hidden, jnp.bfloat16)

  def scalar(hidden, head):
    logprobs, entropy = logprobs_and_entropy(
      hidden, head, tokens, vocab_chunk=5
    )
    return (logprobs + entropy).sum(), logprobs

  gradient = jax.jit(jax.grad(scalar, (0, 1), has_aux=True))
  (d_hidden, d_head), logprobs = gradient(hidden, jnp.asarray(head))
  assert logprobs.dtype == d_head.dtype == jnp.float32
  assert d_hidden.dtype == jnp.bfloat16
  (_, d_head32), logprobs32 = gradient(
    hidden.astype(jnp.float32), jnp.asarray(head)
  )
  # Sums over d in [-3, 3] of products rounded to 8 bits, over temperature.
  np.testing.assert_allclose(logprobs, logprobs32, atol=6e-2)
  np.testing.assert_allclose(d_head, d_head32, atol=6e-2)


def test_no_array_is_larger_than_a_chunk():
  rows, tokens, vocab, chunk = 2, 16, 4096, 64
  shapes = (
    jnp.zeros((rows, tokens, 8)),
    jnp.zeros((vocab, 8)),
    jnp.zeros((rows, tokens), jnp.int32),
    jnp.ones((rows, tokens), jnp.int32),
  )

  def scalar(hidden, head, tokens, segment_ids):
    return likelihood.token_logprobs_and_entropy(
      hidden, head, tokens, segment_ids, temperature=1.0, vocab_chunk=chunk
    )[0].sum()

  text = str(jax.make_jaxpr(jax.grad(scalar, (0, 1)))(*shapes))
  assert f"f32[{rows},{tokens},1,{chunk}]" in text
  assert f"{rows},{tokens},1,{vocab}]" not in text
  assert f"{rows},{tokens},{vocab}]" not in text


@pytest.mark.parametrize(("vocab_chunk", "num_products"), [(23, 3), (12, 8)])
def test_the_logits_of_a_single_chunk_are_made_once(
  inputs, vocab_chunk, num_products
):
  """Logits and two gradients; of two chunks, the logits of both twice."""

  def scalar(hidden, head):
    return logprobs_and_entropy(
      hidden, head, inputs[2], vocab_chunk=vocab_chunk
    )[0].sum()

  text = str(jax.make_jaxpr(jax.grad(scalar, (0, 1)))(*inputs[:2]))
  assert text.count("dot_general[") == num_products
