"""Draws against exact probabilities, and what a draw depends on."""

import dataclasses
import functools
import itertools

import hypothesis
from hypothesis import strategies as st
import jax
from jax import numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxrl_async.engine import sampling

V = 11
NUM_DRAWS = 20_000


def keys_of(groups, *, seed=3, stream=0, member=0):
  groups = jnp.atleast_1d(jnp.asarray(groups, jnp.int32))
  return sampling.row_keys(
    jnp.int32(seed),
    jnp.full_like(groups, stream),
    groups,
    jnp.full_like(groups, member),
  )


def sample_at(logits, keys, positions, temperature, filters=None):
  """Draw the tokens of these positions."""
  quantiles = sampling.uniforms(keys, positions)
  return sampling.sample(logits, quantiles, temperature, filters)


def draw(logits, keys, positions=4, temperature=1.0):
  rows = keys.shape[0]
  tokens, logprobs = sample_at(
    jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, len(logits))),
    keys,
    jnp.full((rows,), positions, jnp.int32),
    jnp.full((rows,), temperature, jnp.float32),
  )
  return np.asarray(tokens), np.asarray(logprobs)


def log_softmax(logits, temperature):
  scaled = np.asarray(logits, np.float64) / temperature
  scaled = scaled - scaled.max()
  return scaled - np.log(np.exp(scaled).sum())


@pytest.fixture(scope="module")
def logits():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=V).astype(np.float32)
  logits[3] = -np.inf  # a token that cannot be drawn
  return logits


@pytest.mark.parametrize(
  ("temperature", "varies"), [(1.0, "group"), (0.5, "position"), (2.0, "group")]
)
def test_draws_have_the_frequencies_and_logprobs_of_the_distribution(
  logits, temperature, varies
):
  count = jnp.arange(NUM_DRAWS, dtype=jnp.int32)
  fixed = jnp.zeros_like(count)
  tokens, logprobs = sample_at(
    jnp.broadcast_to(jnp.asarray(logits), (NUM_DRAWS, V)),
    keys_of(count if varies == "group" else fixed),
    count if varies == "position" else fixed,
    jnp.full((NUM_DRAWS,), temperature, jnp.float32),
  )
  expected = log_softmax(logits, temperature)
  np.testing.assert_allclose(logprobs, expected[tokens], rtol=1e-5, atol=1e-6)
  observed = np.bincount(np.asarray(tokens), minlength=V)
  probs = np.exp(expected)
  assert observed[3] == 0
  possible = probs > 0
  assert min(NUM_DRAWS * probs[possible]) > 5
  test = scipy.stats.chisquare(
    observed[possible], NUM_DRAWS * probs[possible] / probs.sum()
  )
  assert test.pvalue > 1e-3


def test_temperature_zero_takes_the_largest_with_its_logprob_at_one(logits):
  tokens, logprobs = draw(logits, keys_of(np.arange(50)), temperature=0.0)
  assert set(tokens) == {np.argmax(logits)}
  expected = log_softmax(logits, 1.0).max()
  np.testing.assert_allclose(logprobs, expected, rtol=1e-5)


def test_very_different_logits_overflow_nothing():
  tokens, logprobs = draw([1e4, 0.0, -1e4], keys_of(np.arange(20)))
  assert (tokens == 0).all()
  assert (logprobs == 0).all()


def uniforms(**where):
  """The token of a flat distribution over many is the uniform, as it were."""
  positions = where.pop("position", 4)
  groups = where.pop("group", 5)
  tokens, _ = draw(np.zeros(50_000), keys_of(groups, **where), positions)
  return tokens


def test_a_draw_depends_on_each_of_its_counters():
  # A sum or a product of counters would make some of these the same.
  names = "seed", "stream", "group", "member", "position"
  draws = [
    uniforms(**dict(zip(names, values, strict=True)))[0]
    for values in itertools.product(range(2), repeat=len(names))
  ]
  assert len(set(draws)) == 32


def test_a_draw_depends_on_neither_row_nor_batch():
  groups = np.array([9, 5, 7, 5, 5], np.int32)
  together = uniforms(group=groups)
  assert together[1] == together[3] == together[4] == uniforms()[0]
  assert together[0] == uniforms(group=9)[0]


def test_numbers_of_many_positions_are_those_of_each():
  keys = keys_of(np.arange(5))
  positions = jnp.arange(20, dtype=jnp.int32).reshape(4, 5)
  together = sampling.uniforms(keys, positions)
  each = [sampling.uniforms(keys, row) for row in positions]
  np.testing.assert_array_equal(together, np.stack(each))
  assert len(np.unique(together)) == 20


