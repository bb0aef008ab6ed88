"""bfloat16, at the heads and vocabularies of real models, on this CPU.

What runs in bfloat16 on a device is compared with the same in float32. Two
layers and a narrow MLP stand for the rest of a model.
"""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.algorithms import likelihood
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.training import publishing
from jaxrl_async.training import train_step

# Heads of Qwen2.5 0.5B, 1.5B and 7B.
MODELS = {
  name: dataclasses.replace(
    configs.MODELS[name],
    num_layers=2,
    mlp_dim=512,
    vocab_size=4_096,
    has_tied_head=True,
  )
  for name in ("qwen2-0.5b", "qwen2-1.5b", "qwen2.5-7b")
}
pytestmark = pytest.mark.slow


@functools.cache
def params_of(name):
  return jax.jit(functools.partial(transformer.init_params, MODELS[name]))(
    jax.random.key(0)
  )


def forward(name, dtype, sequences, **settings):
  """Logprobs of packed sequences, and the gradients of their sum."""
  model = MODELS[name]
  settings = train_step.ForwardSettings(
    model=model,
    compute_dtype=dtype,
    temperature=1.0,
    vocab_chunk=1_024,
    **{"remat": sections.Remat.FULL, "attention": "blocks", **settings},
  )
  packed = tiny.packed(sequences, 384)

  @jax.jit
  def compute(params, batch):
    def total(params):
      logprobs, entropy = train_step.token_logprobs(settings, params, batch)
      return logprobs.sum(), (logprobs, entropy)

    return jax.value_and_grad(total, has_aux=True)(params)

  (_, found), gradients = compute(params_of(name), packed)
  return jax.tree.map(np.asarray, (*found, gradients))


def distance(found, expected):
  found, expected = (np.asarray(x, np.float64) for x in (found, expected))
  return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def sequences_of(model, *lengths):
  rng = np.random.default_rng(0)
  return [rng.integers(6, model.vocab_size, n, np.int32) for n in lengths]


@pytest.mark.parametrize("attention", ["blocks", "chunks"])
@pytest.mark.parametrize("name", MODELS)
def test_the_trainers_pass_is_as_exact_as_bfloat16_allows(name, attention):
  sequences = sequences_of(MODELS[name], 200, 1, 150)
  exact = forward(name, "float32", sequences)
  found = forward(name, "bfloat16", sequences, attention=attention)
  assert np.isfinite(found[0]).all()
  assert distance(found[0], exact[0]) < 2e-2
  assert distance(found[1], exact[1]) < 2e-2
  for leaf, expected in zip(
    jax.tree.leaves(found[2]), jax.tree.leaves(exact[2]), strict=True
  ):
    assert leaf.dtype == np.float32
    assert distance(leaf, expected) < 5e-2


@pytest.mark.parametrize("cache", ["slots", "pages", "chunks"])
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_writes_what_the_trainer_would(name, cache):
  model = MODELS[name]
  sizes = dataclasses.replace(
    tiny.SIZES,
    cache_tokens=64,
    prefill_buckets=(32, 64),
    window_buckets=(32, 64),
    **{
      "slots": {},
      "pages": {"num_pages": 16, "page_tokens": 16},
      "chunks": {"prefill_chunk": 16},
    }[cache],
  )
  engine = engine_lib.Engine(
    model,
    sizes,
    mesh=mesh_lib.make_mesh(jax.devices()[:1]),
    seed=7,
    end_tokens=(1,),
    dtype="bfloat16",
  )
  weights = jax.jit(
    functools.partial(
      publishing.published_params,
      num_layers=2,
      dtype="bfloat16",
      weights=sections.WeightFormat.FLOAT,
    )
  )(params_of(name))
  scheduler = tiny.scheduler_lib.Scheduler(
    engine,
    kv_on_adopt=sections.KvOnAdopt.RECOMPUTE,
    busy=tiny.metrics_lib.BusyClock(),
  )
  scheduler.adopt(engine.load_params(weights, 0), 0)
  prompts = sequences_of(model, 5, 20, 30, 9)
  for group, prompt in enumerate(prompts):
    scheduler.submit(tiny.sequence(prompt, limit=60, group=group))
  written = [x.trajectory() for x in tiny.finish(scheduler)]
  assert len(written) == len(prompts)
  sequences = [x.tokens for x in written]
  logprobs = forward(name, "bfloat16", sequences)[0][0]
  first, differences = 0, []
  for trajectory in written:
    own = logprobs[first : first + len(trajectory.tokens)]
    mask = trajectory.loss_mask
    differences.append((own - trajectory.behavior_logprobs)[mask])
    first += len(trajectory.tokens)
  ratio = np.concatenate(differences)
  assert len(ratio) > 60
  # k3, which `mismatch_kl` is the mean of.
  assert np.mean(np.expm1(ratio) - ratio) < 1e-3
  assert np.abs(ratio).max() < 0.2


@pytest.mark.parametrize("vocab_chunk", [4_096, 16_384])
def test_likelihood_over_a_vocabulary_of_152k(vocab_chunk):
  """At the width of Qwen2.5 0.5B, against float64."""
  tokens, width, vocabulary = 48, 896, 151_936
  rng = np.random.default_rng(0)
  hidden = jnp.asarray(
    rng.standard_normal((1, tokens, width), np.float32), jnp.bfloat16
  )
  head = jnp.asarray(
    rng.standard_normal((width, vocabulary), np.float32) * width**-0.5,
    jnp.bfloat16,
  )
  ids = rng.integers(0, vocabulary, (1, tokens), np.int32)

  @jax.jit
  def compute(hidden, head, ids):
    def total(hidden):
      found = likelihood.token_logprobs_and_entropy(
        hidden,
        head.T,
        ids,
        jnp.ones_like(ids),
        temperature=1.0,
        vocab_chunk=vocab_chunk,
      )
      return found[0].sum(), found

    return jax.value_and_grad(total, has_aux=True)(hidden)

  (_, (logprobs, entropy)), gradient = compute(hidden, head, ids)
  wide = np.asarray(hidden[0], np.float64)
  logits = wide @ np.asarray(head, np.float64)
  log_z = np.log(np.exp(logits).sum(-1))
  exact = logits[np.arange(tokens - 1), ids[0, 1:]] - log_z[:-1]
  np.testing.assert_allclose(logprobs[0, 1:], exact, atol=1e-4)
  probabilities = np.exp(logits - log_z[:, None])
  expected = -(probabilities * (logits - log_z[:, None])).sum(-1)
  np.testing.assert_allclose(entropy[0, 1:], expected[:-1], atol=1e-3)
  pull = -probabilities
  pull[np.arange(tokens - 1), ids[0, 1:]] += 1
  right = pull[:-1] @ np.asarray(head, np.float64).T
  assert distance(gradient[0, :-1], right) < 1e-2
