"""Rotary embeddings: which layers have which, and their scalings' frequencies.

The scalings are compared with transformers at the sizes of large models, within
the original context and beyond it.
"""

import dataclasses

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import rotary
from jaxrl_async.models import transformer

PAIRS = 48  # of heads of 128 elements, three quarters of which are rotated
LONG = [1.0 + 0.5 * i for i in range(PAIRS)]
SCALINGS = {
  "linear": {"factor": 8.0},
  "llama3": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
  },
  "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
  "yarn, other bounds": {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "truncate": False,
    "original_max_position_embeddings": 4096,
  },
  "dynamic": {"factor": 4.0},
  "longrope": {
    "short_factor": [1.0 + 0.01 * i for i in range(PAIRS)],
    "long_factor": LONG,
    "original_max_position_embeddings": 4096,
  },
}


@pytest.mark.parametrize("length", [100, 20_000])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name, length):
  pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  from transformers import modeling_rope_utils

  rope = {"rope_type": name, "rope_theta": 5e5, **SCALINGS[name]}
  part = 0.75 if name == "longrope" else 1.0
  config = transformers.LlamaConfig(
    hidden_size=256,
    num_attention_heads=2,
    max_position_embeddings=16_384,
    rope_parameters=rope | {"partial_rotary_factor": part},
  )
  compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]]
  expected, amplitude = compute(config, "cpu", seq_len=length)
  settings = hf_config.config_json(tiny.MODEL) | {
    "model_type": "phi3" if name == "longrope" else "llama",
    "hidden_size": 256,
    "num_attention_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "original_max_position_embeddings": rope.get(
      "original_max_position_embeddings"
    ),
    "rope_scaling": rope,
    "partial_rotary_factor": part,
  }
  model = hf_config._model_config(settings).within(length)
  (own,) = set(model.ropes)
  found = rotary.frequencies(model, own)
  np.testing.assert_allclose(found, expected.numpy(), rtol=4e-7)
  assert own.scaling.amplitude == pytest.approx(amplitude, rel=1e-6)


def test_a_run_within_the_context_is_not_scaled_and_a_longer_one_is():
  scaling = configs.RopeScaling(
    kind="longrope",
    short_factors=(1.0,) * 4,
    long_factors=(2.0,) * 4,
    original_max_tokens=10,
  )
  model = dataclasses.replace(tiny.MODEL, rope_scaling=scaling)
  plain = rotary.frequencies(tiny.MODEL, *set(tiny.MODEL.ropes))
  for length, factor in ((None, 1), (10, 1), (11, 2)):
    own = model if length is None else model.within(length)
    np.testing.assert_array_equal(
      rotary.frequencies(own, *set(own.ropes)) * factor, plain
    )
  assert tiny.MODEL.within(10**6) == tiny.MODEL


def test_layers_have_the_embedding_of_their_table():
  model = dataclasses.replace(
    tiny.MODEL,
    num_layers=4,
    sliding_windows=(5, None, 5, None),
    window_rope_theta=100.0,
    has_rotary=(True, True, True, False),
  )
  local, far = configs.Rope(100.0, None), configs.Rope(10_000.0, None)
  assert model.ropes == (local, far, local, None)
  assert rotary.kinds(model) == ([local, far, None], [0, 1, 0, 2])


def test_without_an_embedding_nothing_is_rotated_and_a_part_stays():
  x = np.random.default_rng(0).normal(size=(1, 3, 2, 8)).astype(np.float32)
  x, positions = jnp.asarray(x), jnp.array([[0, 7, 1000]], jnp.int32)
  none = rotary.factors(tiny.MODEL, None, positions)
  np.testing.assert_array_equal(rotary.rotated(x, *none), x)
  part = dataclasses.replace(tiny.MODEL, rotary_dim=6)
  factors = rotary.factors(part, *set(part.ropes), positions)
  turned = np.asarray(rotary.rotated(x, *factors, 2.0))
  np.testing.assert_array_equal(turned[..., 6:], 2 * x[..., 6:])
  angle = 7 * 10_000.0 ** (-2 / 6)  # of the second pair: elements 1 and 4
  a, b = x[0, 1, :, 1], x[0, 1, :, 4]
  cos, sin = np.cos(angle), np.sin(angle)
  np.testing.assert_allclose(turned[0, 1, :, 1], 2 * (a * cos - b * sin), 1e-5)
  np.testing.assert_allclose(turned[0, 1, :, 4], 2 * (b * cos + a * sin), 1e-5)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"rotary_dim": 3}, "rotary_dim 3"),
    ({"rotary_dim": 10}, "rotary_dim 10"),
    ({"has_rotary": (True,)}, "has_rotary has 1 entries for num_layers 2"),
    ({"activation": "relu"}, "activation 'relu'"),
  ],
)
def test_shapes_that_no_model_has_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(tiny.MODEL, **change)


def test_stacked_layers_take_their_own_embeddings():
  model = dataclasses.replace(
    tiny.MODEL,
    sliding_windows=(None, 6),
    window_rope_theta=50.0,
    has_rotary=(False, True),
  )
  params = tiny.params(0, model)
  batch = jax.tree.map(jnp.asarray, tiny.packed([tiny.prompt(20)]))
  stacked = tiny.hidden_states(model, params, batch)
  apart = transformer.unstack(params, model.num_layers)
  listed = jax.jit(
    lambda x: tiny.hidden_states(model, x, batch, is_stacked=False)
  )(apart)
  np.testing.assert_allclose(stacked[0, :20], listed[0, :20], atol=1e-5)