def test_a_draw_is_the_same_in_and_out_of_a_jit(logits):
  keys = keys_of(np.arange(32))
  jitted = jax.jit(sample_at)
  broadcast = jnp.broadcast_to(jnp.asarray(logits), (32, V))
  positions = jnp.arange(32, dtype=jnp.int32)
  temperature = jnp.ones((32,), jnp.float32)
  plain = sample_at(broadcast, keys, positions, temperature)
  fused = jitted(broadcast, keys, positions, temperature)
  np.testing.assert_array_equal(plain[0], fused[0])
  np.testing.assert_allclose(plain[1], fused[1], atol=1e-6)


# -- filters ----------------------------------------------------------------

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
sample = jax.jit(sample_at)
passing = jax.jit(sampling.passing)


def filters_of(rows, *, is_allowed=None, **on):
  """The same filters for every row, or an array of one's own."""

  def column(name, dtype):
    value = np.asarray(on.get(name, OFF[name]), dtype)
    return jnp.broadcast_to(value, (rows,))

  return sampling.Filters(
    top_k=column("top_k", np.int32),
    top_p=column("top_p", np.float32),
    min_p=column("min_p", np.float32),
    is_allowed=is_allowed,
  )


def sorted_filters(probs, *, top_k=0, top_p=1.0, min_p=0.0):
  """What is left of one row, by a sort and in float64; without ties."""
  order = np.argsort(-probs)
  kept = order[probs[order] > 0]
  if top_k:
    kept = kept[:top_k]
  share = probs[kept] / probs[kept].sum()
  before = np.cumsum(share) - share
  kept = kept[before < top_p]
  kept = kept[probs[kept] >= min_p * probs.max()]
  left = np.zeros_like(probs)
  left[kept] = probs[kept]
  return left / left.sum()


@functools.cache
def drawn_through(num_allowed, temperature, **on):
  """Draws from the fixture's logits, and the exact probabilities."""
  rng = np.random.default_rng(1)
  logits = rng.normal(size=30).astype(np.float32)
  logits[3] = -np.inf
  is_allowed = np.ones(30, bool)
  is_allowed[np.argsort(logits)[num_allowed:]] = False  # the likeliest
  shape = (NUM_DRAWS, 30)
  tokens, logprobs = sample(
    jnp.broadcast_to(logits, shape),
    keys_of(np.arange(NUM_DRAWS)),
    jnp.full((NUM_DRAWS,), 4, jnp.int32),
    jnp.full((NUM_DRAWS,), temperature, jnp.float32),
    filters_of(NUM_DRAWS, is_allowed=jnp.broadcast_to(is_allowed, shape), **on),
  )
  logits[~is_allowed] = -np.inf
  probs = sorted_filters(np.exp(log_softmax(logits, temperature)), **on)
  return np.asarray(tokens), np.asarray(logprobs), probs


COMBINATIONS = [
  {"top_k": 5},
  {"top_p": 0.7},
  {"min_p": 0.1},
  {"num_allowed": 25},
  {"top_k": 9, "top_p": 0.6},
  {"top_k": 8, "min_p": 0.2},
  {"top_p": 0.9, "min_p": 0.3},
  {"top_k": 9, "top_p": 0.95, "min_p": 0.05, "num_allowed": 28},
  {"top_k": 12, "temperature": 3.0},
  {"top_p": 0.9, "temperature": 0.5},
  {"min_p": 0.5, "temperature": 2.0},
  {"top_k": 7, "top_p": 0.9, "min_p": 0.2, "temperature": 1.7},
]


