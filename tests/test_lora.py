"""Adapters beside a frozen base: what they compute, and who chooses them."""

import functools

import jax
from jax import numpy as jnp
import lora_world
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.planning import matmul_rate
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

EQUATIONS = {
  "query": "...d,dnh->...nh",
  "key": "...d,dnh->...nh",
  "value": "...d,dnh->...nh",
  "output": "...nh,nhd->...d",
  "gate": "...d,df->...f",
  "up": "...d,df->...f",
  "down": "...f,fd->...d",
}


# -- what an adapter computes -------------------------------------------------


@pytest.mark.parametrize("module", sections.LORA_MODULES)
def test_an_adapter_adds_what_its_formula_says(module):
  rng = np.random.default_rng(0)
  kernel = tiny.MODEL.kernel_shapes[module]
  a, b = lora_lib.shapes(lora_world.LORA, module, kernel, 3)
  a, b = (rng.normal(size=shape).astype("f4") for shape in (a, b))
  inputs = a.shape[:-1]
  x = rng.normal(size=(2, 5, *inputs)).astype("f4")
  added = lora_lib.added(
    lora_world.LORA, EQUATIONS[module], *map(jnp.asarray, (x, a, b)), None
  )
  wide = [y.astype(np.float64) for y in (x, a, b)]
  for row in range(2):
    for token in range(5):
      low = wide[0][row, token].reshape(-1) @ wide[1].reshape(-1, 3)
      high = 6.0 / 3 * (low @ wide[2].reshape(3, -1))
      np.testing.assert_allclose(
        added[row, token].reshape(-1), high, rtol=1e-4, atol=1e-4
      )


def test_a_new_adapter_is_drawn_as_in_peft():
  a, b = lora_lib.initial(jax.random.key(0), (6, 8, 50), (50, 7))
  assert not b.any()
  assert np.abs(a).max() <= 48**-0.5  # uniform, of this variance
  assert np.std(a) == pytest.approx((3 * 48) ** -0.5, rel=0.05)


def test_a_new_adapter_changes_nothing():
  adapter = jax.tree_util.tree_map_with_path(
    lambda path, x: x * (not path[-1].key.endswith("_b")),
    lora_world.adapter(lora_world.LORA),
  )
  params, tokens = lora_lib.joined(tiny.params(), adapter), tiny.prompt(20)
  np.testing.assert_allclose(
    tiny.logits(params, tokens, lora_world.MODEL),
    tiny.logits(tiny.params(), tokens),
    atol=1e-4,
  )


@pytest.mark.slow
@pytest.mark.nightly
def test_a_base_is_drawn_the_same_with_and_without_adapters():
  fresh, plain = jax.jit(
    lambda key: [
      transformer.init_params(model, key)
      for model in (lora_world.MODEL, tiny.MODEL)
    ]
  )(jax.random.key(3))
  jax.tree.map(np.testing.assert_array_equal, lora_lib.base(fresh), plain)
  for name, leaf in lora_lib.adapters(fresh)["layers"].items():
    assert name.endswith("_a") == bool(leaf.any()), name


def test_a_merged_base_is_base_and_adapter():
  params, tokens = lora_world.params(), tiny.prompt(20)
  beside = tiny.logits(params, tokens, lora_world.MODEL)
  merged = lora_lib.merged(params, lora_world.LORA)
  np.testing.assert_allclose(
    tiny.logits(merged, tokens), beside, rtol=1e-4, atol=1e-4
  )
  base = tiny.logits(tiny.params(), tokens)
  assert np.abs(beside - base).max() > 0.1


def test_a_tree_is_its_base_and_its_adapters():
  params = lora_world.params()
  listed = transformer.unstack(params, tiny.MODEL.num_layers)
  for tree in (params, listed):
    base, adapters = lora_lib.base(tree), lora_lib.adapters(tree)
    leaves = len(jax.tree.leaves(base)) + len(jax.tree.leaves(adapters))
    assert leaves == len(jax.tree.leaves(tree))
    again = lora_lib.joined(base, adapters)
    jax.tree.map(np.testing.assert_array_equal, again, tree)
  sizes = [x.size for x in jax.tree.leaves(lora_lib.adapters(params))]
  assert sum(sizes) == lora_lib.num_params(lora_world.MODEL)


# -- what is trained ----------------------------------------------------------


def state_of(base_dtype):
  settings = train_state.ModelSettings(
    model=lora_world.MODEL,
    optimizer=sections.OptimizerSection(learning_rate=1e-2),
    is_trainable=lora_lib.is_adapter,
    frozen_dtype=base_dtype,
  )
  optimizer = train_step.make_optimizers({"policy": settings})["policy"]
  return train_state.start(settings, optimizer, lora_world.params())


@pytest.mark.parametrize("base_dtype", sections.LORA_BASE_DTYPES)
def test_only_adapters_have_moments_and_the_base_is_held_as_asked(base_dtype):
  state = state_of(base_dtype)
  trained = jax.tree.leaves(state.trainable)
  assert {x.dtype for x in trained} == {jnp.dtype("float32")}
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert sorted(x.shape for x in moments) == sorted(
    x.shape for x in trained * 2
  )
  held = state.frozen["layers"]["up"]
  wanted = "int8" if base_dtype == "int8" else base_dtype
  assert getattr(held, "qvalue", held).dtype == wanted
  assert state.frozen["embedding"].dtype != "int8"


