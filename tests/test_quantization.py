"""Quantised rollout weights: what is, how well, how it travels, what it costs.

`exact` below is the trainer's forward under the dequantised weights: what the
engine computes must be that, whatever the quantisation itself costs.
"""

import dataclasses
import functools
import json

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import reward_scorers
import tiny

from configs import tiny as tiny_config
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import dry_run
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.evaluation import evaluated_sets
from jaxrl_async.models import configs
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.run import train as train_lib
from jaxrl_async.training import publishing
from jaxrl_async.weights import weight_transfer

QUANTIZED = [sections.WeightFormat.INT8, sections.WeightFormat.FP8]
# With everything a model may have, and of a vocabulary that halves.
UNTIED = dataclasses.replace(
  tiny.MODEL, has_tied_head=False, has_qkv_bias=True, vocab_size=98
)
MATRICES = {"query", "key", "value", "output", "gate", "up", "down"}


@functools.cache
def full(model=UNTIED):
  """Stacked float32 parameters, from numpy: JAX would compile half a minute."""
  rng = np.random.default_rng(0)

  def noise(path, leaf):
    centre = "norm" in jax.tree_util.keystr(path)
    return rng.normal(centre, 0.2, leaf.shape).astype(np.float32)

  shapes = jax.eval_shape(
    lambda key: transformer.init_params(model, key), jax.random.key(0)
  )
  return jax.tree_util.tree_map_with_path(noise, shapes)


@functools.cache
def published(weights, model=UNTIED, dtype="float32"):
  """What the trainer publishes of `full`."""
  publish = functools.partial(
    publishing.published_params,
    num_layers=model.num_layers,
    dtype=dtype,
    weights=weights,
  )
  return jax.jit(publish)(full(model))


@functools.cache
def engine(weights, *, model=UNTIED, dtype="float32", tensor=1):
  shape = mesh_lib.MeshShape(tensor=tensor)
  mesh = mesh_lib.make_mesh(jax.devices()[:tensor], shape)
  return engine_lib.Engine(
    model,
    tiny.SIZES,
    mesh=mesh,
    seed=7,
    end_tokens=tiny.END_TOKENS,
    dtype=dtype,
    weights=weights,
  )


@functools.cache
def exact(weights, model=UNTIED):
  """Stacked float32 parameters that the quantised ones stand for."""
  params = quantization.dequantize(published(weights, model))
  layers = jax.tree.map(lambda *x: jnp.stack(x), *params["layers"])
  return {**params, "layers": layers}


def named(tree):
  """Leaves by the last two names of their path, layers merged."""
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = jax.tree_util.keystr(path[-2:], simple=True, separator=".")
    found.setdefault(name.removeprefix("1.").removeprefix("0."), []).append(
      leaf
    )
  return found


def num_bytes(tree):
  return sum(
    x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)
  )


# -- what is quantised, and how well ----------------------------------------


