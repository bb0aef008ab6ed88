"""The gated delta rule: its equations, states, meshes, and what is refused.

test_families.py compares whole models with transformers.
"""

import dataclasses
import json

import jax
from jax import numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny

from jaxrl_async.assembly import device_checks
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.models import configs
from jaxrl_async.models import gated_delta
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import train_step

DELTA = configs.GatedDelta(
  num_key_heads=2, num_value_heads=4, key_dim=6, value_dim=10, conv_tokens=3
)
MODEL = dataclasses.replace(
  tiny.MODEL,
  vocab_size=96,
  is_delta=(True, False),
  delta=DELTA,
  has_gated_attention=True,
  has_centred_norms=True,
  has_tied_head=False,
)
LENGTH = 75  # more than a chunk


def random_layer(rows):
  rng = np.random.default_rng(0)
  d, before = DELTA, (rows, LENGTH)
  keys, values = (d.num_key_heads, d.key_dim), (d.num_value_heads, d.value_dim)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  inputs = gated_delta.Inputs(
    query=normal(*before, *keys),
    key=normal(*before, *keys),
    value=normal(*before, *values),
    log_decay=-jnp.abs(normal(*before, d.num_value_heads)),
    rate=jax.nn.sigmoid(normal(*before, d.num_value_heads)),
  )
  filters = gated_delta.Filters(
    *(normal(*heads, d.conv_tokens) for heads in (keys, keys, values))
  )
  return inputs, filters


