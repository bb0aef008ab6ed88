"""The decoder: counts, layouts, causality, packing, and the reference."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.models import configs
from jaxrl_async.models import transformer

UNTIED = dataclasses.replace(
  tiny.MODEL, has_tied_head=False, has_qkv_bias=True, has_qk_norm=False
)
EVERYTHING = dataclasses.replace(
  UNTIED, has_qk_norm=True, num_heads=3, num_kv_heads=1, num_layers=3
)


@pytest.mark.parametrize(
  "model",
  [*configs.MODELS.values(), UNTIED, EVERYTHING],
  ids=[*configs.MODELS, "untied", "everything"],
)
def test_the_formula_counts_the_parameters(model):
  shapes = jax.eval_shape(
    functools.partial(transformer.init_params, model), jax.random.key(0)
  )
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  assert model.num_params == count


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
  "model", [tiny.MODEL, pytest.param(EVERYTHING, marks=pytest.mark.slow)]
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


def test_recomputed_activations_change_no_gradient():
  batch = tiny.packed([tiny.prompt(9)], 16)

  def loss(params, remat):
    model = transformer.bind(tiny.MODEL, params, is_stacked=True, remat=remat)

    def attend(layer, query, key, value):
      return query + value.repeat(2, axis=2), None

    hidden, _ = model.hidden(
      jnp.asarray(batch.tokens),
      jnp.asarray(batch.positions),
      attend,
      jnp.dtype("float32"),
    )
    return jnp.square(hidden[..., 0]).sum()

  grad = jax.jit(jax.grad(loss), static_argnums=1)
  kept, recomputed = (grad(tiny.params(), remat) for remat in (False, True))
  for a, b in zip(*map(jax.tree.leaves, (kept, recomputed)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


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


# -- the reference implementation ------------------------------------------

SIZES = {
  "vocab_size": 61,
  "hidden_size": 48,
  "intermediate_size": 40,
  "num_hidden_layers": 2,
  "max_position_embeddings": 64,
  "rms_norm_eps": 1e-5,
  "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
  "attn_implementation": "eager",
}


def from_torch(model, state, name):
  """One of our unstacked blocks, or the top, from the reference's names."""
  c = model
  d, n, k, h = c.model_dim, c.num_heads, c.num_kv_heads, c.head_dim

  def get(suffix):
    return state[f"{name}{suffix}"].double().numpy().astype(np.float32)

  block = {
    "attention_norm": get("input_layernorm.weight"),
    "query": get("self_attn.q_proj.weight").T.reshape(d, n, h),
    "key": get("self_attn.k_proj.weight").T.reshape(d, k, h),
    "value": get("self_attn.v_proj.weight").T.reshape(d, k, h),
    "output": get("self_attn.o_proj.weight").T.reshape(n, h, d),
    "mlp_norm": get("post_attention_layernorm.weight"),
    "gate": get("mlp.gate_proj.weight").T,
    "up": get("mlp.up_proj.weight").T,
    "down": get("mlp.down_proj.weight").T,
  }
  if c.has_qkv_bias:
    block["query_bias"] = get("self_attn.q_proj.bias").reshape(n, h)
    block["key_bias"] = get("self_attn.k_proj.bias").reshape(k, h)
    block["value_bias"] = get("self_attn.v_proj.bias").reshape(k, h)
  if c.has_qk_norm:
    block["query_norm"] = get("self_attn.q_norm.weight")
    block["key_norm"] = get("self_attn.k_norm.weight")
  return block


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("has_tied_head", [True, False])
@pytest.mark.parametrize("heads", [(3, 3), (3, 1), (6, 3)])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_logits_are_those_of_the_reference(family, heads, has_tied_head):
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  num_heads, num_kv_heads = heads
  sizes = SIZES | {
    "num_attention_heads": num_heads,
    "num_key_value_heads": num_kv_heads,
    "tie_word_embeddings": has_tied_head,
  }
  head_dim = SIZES["hidden_size"] // num_heads
  if family == "Qwen3":
    head_dim = 10  # not model_dim / num_heads
    sizes["head_dim"] = head_dim
  torch.manual_seed(0)
  reference = getattr(transformers, f"{family}ForCausalLM")(
    getattr(transformers, f"{family}Config")(**sizes)
  )
  with torch.no_grad():
    for parameter in reference.parameters():
      parameter += 0.1 * torch.randn_like(parameter)
  model = configs.ModelConfig(
    vocab_size=61,
    model_dim=48,
    num_layers=2,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=40,
    rope_theta=500.0,
    norm_eps=1e-5,
    has_qkv_bias=family == "Qwen2",
    has_qk_norm=family == "Qwen3",
    has_tied_head=has_tied_head,
  )
  state = reference.state_dict()
  params = {
    "embedding": state["model.embed_tokens.weight"].numpy(),
    "layers": [
      from_torch(model, state, f"model.layers.{i}.") for i in range(2)
    ],
    "final_norm": state["model.norm.weight"].numpy(),
  }
  if not has_tied_head:
    params["output_head"] = state["lm_head.weight"].numpy().T
  assert sum(x.size for x in jax.tree.leaves(params)) == model.num_params
  params = jax.tree.map(jnp.asarray, params)
  tokens = np.random.default_rng(0).integers(0, 61, 17, np.int32)
  hidden = tiny.hidden_states(
    model, params, tiny.packed([tokens], 17), is_stacked=False
  )
  bound = transformer.bind(model, params, is_stacked=False)
  logits = np.asarray(hidden[0] @ bound.head())
  with torch.no_grad():
    expected = reference(torch.tensor(tokens[None].astype(np.int64))).logits
  assert np.std(logits) > 0.1
  np.testing.assert_allclose(logits, expected[0].numpy(), atol=1e-4)
