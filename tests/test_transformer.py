"""The decoder: counts, layouts, causality, packing, rotary frequencies."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import rotary
from jaxrl_async.models import transformer
from jaxrl_async.planning import matmul_rate

UNTIED = dataclasses.replace(
  tiny.MODEL, has_tied_head=False, has_qkv_bias=True, has_qk_norm=False
)
SCALAR = dataclasses.replace(UNTIED, has_scalar_head=True)
EVERYTHING = dataclasses.replace(
  UNTIED, has_qk_norm=True, num_heads=3, num_kv_heads=1, num_layers=3
)


@pytest.mark.parametrize(
  "model",
  [*configs.MODELS.values(), UNTIED, SCALAR, EVERYTHING],
  ids=[*configs.MODELS, "untied", "scalar", "everything"],
)
def test_the_formula_counts_the_parameters(model):
  shapes = jax.eval_shape(
    functools.partial(transformer.init_params, model), jax.random.key(0)
  )
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert model.num_params == count


def test_a_scalar_head_is_a_vector_in_place_of_the_output_matrix():
  params = jax.jit(functools.partial(transformer.init_params, SCALAR))(
    jax.random.key(0)
  )
  whole = transformer.logical_axes(UNTIED, is_stacked=True)
  assert params.keys() == whole.keys() - {"output_head"} | {"scalar_head"}
  assert not params["scalar_head"].any()
  hidden = np.random.default_rng(0).normal(size=(2, 3, SCALAR.model_dim))
  head = np.arange(SCALAR.model_dim)
  bound = transformer.bind(
    SCALAR,
    {**params, "scalar_head": jnp.asarray(head, jnp.float32)},
    is_stacked=True,
  )
  found = bound.scalars(jnp.asarray(hidden, jnp.bfloat16))
  assert found.dtype == jnp.float32
  rounded = np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float64)
  np.testing.assert_allclose(found, rounded @ head, rtol=1e-5, atol=1e-3)


def test_nothing_is_multiplied_with_the_embedding_under_a_scalar_head():
  lengths = np.array([5, 3])
  tied = dataclasses.replace(SCALAR, has_tied_head=True)
  found = matmul_rate.model_flops(tied, lengths)
  assert found == matmul_rate.model_flops(SCALAR, lengths)
  matrix = SCALAR.vocab_size * SCALAR.model_dim
  whole = matmul_rate.model_flops(UNTIED, lengths)
  assert whole - found == 6 * (matrix - SCALAR.model_dim) * lengths.sum()


def test_impossible_heads_are_refused():
  with pytest.raises(ValueError, match="multiple of num_kv_heads"):
    dataclasses.replace(tiny.MODEL, num_heads=3)
  with pytest.raises(ValueError, match="odd"):
    dataclasses.replace(tiny.MODEL, head_dim=7)


def test_fresh_parameters_have_the_deviation_of_their_fan_in():
  model = dataclasses.replace(
    tiny.MODEL, model_dim=128, head_dim=32, mlp_dim=256
  )
  params = jax.jit(functools.partial(transformer.init_params, model))(
    jax.random.key(1)
  )
  layers = params["layers"]
  for name, fan_in in [("query", 128), ("output", 128), ("down", 256)]:
    # Truncated at two deviations.
    assert np.std(layers[name]) == pytest.approx(0.88 * fan_in**-0.5, rel=0.05)
    assert not np.array_equal(layers[name][0], layers[name][1])
  assert (layers["mlp_norm"] == 1).all()


@pytest.mark.parametrize(
  "model", [tiny.MODEL, pytest.param(EVERYTHING, marks=pytest.mark.nightly)]
)
def test_stacked_layers_compute_what_unstacked_ones_do(model):
  params = tiny.params(0, model)
  batch = tiny.packed([tiny.prompt(9), tiny.prompt(20)], 32)
  forward = functools.partial(tiny.hidden_states, model)
  stacked = jax.jit(functools.partial(forward, batch=batch))(params)
  unstacked = jax.jit(
    functools.partial(forward, batch=batch, is_stacked=False)
  )(transformer.unstack(params, model.num_layers))
  np.testing.assert_allclose(stacked, unstacked, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  "remat",
  [
    pytest.param(remat, marks=pytest.mark.nightly)
    if remat in (sections.Remat.NONE, sections.Remat.DOTS)
    else remat
    for remat in sections.Remat
  ],
)
def test_recomputed_activations_change_no_gradient(remat):
  batch = tiny.packed([tiny.prompt(9)], 16)

  def loss(params, remat):
    model = transformer.bind(tiny.MODEL, params, is_stacked=True, remat=remat)

    def attend(layer, query, key, value):
      return query + value.repeat(2, axis=2), None

    hidden, _ = model.hidden(
      model.embed(jnp.asarray(batch.tokens), jnp.dtype("float32")),
      jnp.asarray(batch.positions),
      attend,
    )
    return jnp.square(hidden[..., 0]).sum()

  grad = jax.jit(jax.grad(loss), static_argnums=1)
  params = tiny.params()
  kept, recomputed = grad(params, sections.Remat.NONE), grad(params, remat)
  for a, b in zip(*map(jax.tree.leaves, (kept, recomputed)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_no_token_depends_on_a_later_one_or_on_another_segment():
  model = dataclasses.replace(EVERYTHING, num_layers=2)
  segments = np.array([1, 1, 1, 1, 2, 2, 2])
  depends = tiny.input_dependence(
    model, tiny.params(0, model), np.arange(10, 17), segments
  )
  allowed = np.tril(segments[:, None] == segments[None])
  np.testing.assert_array_equal(depends > 0, allowed)


def test_packed_segments_compute_what_they_do_one_at_a_time():
  sequences = [tiny.prompt(n, seed=n) for n in (11, 1, 20, 7)]
  packed = tiny.trainer_logprobs(tiny.params(), sequences)
  for sequence, logprobs in zip(sequences, packed, strict=True):
    (alone,) = tiny.trainer_logprobs(tiny.params(), [sequence])
    assert logprobs[0] == 0
    np.testing.assert_allclose(logprobs, alone, atol=1e-5)


def test_rotary_frequencies_are_their_formula():
  model = dataclasses.replace(tiny.MODEL, head_dim=64, rope_theta=5e5)
  plain = 5e5 ** -(np.arange(0, 64, 2) / 64)
  np.testing.assert_allclose(
    rotary.frequencies(model, *set(model.ropes)), plain, rtol=1e-6
  )
  scaling = configs.RopeScaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_tokens=8192,
  )
  scaled = dataclasses.replace(model, rope_scaling=scaling)
  regions = set()
  expected = []
  for frequency in plain:
    turns = 8192 * frequency / (2 * np.pi)
    if turns >= 4:
      regions.add("kept")
      expected.append(frequency)
    elif turns <= 1:
      regions.add("slowed")
      expected.append(frequency / 8)
    else:
      regions.add("between")
      share = (turns - 1) / (4 - 1)
      expected.append((1 - share) * frequency / 8 + share * frequency)
  assert regions == {"kept", "slowed", "between"}
  np.testing.assert_allclose(
    rotary.frequencies(scaled, *set(scaled.ropes)), expected, rtol=1e-6
  )
  with pytest.raises(ValueError, match="low_freq_factor"):
    dataclasses.replace(scaling, high_freq_factor=1.0)