def token_by_token(inputs, filters, starts):
  """The equations of the module in float64, a token after the other."""
  *raw, log_decay, rate = (np.asarray(x, np.float64) for x in inputs)
  filters = [np.asarray(x, np.float64) for x in filters]
  outputs = np.zeros(raw[2].shape)
  width, each = DELTA.conv_tokens, DELTA.num_value_heads // DELTA.num_key_heads
  memory = None
  for row, t in np.ndindex(*starts.shape):
    if starts[row, t] == t:
      memory = np.zeros((4, DELTA.key_dim, DELTA.value_dim))
    convolved = []
    for x, factors in zip(raw, filters, strict=True):
      total = sum(
        factors[..., width - 1 - back] * x[row, t - back]
        for back in range(width)
        if t - back >= starts[row, t]
      )
      convolved.append(total / (1 + np.exp(-total)))
    query, key, value = convolved
    query, key = (
      x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (query, key)
    )
    for head in range(DELTA.num_value_heads):
      k, q = key[head // each], query[head // each] / np.sqrt(DELTA.key_dim)
      memory[head] *= np.exp(log_decay[row, t, head])
      change = value[head] - memory[head].T @ k
      memory[head] += rate[row, t, head] * np.outer(k, change)
      outputs[row, t, head] = memory[head].T @ q
  return outputs


def ages_of(starts):
  return jnp.asarray(np.arange(LENGTH)[None] - starts, jnp.int32)


def test_rows_in_chunks_are_the_recurrence_in_each_segment():
  inputs, filters = random_layer(2)
  # Segments of a token, within a chunk, across chunks, and from a chunk's end.
  starts = np.zeros((2, LENGTH), int)
  for row, start in ((0, 20), (0, 21), (0, 66), (1, 64)):
    starts[row, start:] = start
  found, _ = jax.jit(
    lambda *x: gated_delta.over_rows(*x[:2], jax.nn.silu, x[2])
  )(inputs, filters, ages_of(starts))
  expected = token_by_token(inputs, filters, starts)
  assert np.abs(expected).max() > 0.5
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_gradients_do_not_cross_segments_and_are_finite():
  inputs, filters = random_layer(1)
  # Decays that leave nothing, even within a chunk.
  inputs = inputs._replace(log_decay=inputs.log_decay * 50)
  starts = np.zeros((1, LENGTH), int)
  starts[:, 30:] = 30

  @jax.jit
  @jax.grad
  def gradients(inputs):
    found, _ = gated_delta.over_rows(
      inputs, filters, jax.nn.silu, ages_of(starts)
    )
    return (found[:, 30:40] ** 2).sum()

  for gradient in gradients(inputs):
    assert np.isfinite(gradient).all()
    largest = np.abs(gradient[:, 30:40]).max()
    # Sums of decays within a chunk are subtracted from one another.
    assert 1e5 * np.abs(gradient[:, :30]).max() < largest
    assert not gradient[:, 40:].any()


def test_prefill_in_parts_and_steps_are_the_recurrence():
  inputs, filters = random_layer(2)
  expected = token_by_token(inputs, filters, np.zeros((2, LENGTH), int))
  lengths = np.array([30, 41])  # the rest is padding
  state = gated_delta.empty(DELTA, 2, jnp.dtype("float32"))

  @jax.jit
  def extend(inputs, ages, state, num_kept):
    return gated_delta.over_rows(
      inputs, filters, jax.nn.silu, ages, state, num_kept
    )

  for start in range(0, LENGTH, 25):
    here = slice(start, start + 25)
    num_kept = np.clip(lengths - start, 0, 25)
    found, state = extend(
      jax.tree.map(lambda x, here=here: x[:, here], inputs),
      ages_of(np.zeros((2, LENGTH), int))[:, here],
      state,
      jnp.asarray(num_kept, jnp.int32),
    )
    for row, n in enumerate(num_kept):
      np.testing.assert_allclose(
        found[row, :n], expected[row, start : start + n], atol=1e-5
      )
  for t in range(4):
    one = jax.tree.map(lambda x, t=t: x[np.arange(2), lengths + t], inputs)
    found, state = gated_delta.step(one, filters, jax.nn.silu, state)
    np.testing.assert_allclose(
      found, expected[np.arange(2), lengths + t], atol=1e-5
    )


# -- the engine ----------------------------------------------------------------


def load(engine, seed=0):
  weights = transformer.unstack(
    tiny.params(seed, MODEL), MODEL.num_layers, MODEL
  )
  return engine.load_params(weights, seed)


def written(kv_on_adopt=sections.KvOnAdopt.RECOMPUTE, shape=None, **sizes):
  """Sequences, more than there are slots, whose weights change on the way."""
  shape = shape or mesh_lib.ONE
  engine = engine_lib.Engine(
    MODEL,
    dataclasses.replace(tiny.SIZES, **sizes),
    mesh=mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape),
    seed=7,
    end_tokens=tiny.END_TOKENS,
  )
  scheduler = scheduler_lib.Scheduler(
    engine, kv_on_adopt=kv_on_adopt, busy=metrics_lib.BusyClock()
  )
  scheduler.adopt(load(engine), 0)
  sequences = [
    tiny.sequence(tiny.prompt(n), group=n // 2, member=n % 2, limit=32)
    for n in (3, 4, 9, 10, 17, 18, 21)
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  scheduler.step()
  scheduler.step()
  scheduler.adopt(load(engine, seed=1), 1)
  tiny.finish(scheduler)
  return [sequence.trajectory() for sequence in sequences]


CHUNKS_AND_PAGES = {
  "num_pages": 12,
  "page_tokens": 8,
  "prefill_chunk": 8,
}


@pytest.mark.parametrize(
  "sizes", [{}, CHUNKS_AND_PAGES], ids=["slots", "pages"]
)
def test_behavior_logprobs_are_the_trainers_after_states_are_recomputed(sizes):
  for trajectory in written(**sizes):
    versions = trajectory.policy_versions
    for version in (0, 1):
      (logprobs,) = tiny.trainer_logprobs(
        tiny.params(version, MODEL), [trajectory.tokens], model=MODEL
      )
      drawn = trajectory.loss_mask & (versions == version)
      np.testing.assert_allclose(
        trajectory.behavior_logprobs[drawn], logprobs[drawn], atol=1e-4
      )


def test_states_that_are_kept_are_of_older_weights():
  kept = written(sections.KvOnAdopt.KEEP)
  off = []
  for trajectory in kept:
    drawn = trajectory.loss_mask & (trajectory.policy_versions == 1)
    (logprobs,) = tiny.trainer_logprobs(
      tiny.params(1, MODEL), [trajectory.tokens], model=MODEL
    )
    off.append(np.abs(trajectory.behavior_logprobs - logprobs)[drawn])
  assert np.concatenate(off).max() > 1e-2


@pytest.mark.slow
def test_an_engine_on_four_devices_writes_what_one_writes():
  shape = mesh_lib.MeshShape(data=2, tensor=2)
  sizes = {"prefill_chunk": 8, "prefill_rows": 4}
  for ours, theirs in zip(
    written(shape=shape, **sizes), written(**sizes), strict=True
  ):
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(
      ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-4
    )


def test_kept_pages_are_refused_by_name():
  sizes = CHUNKS_AND_PAGES | {"kept_tokens": 32}
  with pytest.raises(sections.ConfigError, match="rollout.kept_tokens"):
    tiny.engine(MODEL, **sizes)


# -- meshes and planning -------------------------------------------------------


def test_gradients_on_eight_devices_are_those_on_one():
  shape = mesh_lib.MeshShape(data=2, fsdp=2, tensor=2)
  sequences = [tiny.prompt(20) % 96, tiny.prompt(30) % 96]
  rows = [tiny.packed(sequences), tiny.packed(sequences[::-1])] * 2
  batch = jax.tree.map(lambda *x: np.concatenate(x), *rows)
  found = {}
  for name, own in (("one", mesh_lib.ONE), ("eight", shape)):
    mesh = mesh_lib.make_mesh(jax.devices()[: own.num_devices], own)
    rules = mesh_lib.TRAIN_RULES
    axes = transformer.logical_axes(MODEL, is_stacked=True)
    shardings = mesh_lib.shardings(mesh, rules, axes)
    params = jax.device_put(tiny.params(0, MODEL), shardings)
    settings = train_step.ForwardSettings(
      model=MODEL,
      compute_dtype="float32",
      remat=sections.Remat.ATTENTION,
      attention="xla",
      temperature=1.0,
      vocab_chunk=48,
      layout=mesh_lib.Layout(mesh=mesh, rules=rules),
    )

    def loss(params, batch, settings=settings):
      logprobs, _ = train_step.token_logprobs(settings, params, batch)
      return jnp.where(batch.loss_mask, logprobs, 0.0).sum()

    found[name] = jax.jit(jax.grad(loss), out_shardings=shardings)(
      params,
      jax.device_put(batch, mesh_lib.shardings(mesh, rules, ("batch", None))),
    )
  split = found["eight"]["layers"]["delta_query"].sharding
  assert len(split.device_set) == 8 and not split.is_fully_replicated
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      a, b, atol=1e-4 * max(1.0, float(np.abs(b).max()))
    ),
    found["eight"],
    found["one"],
  )