@functools.cache
def gradient_fn():
  settings = train_step.ForwardSettings(
    model=lora_world.MODEL,
    compute_dtype="float32",
    remat=sections.Remat.FULL,
    attention="xla",
    temperature=1.0,
    vocab_chunk=40,
  )

  def loss(trainable, frozen, batch):
    params = train_state.merged(trainable, frozen)
    logprobs, _ = train_step.token_logprobs(settings, params, batch)
    return jnp.where(batch.segment_ids > 0, logprobs, 0.0).sum()

  return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow
@pytest.mark.nightly
def test_gradients_flow_through_an_int8_base():
  """The gradient of the adapters is that over the base that int8 stands for."""
  batch = tiny.packed([tiny.prompt(20), tiny.prompt(9)])
  state = state_of("int8")
  loss, found = gradient_fn()(state.trainable, state.frozen, batch)
  exact = quantization.dequantize(state.frozen)
  exact = jax.tree.map(lambda x: x.astype("float32"), exact)
  expected_loss, expected = gradient_fn()(state.trainable, exact, batch)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert np.abs(y).max() > 0
    np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


def test_training_with_adapters_counts_fewer_operations():
  lengths = np.array([10])
  whole = matmul_rate.model_flops(tiny.MODEL, lengths)
  some = matmul_rate.model_flops(lora_world.MODEL, lengths)
  per_token = 2 * tiny.MODEL.num_params
  per_token -= 6 * lora_lib.num_params(lora_world.MODEL)
  assert whole - some == 10 * per_token


# -- the engine ---------------------------------------------------------------


@pytest.mark.slow
def test_the_engine_gives_the_trainers_logprobs():
  params, model = lora_world.params(), lora_world.MODEL
  engine = tiny.engine(model)
  weights = transformer.unstack(params, model.num_layers)
  row = tiny.Row(prompt=tiny.prompt(9))
  written, _ = tiny.write(engine, engine.load_params(weights, 0), [row])
  tokens = np.append(row.prompt, written[0].tokens).astype(np.int32)
  (expected,) = tiny.trainer_logprobs(params, [tokens], model=model)
  np.testing.assert_allclose(written[0].logprobs, expected[9:], atol=1e-5)
  # An engine that holds the base takes the adapters alone.
  fresh = type(engine)(
    model, tiny.SIZES, mesh=engine.mesh, seed=7, end_tokens=tiny.END_TOKENS
  )
  fresh.hold_base(lora_lib.base(weights))
  joined = fresh.load_params(lora_lib.adapters(weights), 0)
  jax.tree.map(np.testing.assert_array_equal, joined.weights, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
  "sizes",
  [
    pytest.param({}, marks=pytest.mark.nightly),
    pytest.param(
      {"num_pages": 24, "page_tokens": 4}, marks=pytest.mark.nightly
    ),
    {"prefill_chunk": 8},
  ],
  ids=["slots", "pages", "chunks"],
)
def test_adapters_share_a_batch_and_never_a_prefix(sizes):
  """Equal prompts of three adapters, beside each other, are three answers."""
  tokens = tiny.prompt(12)
  scheduler = lora_world.scheduler(**sizes)
  sequences = [
    lora_world.sequence(tokens, number, member)
    for member in range(2)
    for number in (1, 0, 2)
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  tiny.finish(scheduler)
  answers = set()
  for sequence in sequences:
    expected = lora_world.alone(tokens, sequence.adapter)
    np.testing.assert_array_equal(sequence.tokens, expected.tokens)
    np.testing.assert_allclose(
      sequence.behavior_logprobs, expected.behavior_logprobs, atol=1e-4
    )
    answers.add(sequence.tokens.tobytes())
  assert len(answers) == 3


@pytest.mark.slow
@pytest.mark.nightly
def test_an_adapter_survives_new_weights_and_preemption():
  """Caches are rebuilt with the adapter of their sequence."""
  scheduler = lora_world.scheduler(num_pages=8, page_tokens=4)
  tokens = tiny.prompt(12)
  sequences = [lora_world.sequence(tokens, n) for n in (2, 1, 0)]
  for sequence in sequences:
    scheduler.submit(sequence)
  scheduler.step()
  scheduler.adopt(scheduler._params, 1)
  tiny.finish(scheduler)
  assert scheduler.stats.recompute_tokens
  for sequence in sequences:
    expected = lora_world.alone(tokens, sequence.adapter)
    np.testing.assert_array_equal(sequence.tokens, expected.tokens)


def test_a_stack_fills_up_smaller_ranks_and_missing_modules():
  model, leaves = lora_world.stack()
  assert model.lora == configs.Lora(
    rank=3, alpha=3.0, modules=sections.LORA_MODULES, num_adapters=3
  )
  layers = leaves["layers"]
  assert layers["up_lora_a"].shape == (2, 3, 32, 3)
  for name, leaf in layers.items():
    assert not leaf[:, 0].any(), name  # the base
    assert leaf[:, 1].any(), name
    has_module = name.partition("_")[0] in lora_world.OTHER.modules
    assert leaf[:, 2].any() == has_module, name
    if name.endswith("_lora_a"):
      assert not leaf[:, 2, ..., 2:].any(), name


def test_adapters_may_be_beside_every_projection_but_those_of_the_delta_rule():
  names = [x for x in configs.PROJECTIONS if not x.startswith("delta_")]
  assert sections.LORA_MODULES == tuple(names)
