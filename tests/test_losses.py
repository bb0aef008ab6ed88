"""Token logprobs in chunks, and the losses made of them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.algorithms import divergences
from jaxrl_async.algorithms import likelihood
from jaxrl_async.algorithms import losses
from jaxrl_async.config import sections

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
    jnp.asarray(head),
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


@pytest.mark.parametrize("vocab_chunk", [5, 23, 100])
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


@pytest.mark.parametrize("vocab_chunk", [4, 7, 22, 23, 24])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
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
    head,
    jnp.asarray([[0, 2]]),
    jnp.ones((1, 2), jnp.int32),
    temperature=1.0,
    vocab_chunk=2,
  )
  np.testing.assert_allclose(logprobs, [[0, -math.log(2)]], rtol=1e-6)
  np.testing.assert_allclose(entropy, [[0, math.log(2)]], rtol=1e-6)


@pytest.mark.parametrize("vocab_chunk", [5, 100])
def test_a_logprob_depends_on_the_hidden_state_just_before_only(
  inputs, vocab_chunk
):
  hidden, head, tokens = map(jnp.asarray, inputs)
  expected = np.zeros((B, T, B, T), bool)
  for b, t in np.argwhere(HAS_LOGPROB):
    expected[b, t, b, t - 1] = True

  @jax.jit
  @jax.jacobian
  def jacobians(hidden):
    return logprobs_and_entropy(hidden, head, tokens, vocab_chunk=vocab_chunk)

  for jacobian in jacobians(hidden):  # of logprobs, of entropy
    depends = np.abs(jacobian).max(-1) > 0
    np.testing.assert_array_equal(depends, expected)


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
    jnp.zeros((8, vocab)),
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


# Seven loss tokens and one other, log-ratios (theta / proximal, proximal /
# behavior) and advantages: clipped above, clipped below, past the clip on the
# side where it does not bind (twice), inside (twice), clipped above again, so
# that clipped and not binding differ in number. Two weights exceed the cap.
LOG_RATIOS = np.log([1.5, 0.6, 1.4, 0.7, 1.1, 0.95, 1.3, 1.0])
LOG_WEIGHTS = np.log([0.8, 1.3, 3.0, 0.5, 1.0, 4.0, 2.0, 1.5])
ADVANTAGES = np.array([1.0, -2.0, -0.5, 0.7, 1.5, -1.2, 2.0, 1.0])
LOSS_MASK = np.array([1, 1, 1, 1, 1, 1, 1, 0], bool)
CLIP_LOW, CLIP_HIGH, CAP = 0.2, 0.25, 2.5


def ppo_inputs():
  """Arrays of [B = 2, T = 8]: a sequence, and it reversed."""

  def rows(x):
    return np.stack([x, x[::-1]])

  proximal = rows(np.linspace(-2.0, -0.1, 8))
  return {
    "logprobs": (proximal + rows(LOG_RATIOS)).astype(np.float32),
    "proximal_logprobs": proximal.astype(np.float32),
    "behavior_logprobs": (proximal - rows(LOG_WEIGHTS)).astype(np.float32),
    "advantages": rows(ADVANTAGES).astype(np.float32),
    "loss_mask": rows(LOSS_MASK),
  }


def ppo_loss(
  arrays,
  *,
  cap_mode=sections.BehaviorWeightCapMode.MASK,
  num_loss_tokens=14,
  **changes,
):
  arrays = {k: jnp.asarray(v) for k, v in (arrays | changes).items()}
  return losses.decoupled_ppo_loss(
    **arrays,
    clip_low=CLIP_LOW,
    clip_high=CLIP_HIGH,
    behavior_weight_cap=CAP,
    cap_mode=cap_mode,
    num_loss_tokens=num_loss_tokens,
  )


def ppo_gradient(arrays, **kwargs):
  (loss, sums), gradient = jax.jit(
    jax.value_and_grad(
      lambda x, others: ppo_loss(others, logprobs=x, **kwargs), has_aux=True
    )
  )(arrays["logprobs"], arrays)
  return loss, sums, gradient


def transcribed_ppo(arrays, cap_mode, num_loss_tokens):
  """The docstring, in float64, a token at a time; and which branches ran."""
  loss, gradient, branches = 0.0, np.zeros((2, 8)), set()
  sums = dict.fromkeys(ppo_loss(arrays)[1], 0.0)
  for index in np.ndindex(2, 8):
    theta, proximal, behavior, advantage, mask = (
      float(x[index]) for x in arrays.values()
    )
    if not mask:
      branches.add("masked")
      continue
    w = math.exp(proximal - behavior)
    if w > CAP:
      branches.add("capped")
      sums["behavior_weight_capped_count"] += 1
      w = 0.0 if cap_mode is sections.BehaviorWeightCapMode.MASK else CAP
    r = math.exp(theta - proximal)
    clipped = min(max(r, 1 - CLIP_LOW), 1 + CLIP_HIGH)
    sign = "+" if advantage > 0 else "-"
    side = "above" if r > clipped else "below" if r < clipped else "inside"
    branches.add(side + sign)
    if clipped * advantage < r * advantage:
      sums["clip_count"] += 1
    else:
      gradient[index] = -w * r * advantage / num_loss_tokens
    loss -= w * min(r * advantage, clipped * advantage) / num_loss_tokens
    sums["approx_kl_sum"] += (r - 1) - math.log(r)
    sums["behavior_weight_sum"] += w
    sums["behavior_weight_square_sum"] += w**2
  return loss, sums, gradient, branches


@pytest.mark.parametrize("cap_mode", sections.BehaviorWeightCapMode)
def test_decoupled_ppo_equals_the_formula_in_every_branch(cap_mode):
  arrays = ppo_inputs()
  loss, sums, gradient = ppo_gradient(arrays, cap_mode=cap_mode)
  *expected, branches = transcribed_ppo(arrays, cap_mode, 14)
  assert branches == {
    *("above+", "above-", "below+", "below-", "inside+", "inside-"),
    *("capped", "masked"),
  }
  np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
  assert sums.keys() == expected[1].keys()
  for name in sums:
    np.testing.assert_allclose(sums[name], expected[1][name], rtol=1e-5)
  np.testing.assert_allclose(gradient, expected[2], rtol=1e-5, atol=1e-7)


def test_the_cap_modes_differ_and_both_count_the_same_tokens():
  arrays = ppo_inputs()
  (masked, sums), (truncated, other_sums) = (
    ppo_loss(arrays, cap_mode=mode) for mode in sections.BehaviorWeightCapMode
  )
  assert masked != truncated
  name = "behavior_weight_capped_count"
  assert sums[name] == other_sums[name] == 4


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("cap_mode", sections.BehaviorWeightCapMode)
def test_poison_under_the_mask_changes_no_bit(poison, cap_mode):
  arrays = ppo_inputs()
  poisoned = {
    k: v if k == "loss_mask" else np.where(arrays["loss_mask"], v, poison)
    for k, v in arrays.items()
  }
  clean = ppo_gradient(arrays, cap_mode=cap_mode)
  jax.tree.map(
    np.testing.assert_array_equal,
    clean,
    ppo_gradient(poisoned, cap_mode=cap_mode),
  )
  assert (np.asarray(clean[2])[~arrays["loss_mask"]] == 0).all()


def test_no_gradient_flows_to_the_weights_of_other_policies_or_advantages():
  arrays = ppo_inputs()
  for name in ("proximal_logprobs", "behavior_logprobs", "advantages"):
    gradient = jax.grad(lambda x, name=name: ppo_loss(arrays, **{name: x})[0])(
      jnp.asarray(arrays[name])
    )
    assert (gradient == 0).all()


def test_microbatches_add_up():
  arrays = ppo_inputs()
  loss, sums, gradient = ppo_gradient(arrays)
  parts = [
    ppo_gradient({k: v[row : row + 1] for k, v in arrays.items()})
    for row in range(2)
  ]
  np.testing.assert_allclose(sum(p[0] for p in parts), loss, rtol=1e-6)
  for name in sums:
    np.testing.assert_allclose(
      sum(p[1][name] for p in parts), sums[name], rtol=1e-6
    )
  np.testing.assert_array_equal(
    np.concatenate([p[2] for p in parts]), gradient, strict=True
  )


def test_on_policy_the_gradient_is_reinforce():
  arrays = ppo_inputs()
  mask = arrays["loss_mask"]
  logprobs = arrays["logprobs"]
  on_policy = {"proximal_logprobs": logprobs, "behavior_logprobs": logprobs}
  _, sums, gradient = ppo_gradient(arrays | on_policy)
  reinforce = np.where(mask, -arrays["advantages"], 0) / np.float32(14)
  np.testing.assert_allclose(gradient, reinforce, rtol=1e-6)
  assert sums["clip_count"] == sums["approx_kl_sum"] == 0
  assert float(sums["behavior_weight_sum"]) == mask.sum()


def test_a_minibatch_without_loss_tokens_has_loss_and_gradient_zero():
  arrays = ppo_inputs()
  loss, _, gradient = ppo_gradient(
    arrays | {"loss_mask": np.zeros((2, 8), bool)}, num_loss_tokens=0
  )
  assert loss == 0 and (gradient == 0).all()


def test_k3_is_the_divergence_on_average_and_never_negative():
  p = np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)
  q = np.array([[0.2, 0.2, 0.2, 0.4]], np.float32)
  values = divergences.k3(jnp.log(p), jnp.log(q))
  assert (values >= 0).all()
  np.testing.assert_allclose(
    (p * values).sum(), (p * np.log(p / q)).sum(), rtol=1e-5
  )
  on_host = divergences.k3(np.log(p, dtype=np.float64), np.log(q))
  assert isinstance(on_host, np.ndarray) and on_host.dtype == np.float64
  np.testing.assert_allclose(on_host, values, rtol=1e-5, atol=1e-7)
  # A rounding error e counts e^2 / 2, not e.
  tiny = divergences.k3(jnp.log(p), jnp.log(p) + 1e-5)
  assert (tiny < 1e-9).all()


def test_loglinear_proximal_logprobs_are_their_formula():
  arrays = ppo_inputs()
  current, behavior = arrays["logprobs"], arrays["behavior_logprobs"]
  version = 9
  versions = np.arange(16, dtype=np.int32).reshape(2, 8) % 4 + version - 3
  assert {*np.unique(version - versions)} == {0, 1, 2, 3}
  found, gradient = jax.value_and_grad(
    lambda x: losses.loglinear_proximal_logprobs(
      x, jnp.asarray(behavior), jnp.asarray(versions), jnp.int32(version)
    ).sum()
  )(jnp.asarray(current))
  expected = np.zeros((2, 8))
  for index in np.ndindex(2, 8):
    d = (version + 1) - int(versions[index])
    expected[index] = float(behavior[index]) / d
    expected[index] += (1 - 1 / d) * float(current[index])
  np.testing.assert_allclose(
    losses.loglinear_proximal_logprobs(
      jnp.asarray(current),
      jnp.asarray(behavior),
      jnp.asarray(versions),
      jnp.int32(version),
    ),
    expected,
    rtol=1e-6,
  )
  np.testing.assert_allclose(found, expected.sum(), rtol=1e-5)
  assert not gradient.any()
  # What is not stale is what drew it.
  fresh = versions == version
  np.testing.assert_allclose(expected[fresh], behavior[fresh], rtol=1e-6)


def test_behavior_kl_sums_equal_the_formula_and_ignore_the_rest():
  arrays = ppo_inputs()
  mask = arrays["loss_mask"]
  is_current = np.zeros((2, 8), bool)
  is_current[0, 1::2] = True
  assert (is_current & ~mask).any() and (is_current & mask).any()
  expected = dict.fromkeys(
    ("behavior_kl_sum", "mismatch_kl_sum", "mismatch_count"), 0.0
  )
  proximal, behavior = arrays["proximal_logprobs"], arrays["behavior_logprobs"]
  for index in np.argwhere(mask):
    log_ratio = float(proximal[*index]) - float(behavior[*index])
    kl = math.exp(log_ratio) - 1 - log_ratio
    expected["behavior_kl_sum"] += kl
    if is_current[*index]:
      expected["mismatch_kl_sum"] += kl
      expected["mismatch_count"] += 1
  actual = divergences.behavior_kl_sums(
    jnp.asarray(np.where(mask, proximal, np.nan)),
    jnp.asarray(behavior),
    jnp.asarray(mask),
    jnp.asarray(is_current),
  )
  assert actual.keys() == expected.keys()
  for name in expected:
    np.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)


def test_next_token_loss_is_the_mean_cross_entropy_of_the_mask():
  arrays = ppo_inputs()
  mask = arrays["loss_mask"]
  logprobs = np.where(mask, arrays["logprobs"], np.nan)
  loss, gradient = jax.value_and_grad(
    lambda x: losses.next_token_loss(x, jnp.asarray(mask), num_loss_tokens=14)
  )(jnp.asarray(logprobs))
  expected = -sum(float(x) for x in logprobs[mask]) / 14
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  np.testing.assert_allclose(gradient, np.where(mask, -1 / 14, 0), rtol=1e-6)
