"""A model with all switches at once: meshes, decoding, the estimate of memory.

No family has all of them. tests/test_families.py compares each with
transformers.
"""

import dataclasses

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import test_engine_mesh
import test_sliding_windows
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.planning import memory_estimate
from jaxrl_async.training import train_step

MODEL = dataclasses.replace(
  tiny.MODEL,
  vocab_size=96,
  has_qk_norm=False,
  has_wide_qk_norm=True,
  norms=configs.Norms.AROUND,
  has_centred_norms=True,
  activation="gelu_tanh",
  sliding_windows=(None, 6),
  rotary_dim=6,
  window_rope_theta=100.0,
  rope_scaling=configs.RopeScaling(
    kind="yarn", factor=4.0, amplitude=1.1, original_max_tokens=16
  ),
  embedding_scale=3.0,
  residual_scale=0.5,
  attention_scale=0.5,
  logits_divisor=1.5,
  attention_soft_cap=1.5,
  logits_soft_cap=4.0,
)


def test_the_formula_counts_the_parameters():
  leaves = jax.tree.leaves(tiny.params(0, MODEL))
  assert sum(x.size for x in leaves) == MODEL.num_params


# Those with which parameters have the same shapes.
SWITCHES = {
  field.name: field.default
  for field in dataclasses.fields(MODEL)
  if getattr(MODEL, field.name) != getattr(tiny.MODEL, field.name)
  and field.name
  not in ("vocab_size", "norms", "has_qk_norm", "has_wide_qk_norm")
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHES)
def test_no_switch_is_without_effect(name):
  assert len(SWITCHES) > 10
  other = dataclasses.replace(MODEL, **{name: SWITCHES[name]})
  sequences = [tiny.prompt(20) % 96]
  params = tiny.params(0, MODEL)
  logprobs = [
    tiny.trainer_logprobs(params, sequences, model=model)[0]
    for model in (MODEL, other)
  ]
  assert np.abs(logprobs[0] - logprobs[1]).max() > 1e-4


def logprobs_and_gradients(shape, attention):
  mesh = mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape)
  rules = mesh_lib.TRAIN_RULES
  axes = transformer.logical_axes(MODEL, is_stacked=True)
  shardings = mesh_lib.shardings(mesh, rules, axes)
  params = jax.device_put(tiny.params(0, MODEL), shardings)
  settings = train_step.ForwardSettings(
    model=MODEL,
    compute_dtype="float32",
    remat=sections.Remat.FULL,
    attention=attention,
    temperature=0.8,
    vocab_chunk=40,
    layout=mesh_lib.Layout(mesh=mesh, rules=rules),
  )
  row = tiny.packed([tiny.prompt(n) % 96 for n in (30, 17)])
  batch = jax.tree.map(lambda x: jnp.concatenate([x, x]), row)
  weights = np.random.default_rng(0).normal(size=batch.tokens.shape)

  def loss(params):
    logprobs, _ = train_step.token_logprobs(settings, params, batch)
    return (logprobs * weights.astype(np.float32)).sum(), logprobs

  return jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params))


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["xla", "blocks"])
def test_a_mesh_of_eight_computes_what_one_device_does(attention):
  shape = mesh_lib.MeshShape(fsdp=2, context=2, tensor=2)
  found = logprobs_and_gradients(shape, attention)
  expected = logprobs_and_gradients(mesh_lib.ONE, attention)
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


CACHES = {
  "slots": {},
  "pages": {"num_pages": 24, "page_tokens": 4},
  "chunks": {"prefill_chunk": 8},
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one device", "a mesh"])
@pytest.mark.parametrize("cache", CACHES)
def test_what_is_decoded_is_what_the_trainer_computes(cache, shape):
  both = test_engine_mesh.BOTH_AXES
  shape = mesh_lib.ONE if shape == "one device" else both
  engine = engine_lib.Engine(
    MODEL,
    dataclasses.replace(tiny.SIZES, **CACHES[cache]),
    mesh=mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape),
    seed=7,
    end_tokens=(),
  )
  sequences, _ = test_sliding_windows.write(engine, MODEL)
  for sequence in sequences:
    (expected,) = tiny.trainer_logprobs(
      tiny.params(0, MODEL), [sequence.tokens], model=MODEL
    )
    mask = sequence.loss_mask
    np.testing.assert_allclose(
      sequence.behavior_logprobs[mask], expected[mask], atol=1e-4
    )


def test_norms_and_caps_are_counted():
  def kept(model, num_scores=10):
    return memory_estimate._kept(
      model,
      lambda axis: 1,
      sections.Remat.NONE,
      num_scores=num_scores,
      itemsize=2,
    )

  plain = dataclasses.replace(
    MODEL,
    norms=configs.Norms.BEFORE,
    has_wide_qk_norm=False,
    attention_soft_cap=None,
  )
  d, heads = MODEL.model_dim, MODEL.num_heads + MODEL.num_kv_heads
  more = 4 * (2 * 3 * d + 3 * heads * MODEL.head_dim + 10)
  assert kept(MODEL) - kept(plain) == more
