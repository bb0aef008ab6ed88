"""A feed-forward of experts, against loops over tokens and groups."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.devices import grouped
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import configs
from jaxrl_async.models import experts as experts_lib
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.planning import matmul_rate
from jaxrl_async.training import train_step

MODEL = configs.MODELS["tiny-experts"]
# An empty group, a single row, and one of several blocks.
SIZES = np.array([13, 0, 300, 1, 16], np.int32)


def random(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_grouped_product_multiplies_each_row_by_its_matrix():
  x, matrices = random(330, 12), random(5, 12, 9, seed=1)
  weights = random(330, 9, seed=2)
  groups = np.repeat(np.arange(5), SIZES)

  def found(x, matrices):
    out = grouped.product(x, matrices, jnp.asarray(SIZES))
    return (out * weights).sum(), out

  def wanted(x, matrices):
    out = jnp.einsum("mk,mkn->mn", x, matrices[groups])
    return (out * weights).sum(), out

  results = [
    jax.jit(jax.value_and_grad(fn, (0, 1), has_aux=True))(x, matrices)
    for fn in (found, wanted)
  ]
  jax.tree.map(
    lambda ours, theirs: np.testing.assert_allclose(
      ours, theirs, rtol=1e-4, atol=1e-4
    ),
    *results,
  )


def layer_of(seed=0, model=MODEL):
  layers = tiny.params(seed, model)["layers"]
  names = "router", *configs.EXPERT_KERNELS
  return {name: np.asarray(layers[name][0]) for name in names}


def layer_as_jax():
  return {name: jnp.asarray(x) for name, x in layer_of().items()}


@functools.partial(jax.jit, static_argnums=0)
def _applied(experts, kernels, h):
  return experts_lib.applied(experts, kernels, h, jax.nn.silu, "product")


def applied(h, experts=MODEL.experts):
  return np.asarray(_applied(experts, layer_as_jax(), h))


@pytest.mark.parametrize("has_normed_weights", [False, True])
def test_a_token_gets_the_weighted_sum_of_its_experts(has_normed_weights):
  experts = dataclasses.replace(
    MODEL.experts, has_normed_weights=has_normed_weights
  )
  h, kernels = random(2, 7, MODEL.model_dim), layer_of()
  found = applied(h, experts)
  used = set()
  for index in np.ndindex(2, 7):
    scores = np.float64(h[index]) @ kernels["router"]
    chances = np.exp(scores) / np.exp(scores).sum()
    chosen = np.argsort(-chances)[:2]
    used |= {*chosen.tolist()}
    weights = chances[chosen]
    if has_normed_weights:
      weights = weights / weights.sum()
    wanted = np.zeros(MODEL.model_dim)
    for expert, weight in zip(chosen, weights, strict=True):
      gate = h[index] @ kernels["expert_gate"][expert]
      up = h[index] @ kernels["expert_up"][expert]
      inner = gate / (1 + np.exp(-gate)) * up
      wanted += weight * (inner @ kernels["expert_down"][expert])
    np.testing.assert_allclose(found[index], wanted, rtol=1e-4, atol=1e-5)
  assert len(used) > 2


def test_other_tokens_change_no_bit_of_a_token():
  """Not even if all of them choose the same experts."""
  h = random(1, 24, MODEL.model_dim)
  crowd = h.copy()
  crowd[0, 5:] = h[0, 0] * np.linspace(0.9, 1.1, 19)[:, None]
  before, after = applied(h), applied(crowd)
  np.testing.assert_array_equal(before[0, :5], after[0, :5])
  assert np.abs(before[0, 5:] - after[0, 5:]).max() > 1e-2


def test_padding_has_no_gradient():
  h = random(1, 8, MODEL.model_dim)
  weights = random(1, 8, MODEL.model_dim, seed=1)
  weights[0, 5:] = 0

  @jax.jit
  @jax.grad
  def gradient(kernels, h):
    out = experts_lib.applied(MODEL.experts, kernels, h, jax.nn.silu, "product")
    return (out * weights).sum()

  other = h.copy()
  other[0, 5:] = 3 * random(3, MODEL.model_dim, seed=2)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
    gradient(layer_as_jax(), h),
    gradient(layer_as_jax(), other),
  )


@pytest.mark.parametrize(
  "rules",
  [
    {},
    {"experts": ("fsdp", "tensor"), "mlp": (), "embed": ("context",)},
    {"experts": ("context",), "embed": ("fsdp",)},
  ],
  ids=str,
)
def test_experts_on_a_mesh_are_those_of_one_device(rules):
  """Parts of each expert on every device, whole experts on one, or both."""
  model = dataclasses.replace(
    MODEL, experts=configs.Experts(num_experts=4, num_per_token=2)
  )
  h = random(4, 6, MODEL.model_dim)
  weights = random(4, 6, MODEL.model_dim, seed=1)
  shape = mesh_lib.MeshShape(fsdp=2, context=2, tensor=2)
  layout = mesh_lib.Layout(
    mesh=mesh_lib.make_mesh(jax.devices()[:8], shape),
    rules=dataclasses.replace(mesh_lib.TRAIN_RULES, **rules),
  )

  def results(placement):
    def loss(kernels, h):
      out = experts_lib.applied(
        model.experts, kernels, h, jax.nn.silu, "product", placement
      )
      return (out * weights).sum(), out

    of = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    kernels = jax.tree.map(jnp.asarray, layer_of(model=model))
    if placement is not None:
      axes = transformer.logical_axes(model, is_stacked=False)["layers"][0]
      own = {name: axes[name] for name in kernels}
      kernels = jax.device_put(
        kernels, mesh_lib.shardings(layout.mesh, layout.rules, own)
      )
    return jax.tree.map(np.asarray, of(kernels, jnp.asarray(h)))

  placement = experts_lib.Placement(layout, ("batch", "tokens"))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
    results(placement),
    results(None),
  )


def test_the_named_model_has_30b_parameters_of_which_a_token_uses_3b():
  model = configs.MODELS["qwen3-30b-a3b"]
  assert model.num_params == 30_532_122_624
  assert model.num_active_params == 3_353_032_704
  leaves = jax.tree.leaves(hf_weights._abstract_params(MODEL))
  assert sum(x.size for x in leaves) == MODEL.num_params


def test_flops_are_those_of_the_experts_that_a_token_uses():
  lengths = np.array([5, 9])
  dense = dataclasses.replace(MODEL, experts=None, mlp_dim=2 * MODEL.mlp_dim)
  router = MODEL.num_layers * MODEL.model_dim * MODEL.experts.num_experts
  assert matmul_rate.model_flops(MODEL, lengths) == (
    matmul_rate.model_flops(dense, lengths) + 6 * router * lengths.sum()
  )


def described(**more):
  return hf_config.config_json(MODEL) | more


def test_a_config_of_either_version_of_transformers_is_read():
  settings = described(intermediate_size=77)
  assert hf_config._model_config(settings) == MODEL
  settings["num_local_experts"] = settings.pop("num_experts")
  assert hf_config._model_config(settings) == MODEL


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("decoder_sparse_step", 2),
    ("mlp_only_layers", [1]),
    ("use_sliding_window", True),
    ("num_experts_per_tok", 6),
    ("norm_topk_prob", "yes"),
  ],
)
def test_what_is_not_implemented_is_refused_by_name(name, value):
  name_here = "num_per_token" if name == "num_experts_per_tok" else name
  with pytest.raises(ValueError, match=name_here):
    hf_config._model_config(described(**{name: value}))


def test_adapters_of_experts_are_refused_by_name():
  lora = configs.Lora(rank=2, alpha=2.0, modules=("query", "up"))
  with pytest.raises(ValueError, match="lora.modules has up"):
    dataclasses.replace(MODEL, lora=lora)
  attention = dataclasses.replace(lora, modules=("query", "output"))
  model = dataclasses.replace(MODEL, lora=attention)
  axes = transformer.logical_axes(model, is_stacked=True)["layers"]
  assert "query_lora_a" in axes


def test_each_expert_is_a_matrix_of_its_own_for_muon():
  shapes = hf_weights._abstract_params(MODEL)
  found = train_step.muon_dimensions(shapes)["layers"]
  for name in configs.EXPERT_KERNELS:
    assert tuple(found[name]) == ((2,), (3,))
  assert found["router"] is None
  assert train_step.decayed(shapes)["layers"]["router"]