@pytest.mark.parametrize(
  ("weights", "dtype"),
  [
    (sections.WeightFormat.INT8, "int8"),
    (sections.WeightFormat.FP8, "float8_e4m3fn"),
  ],
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_matrices_are_quantised_and_nothing_else(weights, dtype, is_tied):
  model = tiny.MODEL if is_tied else UNTIED
  leaves = named(published(weights, model, "bfloat16"))
  matrices = MATRICES if is_tied else MATRICES | {"output_head"}
  values = {f"{name}.qvalue" for name in matrices}
  scales = {f"{name}.scale" for name in matrices}
  assert {x for x in leaves if leaves[x][0].dtype == dtype} == values
  assert {x for x in leaves if leaves[x][0].dtype == jnp.float32} == scales
  rest = leaves.keys() - values - scales
  assert rest >= {"embedding", "final_norm", "attention_norm", "query_norm"}
  assert is_tied or rest >= {"query_bias"}
  assert all(leaves[x][0].dtype == jnp.bfloat16 for x in rest)
  # The matrices are quantised as they are, not after a cast.
  jax.tree.map(
    np.testing.assert_array_equal,
    leaves["query.qvalue"],
    named(published(weights, model))["query.qvalue"],
  )
  heads, head_dim = model.num_heads, model.head_dim
  assert leaves["query.scale"][0].shape == (1, heads, head_dim)
  assert leaves["output.scale"][0].shape == (1, 1, model.model_dim)
  assert leaves["down.scale"][0].shape == (1, model.model_dim)


def test_int8_is_off_by_half_a_scale_of_its_channel_at_most():
  matrices = named(transformer.unstack(full(), UNTIED.num_layers))
  found = quantization.dequantize(published(sections.WeightFormat.INT8))
  scales = named(published(sections.WeightFormat.INT8))
  for name in (*MATRICES, "output_head"):
    for matrix, rounded, scale in zip(
      matrices[name],
      named(found)[name],
      scales[f"{name}.scale"],
      strict=True,
    ):
      error = np.abs(matrix - rounded) / scale
      assert error.max() <= 0.5001
      assert error.max() > 0.45  # not finer than a byte either
      contracted = tuple(i for i, x in enumerate(scale.shape) if x == 1)
      largest = np.abs(matrix).max(contracted, keepdims=True)
      np.testing.assert_allclose(scale, largest / 127.5, rtol=1e-6)


def test_fp8_is_off_by_a_sixteenth_of_each_weight_at_most():
  matrices = named(transformer.unstack(full(), UNTIED.num_layers))
  found = quantization.dequantize(published(sections.WeightFormat.FP8))
  scales = named(published(sections.WeightFormat.FP8))
  for name in (*MATRICES, "output_head"):
    for matrix, rounded, scale in zip(
      matrices[name],
      named(found)[name],
      scales[f"{name}.scale"],
      strict=True,
    ):
      # Three bits of mantissa; below 2^-6 of a scale steps are all the same.
      bound = np.maximum(np.abs(matrix) / 16, scale * 2**-10)
      error = np.abs(matrix - rounded)
      assert (error <= bound * 1.001).all()
      assert error.max() > 0


def test_a_channel_of_zeros_stays_one():
  params = {"up": jnp.zeros((8, 4)).at[:, 1].set(2.0)}
  found = quantization.quantize(params, sections.WeightFormat.INT8, "float32")
  np.testing.assert_allclose(
    quantization.dequantize(found)["up"], params["up"], rtol=0.005
  )


def test_matrices_shrink_to_a_quarter():
  model = dataclasses.replace(
    configs.MODELS["qwen2-1.5b"], num_layers=2, vocab_size=1024
  )
  params = jax.eval_shape(
    lambda key: transformer.init_params(model, key), jax.random.key(0)
  )

  def size(weights):
    publish = functools.partial(
      publishing.published_params,
      num_layers=model.num_layers,
      dtype="float32",
      weights=weights,
    )
    return num_bytes(jax.eval_shape(publish, params))

  float32 = size(sections.WeightFormat.FLOAT)
  embedding = 4 * model.vocab_size * model.model_dim
  for weights in QUANTIZED:
    ratio = (float32 - embedding) / (size(weights) - embedding)
    assert 3.95 < ratio < 4


def test_without_a_format_it_is_the_cast_and_nothing_else():
  for dtype in ("float32", "bfloat16"):
    found = published(sections.WeightFormat.FLOAT, dtype=dtype)
    expected = jax.tree.map(
      lambda x, dtype=dtype: x.astype(dtype),
      transformer.unstack(full(), UNTIED.num_layers),
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
  axes = transformer.logical_axes(UNTIED, is_stacked=False)
  assert quantization.logical_axes(axes, sections.WeightFormat.FLOAT) is axes


# -- the engine ---------------------------------------------------------------


def rows():
  return [
    tiny.Row(prompt=tiny.prompt(n), slot=slot, group=slot)
    for slot, n in enumerate((2, 5, 11))
  ]


@pytest.mark.slow
@pytest.mark.parametrize("weights", QUANTIZED)
def test_recorded_logprobs_are_those_of_the_dequantised_weights(weights):
  made = engine(weights)
  params = made.load_params(published(weights), 3)
  written, _ = tiny.write(made, params, rows())
  sequences = [
    np.concatenate([row.prompt, out.tokens])[:21]
    for row, out in zip(rows(), written, strict=True)
  ]
  expected = tiny.trainer_logprobs(exact(weights), sequences, model=UNTIED)
  others = tiny.trainer_logprobs(full(), sequences, model=UNTIED)
  off = 0
  for row, out, logprobs, other in zip(
    rows(), written, expected, others, strict=True
  ):
    n = len(row.prompt)
    assert len(logprobs) > n
    recorded = np.array(out.logprobs[: 21 - n])
    np.testing.assert_allclose(recorded, logprobs[n:], atol=1e-4)
    off = max(off, np.abs(recorded - other[n:]).max())
  assert off > 1e-3


def test_prefill_caches_what_the_dequantised_weights_compute():
  made = engine(sections.WeightFormat.INT8)
  params = made.load_params(published(sections.WeightFormat.INT8), 0)
  tokens = tiny.prompt(13)
  prefix = tiny.prefill(made, params, tokens)
  _, (keys, _) = tiny.hidden_states(
    UNTIED,
    exact(sections.WeightFormat.INT8),
    tiny.packed([tokens], 13),
    kept=True,
  )
  for layer, (k, _) in enumerate(prefix.cache):
    expected = np.transpose(keys[layer, 0], (1, 2, 0))
    np.testing.assert_allclose(k[0, :, :, :13], expected, atol=1e-5)


@pytest.mark.parametrize(
  "weights", [sections.WeightFormat.FLOAT, sections.WeightFormat.INT8]
)
def test_a_bfloat16_engine_rounds_once_a_product(weights):
  made = engine(weights, dtype="bfloat16")
  params = made.load_params(published(weights, dtype="bfloat16"), 0)
  query = params.weights["layers"][0]["query"]
  is_first = isinstance(query, quantization.ChannelsFirst)
  assert is_first == (weights is sections.WeightFormat.FLOAT)
  written, _ = tiny.write(made, params, rows())
  tokens = [
    np.concatenate([row.prompt, out.tokens])[:21]
    for row, out in zip(rows(), written, strict=True)
  ]
  expected = tiny.trainer_logprobs(exact(weights), tokens, model=UNTIED)
  for row, out, logprobs in zip(rows(), written, expected, strict=True):
    n = len(row.prompt)
    np.testing.assert_allclose(out.logprobs[: 21 - n], logprobs[n:], atol=0.2)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_product_is_the_same_with_channels_first(is_stacked):
  params = full()
  if not is_stacked:
    params = transformer.unstack(params, UNTIED.num_layers)
  found = jax.jit(quantization.channels_first)(params)
  layer, turned = params["layers"], found["layers"]
  if is_stacked:
    layer, turned = (jax.tree.map(lambda x: x[0], x) for x in (layer, turned))
  else:
    layer, turned = layer[0], turned[0]
  equations = {
    "query": "...d,dnh->...nh",
    "output": "...nh,nhd->...d",
    "down": "...f,fd->...d",
  }
  for name, equation in equations.items():
    num_in = quantization.NUM_CONTRACTED[name]
    x = np.random.default_rng(1).normal(size=(5, *layer[name].shape[:num_in]))
    x = jnp.asarray(x, jnp.float32)
    np.testing.assert_allclose(
      quantization.project(equation, x, turned[name]),
      jnp.einsum(equation, x, layer[name]),
      atol=1e-5,
    )
  np.testing.assert_array_equal(
    found["output_head"].matrix.T, params["output_head"]
  )


@pytest.mark.slow
@pytest.mark.nightly
def test_a_split_engine_writes_the_same_tokens():
  outcomes = []
  for tensor in (1, 2):
    made = engine(sections.WeightFormat.INT8, tensor=tensor)
    weights = published(sections.WeightFormat.INT8)
    params = made.load_params(weights, 0)
    query = params.weights["layers"][0]["query"]
    for leaf in (query.qvalue, query.scale):
      assert leaf.sharding.is_fully_replicated == (tensor == 1)
    output = params.weights["layers"][0]["output"]
    assert output.scale.sharding.is_fully_replicated
    written, _ = tiny.write(made, params, rows())
    outcomes.append(written)
  for one, other in zip(*outcomes, strict=True):
    assert one.tokens == other.tokens
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_the_decode_loop_carries_bytes_and_no_widened_copy():
  made = engine(sections.WeightFormat.INT8)
  params = made.load_params(published(sections.WeightFormat.INT8), 0)
  compiled = made._jitted.generate.lower(
    params,
    made.init_decode_state(),
    np.zeros((made.sizes.num_slots,), np.int32),
    np.zeros((made.sizes.num_slots, 0), np.int32),
    window=32,
    is_filtered=False,
  ).compile()
  loops = [x for x in compiled.as_text().splitlines() if " while(" in x]
  (carried,) = [x.partition("while(")[0] for x in loops if "s8[" in x]
  for leaf in jax.tree.leaves(params.weights):
    shape = ",".join(map(str, leaf.shape))
    if leaf.dtype == jnp.int8:
      assert f"s8[{shape}]" in carried
      assert f"f32[{shape}]" not in carried


# -- what it costs ------------------------------------------------------------


def test_mismatch_kl_against_the_full_weights_is_the_price():
  def price(weights):
    made = engine(weights)
    scheduler = scheduler_lib.Scheduler(made, busy=metrics_lib.BusyClock())
    scheduler.adopt(made.load_params(published(weights), 0), 0)
    for group in range(4):
      scheduler.submit(tiny.sequence(tiny.prompt(3), group=group, limit=20))
    trajectories = [x.trajectory() for x in tiny.finish(scheduler)]
    assert sum(t.loss_mask.sum() for t in trajectories) > 20

    def kl(params):
      def logprobs(trajectories):
        tokens = [t.tokens for t in trajectories]
        return tiny.trainer_logprobs(params, tokens, model=UNTIED)

      return evaluated_sets.mismatch_kl(trajectories, logprobs)

    return kl(full()), kl(exact(weights))

  int8, fp8 = map(price, QUANTIZED)
  assert 1e-6 < int8[0] < 1e-3
  assert int8[0] < fp8[0] < 5e-2
  assert abs(int8[1]) < 1e-8 and abs(fp8[1]) < 1e-8


# -- on the way ---------------------------------------------------------------


@pytest.mark.parametrize("weights", QUANTIZED)
@pytest.mark.parametrize(
  "kind", [sections.Channel.DIRECT, sections.Channel.ORBAX]
)
def test_quantised_weights_arrive_bit_for_bit(weights, kind, tmp_path):
  made = engine(weights, tensor=2)
  sent = published(weights)
  target = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    sent,
    made.params_sharding.weights,
  )
  channel = weight_transfer.make_channel(
    kind,
    directory=tmp_path / "transfer",
    target=target,
    coalesce=False,
  )
  channel.publish(sent, 4)
  assert channel.wait_for_version(3, 60.0)
  adopted = channel.adopt(3)
  assert adopted is not None
  received, version = adopted
  assert version == 4
  assert jax.tree.structure(received) == jax.tree.structure(sent)
  for a, b, wanted in zip(
    *map(jax.tree.leaves, (sent, received, target)), strict=True
  ):
    assert a.dtype == b.dtype and b.sharding == wanted.sharding
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  # And the engine takes them as they are.
  made.load_params(received, version)
  channel.close()


# -- configuration ------------------------------------------------------------


@pytest.mark.parametrize("weights", list(sections.WeightFormat))
def test_a_format_this_device_can_multiply_by_is_accepted(weights):
  config = tiny_config.get_config()
  config.rollout.weights = weights
  config_checks.validate(config, 2)
  checks.checked(config, jax.devices()[:2])


def test_a_format_this_device_gets_wrong_is_refused_in_one_line(monkeypatch):
  # A type of exponents alone: XLA on CPUs converts to it, to no use.
  monkeypatch.setitem(
    quantization._TYPES, sections.WeightFormat.FP8, "float8_e8m0fnu"
  )
  config = tiny_config.get_config()
  config.rollout.weights = sections.WeightFormat.FP8
  with pytest.raises(sections.ConfigError) as caught:
    checks.checked(config, jax.devices()[:2])
  assert str(caught.value).startswith("rollout.weights: cpu cannot use fp8")
  assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_dry_run_counts_quantised_weights():
  config = tiny_config.get_config()
  sizes = {}
  for weights in (sections.WeightFormat.FLOAT, sections.WeightFormat.INT8):
    config.rollout.weights = weights
    setup = checks.checked(config, jax.devices()[:2])
    text = dry_run.describe(setup)
    (line,) = [x for x in text.splitlines() if "slice   " in x and "cache" in x]
    sizes[weights] = line
  assert sizes[sections.WeightFormat.FLOAT] != sizes[sections.WeightFormat.INT8]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("weights", QUANTIZED)
def test_a_whole_run_ends_and_shows_its_price(weights, tmp_path):
  config = tiny_config.get_config()
  config.warm_start.num_steps = 0
  config.task.answer_prefix = ""
  config.rollout.weights = weights
  config_checks.validate(config, len(jax.devices()))
  summary = json.loads(
    train_lib.run(config, tmp_path, scorer=reward_scorers.length)
  )
  _, *steps = metrics_lib.by_step(tmp_path)
  assert len(steps) == config.train.num_steps
  assert all(0.5 < line["offpolicy/ess"] < 1 for line in steps)
  assert 1e-8 < summary["mismatch_kl_mean"] < 1e-2