@pytest.mark.parametrize("case", COMBINATIONS, ids=str)
def test_filtered_draws_have_the_frequencies_of_what_is_left(case):
  case = {"num_allowed": 30, "temperature": 1.0} | case
  tokens, logprobs, probs = drawn_through(**case)
  observed = np.bincount(tokens, minlength=30)
  possible = probs > 0
  assert 1 < possible.sum() < 30
  assert not observed[~possible].any()
  expected = NUM_DRAWS * probs[possible]
  assert expected.min() > 5
  assert scipy.stats.chisquare(observed[possible], expected).pvalue > 1e-3
  np.testing.assert_allclose(
    logprobs, np.log(probs[tokens]), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("vocab_size", [97, 4_099])
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_row_without_filters_is_the_same_bits_among_filtered_ones(
  vocab_size, has_mask
):
  rows = 256
  rng = np.random.default_rng(vocab_size)
  logits = 3 * rng.normal(size=(rows, vocab_size)).astype(np.float32)
  logits[rng.random(logits.shape) < 0.05] = -np.inf
  temperature = rng.uniform(0.2, 2.0, rows).astype(np.float32)
  temperature[::7] = 0.0
  is_off = np.arange(rows) % 3 > 0
  filters = filters_of(
    rows,
    top_k=np.where(is_off, 0, 3),
    top_p=np.where(is_off, 1.0, 0.5),
    is_allowed=jnp.ones(logits.shape, bool) if has_mask else None,
  )
  args = logits, keys_of(np.arange(rows)), np.arange(rows, dtype=np.int32)
  plain = [np.asarray(x) for x in sample(*args, temperature)]
  filtered = [np.asarray(x) for x in sample(*args, temperature, filters)]
  for one, other in zip(plain, filtered, strict=True):
    np.testing.assert_array_equal(one[is_off], other[is_off])
    differ = (one != other) & (temperature > 0)
    assert differ.sum() > rows // 6  # the filtered ones


def test_greedy_takes_the_largest_allowed_and_no_notice_of_the_rest(logits):
  rows = 5
  largest = np.argmax(logits)
  is_allowed = np.ones((rows, V), bool)
  is_allowed[3:, largest] = False
  tokens, logprobs = sample(
    jnp.broadcast_to(logits, (rows, V)),
    keys_of(np.arange(rows)),
    jnp.arange(rows, dtype=jnp.int32),
    jnp.zeros((rows,), jnp.float32),
    filters_of(rows, top_k=2, top_p=0.1, min_p=0.9, is_allowed=is_allowed),
  )
  without = np.where(np.arange(V) == largest, -np.inf, logits)
  second = np.argmax(without)
  assert tokens.tolist() == [largest] * 3 + [second] * 2
  expected = [log_softmax(logits, 1.0).max()] * 3
  expected += [log_softmax(without, 1.0).max()] * 2
  np.testing.assert_allclose(logprobs, expected, rtol=1e-5)


def kept_of(probs, **on):
  """The kept set of rows [B V], or of one row [V]."""
  rows = np.atleast_2d(np.asarray(probs, np.float32))
  is_greedy = np.zeros(len(rows), bool)
  kept = passing(
    rows / rows.max(-1, keepdims=True), filters_of(len(rows), **on), is_greedy
  )
  return np.asarray(kept).reshape(np.shape(probs))


@pytest.mark.slow
@pytest.mark.parametrize(
  "on",
  [
    {"top_k": 20},
    {"top_k": 1_000},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.02},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.03},
  ],
  ids=str,
)
def test_what_is_kept_is_what_transformers_keeps(on):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  warpers = {
    "top_k": transformers.TopKLogitsWarper,
    "top_p": transformers.TopPLogitsWarper,
    "min_p": transformers.MinPLogitsWarper,
  }
  # Of these rows none has a token on the edge to within rounding.
  rng = np.random.default_rng(2)
  logits = 2 * rng.normal(size=(64, 300)).astype(np.float32)
  scores = torch.tensor(logits)
  for name, value in on.items():
    scores = warpers[name](value)(torch.zeros((64, 0)), scores)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  np.testing.assert_array_equal(
    kept_of(weights, **on), torch.isfinite(scores).numpy()
  )


def test_top_p_is_of_what_top_k_left_and_min_p_comes_last():
  probs = [0.4, 0.3, 0.2, 0.1]
  assert kept_of(probs, top_p=0.5).tolist() == [True, True, False, False]
  # 0.4 / 0.7 is over 0.5.
  assert kept_of(probs, top_p=0.5, top_k=2).sum() == 1
  assert kept_of(probs, min_p=0.6).sum() == 2
  assert kept_of(probs, top_p=0.5, min_p=0.6).sum() == 2


def test_equally_likely_tokens_are_kept_or_left_out_together():
  probs = [0.2, 0.3, 0.1, 0.3, 0.05, 0.05]
  pair = [False, True, False, True, False, False]
  assert kept_of(probs, top_k=1).tolist() == pair
  assert kept_of(probs, top_p=0.2).tolist() == pair
  assert kept_of(probs, min_p=1.0).tolist() == pair
  assert kept_of(probs, top_k=5).all()
  assert kept_of([0.1] * 10, top_k=3).all()


@pytest.mark.parametrize(
  "on",
  [{"top_k": 1}, {"top_p": 1e-6}, {"top_p": 1e-46}, {"min_p": 1.0}],
  ids=str,
)
def test_the_strictest_filter_leaves_the_likeliest(logits, on):
  tokens, logprobs = sample(
    jnp.broadcast_to(logits, (50, V)),
    keys_of(np.arange(50)),
    jnp.arange(50, dtype=jnp.int32),
    jnp.ones((50,), jnp.float32),
    filters_of(50, **on),
  )
  assert set(tokens.tolist()) == {np.argmax(logits)}
  assert (np.asarray(logprobs) == 0).all()