@pytest.mark.parametrize("is_stacked", [True, False])
def test_every_parameter_has_an_axis_for_each_of_its_sizes(is_stacked):
  axes = transformer.logical_axes(MODEL, is_stacked=is_stacked)
  params = tiny.params(0, MODEL)
  if not is_stacked:
    params = transformer.unstack(params, MODEL.num_layers, MODEL)
  names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
  assert [len(n) for n in names] == [x.ndim for x in jax.tree.leaves(params)]


def test_heads_that_a_mesh_does_not_divide_are_refused_by_name():
  with pytest.raises(
    sections.ConfigError, match="key heads of the gated delta"
  ):
    device_checks._check_divided(
      "train",
      mesh_lib.MeshShape(tensor=4),
      mesh_lib.TRAIN_RULES,
      "model",
      dataclasses.replace(MODEL, num_kv_heads=4),
      True,
    )


def test_the_memory_of_a_state_is_what_the_engine_holds():
  engine = tiny.engine(MODEL)
  state = engine.init_decode_state()
  layer = state.cache[0]
  assert isinstance(layer, gated_delta.State)
  held = sum(x.nbytes for x in layer)
  slots = engine.sizes.num_slots
  assert MODEL.state_bytes(itemsize=4) * slots == held
  rest = sum(x.nbytes for x in jax.tree.leaves(state.cache[1]))
  tokens = engine.sizes.cache_tokens
  assert MODEL.slot_bytes(tokens=tokens, itemsize=4) * slots == rest


# -- files ---------------------------------------------------------------------

SETTINGS = {
  "vocab_size": 64,
  "hidden_size": 24,
  "intermediate_size": 40,
  "num_hidden_layers": 4,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "head_dim": 16,
  "linear_num_key_heads": 2,
  "linear_num_value_heads": 4,
  "linear_key_head_dim": 6,
  "linear_value_head_dim": 10,
}


def test_the_text_of_a_model_with_images_is_read_and_the_rest_left_out(
  tmp_path,
):
  text = {**SETTINGS, "model_type": "qwen3_5_text"}
  text["rope_parameters"] = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
  }
  model = hf_config._model_config(text)
  assert model.is_delta == (True, True, True, False)
  assert model.rotary_dim == 4
  params = tiny.params(0, model)
  hf_weights.save(tmp_path / "text", model, params)
  tensors = safetensors_numpy.load_file(tmp_path / "text/model.safetensors")
  renamed = {
    name.replace("model.", "model.language_model.", 1): x
    for name, x in tensors.items()
  }
  extra = {
    "mtp.layers.0.mlp.up_proj.weight": np.zeros((3, 3), np.float32),
    "model.visual.blocks.0.attn.proj.weight": np.zeros((3, 3), np.float32),
  }
  whole = tmp_path / "whole"
  whole.mkdir()
  safetensors_numpy.save_file(renamed | extra, whole / "model.safetensors")
  described = {
    "model_type": "qwen3_5",
    "text_config": text,
    "vision_config": {},
    "tie_word_embeddings": False,
  }
  (whole / "config.json").write_text(json.dumps(described))
  found, read = hf_weights.load(whole)
  assert found == model
  jax.tree.map(np.testing.assert_array_equal, read, jax.device_get(params))
  mesh = mesh_lib.make_mesh(
    jax.devices()[:4], mesh_lib.MeshShape(fsdp=2, tensor=2)
  )
  shardings = mesh_lib.shardings(
    mesh,
    mesh_lib.TRAIN_RULES,
    transformer.logical_axes(model, is_stacked=True),
  )
  _, placed = hf_weights.load(whole, shardings=shardings)
  jax.tree.map(np.testing.assert_array_equal, placed, read)
  safetensors_numpy.save_file(
    renamed | {"model.audio.weight": np.zeros(3, np.float32)},
    whole / "model.safetensors",
  )
  with pytest.raises(ValueError, match="model.audio.weight is not a tensor"):
    hf_weights.load(whole)


@pytest.mark.parametrize(
  ("change", "named"),
  [
    ({"model_type": "qwen3_5_moe_text"}, "model_type"),
    ({"model_type": "qwen3_next"}, "model_type"),
    ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ({"attention_bias": True}, "attention_bias"),
  ],
)
def test_what_is_not_supported_names_its_setting(change, named):
  settings = {**SETTINGS, "model_type": "qwen3_5_text"}
  hf_config._model_config(settings)
  with pytest.raises(ValueError, match=named):
    hf_config._model_config(settings | change)