@pytest.mark.parametrize(
  "on", [{"top_k": 500}, {"top_k": 10**9}, {"top_p": 0.9999999}], ids=str
)
def test_a_filter_keeps_no_token_of_probability_zero(on):
  rng = np.random.default_rng(3)
  probs = rng.random((20, 60))
  probs[rng.random((20, 60)) < 0.4] = 0
  np.testing.assert_array_equal(kept_of(probs, **on), probs > 0)
  assert kept_of(probs).all()


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
  numerators=st.lists(st.integers(0, 255), min_size=15, max_size=15),
  top_k=st.integers(0, 20),
  top_p=st.integers(1, 256),
)
def test_the_search_finds_the_thresholds_of_a_sort(numerators, top_k, top_p):
  # Multiples of 1/256: no sum is rounded, and ties are frequent.
  weights = np.array([*numerators, 256]) / 256
  kept = np.ones(16, bool)
  if top_k:
    kept &= weights >= np.sort(weights)[::-1][:top_k][-1]
  total = weights[kept].sum()
  top_p = top_p / 256
  if top_p < 1:
    descending = np.sort(weights[kept])[::-1]
    enough = np.cumsum(descending) >= np.float32(top_p) * total
    kept &= weights >= descending[np.argmax(enough)]
  if top_k or top_p < 1:
    kept &= weights > 0
  assert kept_of(weights, top_k=top_k, top_p=top_p).tolist() == kept.tolist()


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
  lowest=st.integers(0, 0x3F800000 - 20),
  above=st.lists(st.integers(0, 20), min_size=15, max_size=15),
  top_k=st.integers(1, 15),
)
def test_the_search_is_exact_to_the_last_bit(lowest, above, top_k):
  # Neighbours among the floats, and 1.
  bits = np.array([*(lowest + x for x in above), 0x3F800000], np.int32)
  kept = (bits >= np.sort(bits)[::-1][top_k - 1]) & (bits > 0)
  weights = bits.view(np.float32)
  assert kept_of(weights, top_k=top_k).tolist() == kept.tolist()


def test_a_draw_between_two_partial_sums_moves_to_a_kept_token():
  is_kept = np.zeros((5, 8), bool)
  is_kept[:, [2, 3, 6]] = True
  drawn = jnp.array([0, 2, 4, 7, 8], jnp.int32)
  moved = sampling._nearest_kept(drawn, jnp.asarray(is_kept))
  assert moved.tolist() == [2, 2, 6, 6, 6]


# -- settings ---------------------------------------------------------------


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("temperature", -1.0, "temperature is -1.0; it must be 0 or at least"),
    ("temperature", float("nan"), "temperature is nan"),
    ("temperature", float("inf"), "temperature is inf"),
    ("temperature", 1e-40, "temperature is 1e-40"),
    ("top_k", -1, "top_k is -1"),
    ("top_k", 2**31, "top_k is 2147483648"),
    ("top_p", 0.0, "top_p is 0.0; it must be in \\(0, 1\\]"),
    ("top_p", 1.1, "top_p is 1.1"),
    ("top_p", float("nan"), "top_p is nan"),
    ("min_p", -0.1, "min_p is -0.1; it must be in \\[0, 1\\]"),
    ("min_p", 1.1, "min_p is 1.1"),
    ("min_tokens", -1, "min_tokens is -1"),
    ("end_tokens", (5, 97), "end token 97 is not in the vocabulary of 97"),
    ("end_tokens", (-1,), "end token -1"),
    ("end_tokens", tuple(range(9)), "9 end tokens; at most 8"),
  ],
)
def test_settings_nothing_can_be_drawn_with_are_refused(field, value, message):
  settings = sampling.SamplingSettings(**{field: value})
  with pytest.raises(ValueError, match=f"^{message}") as refused:
    settings.check(97)
  assert "\n" not in str(refused.value)


def test_settings_at_their_limits_pass():
  defaults = sampling.SamplingSettings()
  defaults.check(97)
  extremes = [
    {"temperature": 0.0, "top_k": 10**6, "top_p": 1e-9, "min_p": 1.0},
    {"temperature": 1e-8, "end_tokens": tuple(range(89, 97))},
  ]
  for changes in extremes:
    dataclasses.replace(defaults, **changes).check(97)
