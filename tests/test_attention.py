"""Every attention against plain XLA; the choice between them."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
from jax.experimental.pallas import tpu as pallas_tpu
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models.attention import choice
from jaxrl_async.models.attention import kernel_errors
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.models.attention import paged_attention
from jaxrl_async.models.attention import reference

SIZES = dataclasses.replace(tiny.SIZES, num_pages=20, page_tokens=4)


def interpreted_tpu_paged(*arguments):
  with pallas_tpu.force_tpu_interpret_mode():
    return paged_attention.tpu_paged(*arguments)


KERNELS = {
  "gpu_paged": functools.partial(paged_attention.gpu_paged, interpret=True),
  "tpu_paged": interpreted_tpu_paged,
}
# Query heads, kv heads, head size, tokens of a page, pages of a table.
SHAPES = [(6, 2, 16, 16, 20), (3, 3, 32, 128, 1)]


def decode_trial(heads, sizes, dtype):
  return choice.decode_trial(
    heads,
    slots=4,
    num_pages=sizes.num_pages,
    page_tokens=sizes.page_tokens,
    pages_per_slot=sizes.pages_per_slot,
    dtype=jnp.dtype(dtype),
  )


def normal(*shape, seed=0):
  rng = np.random.default_rng([*shape, seed])
  return rng.standard_normal(shape, np.float32)


def pages_of(shape, seed=0):
  """A pool, queries, positions and a table; one token, one page, half, all.

  Entries past a row's end are stale: any page, none, or one that never was.
  """
  num_heads, num_kv_heads, head_dim, page, width = shape
  num_pages, full = width + 2, width * page
  positions = np.array([0, page - 1, full // 2, full - 1], np.int32)
  rng = np.random.default_rng(seed)
  table = rng.integers(-1, num_pages + 2, (len(positions), width), np.int32)
  is_live = np.arange(width)[None] <= positions[:, None] // page
  table = np.where(is_live, table % num_pages, table)
  pool = num_kv_heads, num_pages, page, head_dim
  query = normal(len(positions), num_heads, head_dim)
  layer = normal(*pool), normal(*pool, seed=1)
  return jax.tree.map(jnp.asarray, (layer, query, positions, table))


def one_by_one(query, keys, values):
  """Query [N H] over keys and values [S K H], in float64, head by head."""
  query, keys, values = (np.asarray(x, float) for x in (query, keys, values))
  group = query.shape[0] // keys.shape[1]
  mixed = []
  for n, q in enumerate(query):
    weights = np.exp(keys[:, n // group] @ q / np.sqrt(len(q)))
    mixed.append(weights @ values[:, n // group] / weights.sum())
  return np.stack(mixed)


def rows_of(length, num_heads=6, num_kv_heads=2, head_dim=16):
  lengths = np.array([1, length // 2, length], np.int32)
  shapes = [(3, length, n, head_dim) for n in (num_heads, num_kv_heads)]
  key, value = normal(*shapes[1]), normal(*shapes[1], seed=1)
  return tuple(map(jnp.asarray, (normal(*shapes[0]), key, value, lengths)))


def test_rows_attend_to_their_own_past():
  query, key, value, lengths = rows_of(9)
  mixed = reference.causal_xla(query, key, value, lengths)
  for row, length in enumerate(lengths):
    for t in range(length):
      expected = one_by_one(
        query[row, t], key[row, : t + 1], value[row, : t + 1]
      )
      np.testing.assert_allclose(mixed[row, t], expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_jaxs_own_attention_means_the_same_by_its_arguments(window):
  # The form in which cuDNN is asked, of which there is none here.
  arguments = rows_of(9)
  found = jax.nn.dot_product_attention(
    *arguments[:3],
    is_causal=True,
    local_window_size=None if window is None else (window - 1, 0),
    implementation="xla",
  )
  (found,) = choice.of_tokens(lambda *_, **__: found)(*arguments)
  attend = choice.of_tokens(reference.causal_xla, [window])
  (expected,) = attend(*arguments)
  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_cudnn_is_refused_where_there_is_none():
  with pytest.raises(kernel_errors.refusals()):
    reference.causal_cudnn(*rows_of(9))


@pytest.mark.slow
@pytest.mark.parametrize(("length", "window"), [(16, None), (150, 20)])
def test_splash_attention_agrees(length, window):
  arguments, windows = rows_of(length), {None, window}
  interpreted = functools.partial(reference.causal_splash, interpret=True)
  of_tokens = choice.of_tokens
  found = jax.jit(of_tokens(interpreted, windows))(*arguments)
  expected = of_tokens(reference.causal_xla, windows)(*arguments)
  np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("shape", [*SHAPES, (4, 1, 8, 4, 3)])
def test_pages_are_attended_in_the_order_of_the_table(shape):
  (keys, values), query, positions, table = pages_of(shape)
  found = paged_attention.xla((keys, values), query, positions, table)
  for row, position in enumerate(positions):
    live = table[row, : position // shape[3] + 1]

    def cached(pool, live=live, position=position):
      times = np.concatenate([pool[:, page] for page in live], axis=1)
      return np.swapaxes(times, 0, 1)[: position + 1]

    expected = one_by_one(query[row], cached(keys), cached(values))
    np.testing.assert_allclose(found[row], expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_pages_agree(name, shape):
  layer, query, positions, table = pages_of(shape)
  expected = paged_attention.xla(layer, query, positions, table)
  found = KERNELS[name](layer, query, positions, table)
  # The TPU's rounds keys and values to bfloat16.
  tolerance = 2e-2 if name == "tpu_paged" else 1e-5
  np.testing.assert_allclose(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_slot_that_idles_far_behind_its_table_spoils_no_other(name):
  layer, query, positions, table = pages_of(SHAPES[0])
  expected = paged_attention.xla(layer, query, positions, table)
  positions, table = positions.at[1].set(10_000), table.at[1].set(999)
  found = KERNELS[name](layer, query, positions, table)
  assert np.isfinite(found).all()
  others = np.array([0, 2, 3])
  np.testing.assert_allclose(found[others], expected[others], atol=2e-2)


# From 0.11 on JAX asks for which GPU it lowers a kernel.
H100 = jax.sharding.AbstractMesh(
  (),
  (),
  abstract_device=jax.sharding.AbstractDevice(
    device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"
  ),
)
TPU = {
  "heads of 128": (12, 2, 128),
  "an odd group": (9, 3, 128),
  "a group of eight": (16, 2, 128),
}


@pytest.mark.parametrize("heads", TPU.values(), ids=TPU)
def test_the_kernels_are_lowered_for_a_tpu(heads):
  dtype = jnp.dtype("bfloat16")
  sizes = dataclasses.replace(SIZES, page_tokens=16)
  for attend, trial in [
    (
      paged_attention.tpu_paged,
      decode_trial(heads, sizes, dtype),
    ),
    (
      functools.partial(reference.causal_splash, sliding_window=40),
      choice.prefill_trial(heads, 3, 16, dtype),
    ),
  ]:
    for arguments in trial.arguments, trial.shapes:
      traced = jax.jit(attend).trace(*arguments)
      text = traced.lower(lowering_platforms=("tpu",)).as_text()
      assert "tpu_custom_call" in text


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(12, 2, 128), (14, 2, 64), (9, 3, 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_of_pages_is_lowered_for_a_gpu(heads, dtype):
  sizes = dataclasses.replace(SIZES, page_tokens=16)
  trial = decode_trial(heads, sizes, dtype)
  for arguments in trial.arguments, trial.shapes:
    with jax.sharding.use_abstract_mesh(H100):
      traced = jax.jit(paged_attention.gpu_paged).trace(*arguments)
      text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" in text


@pytest.mark.parametrize(
  ("attend", "platform", "heads"),
  [
    (paged_attention.tpu_paged, "tpu", (14, 2, 64)),
    (paged_attention.gpu_paged, "cuda", (4, 2, 24)),
  ],
)
def test_heads_that_a_kernel_does_not_take_are_a_refusal(
  attend, platform, heads
):
  trial = decode_trial(heads, SIZES, "bfloat16")
  with (
    pytest.raises(kernel_errors.refusals()),
    jax.sharding.use_abstract_mesh(H100),
  ):
    jax.jit(attend).trace(*trial.arguments).lower(
      lowering_platforms=(platform,)
    )


# -- the choice ----------------------------------------------------------


def raises(error):
  def attend(*arguments):
    del arguments
    raise error

  return attend


def off(by):
  return lambda *arguments: paged_attention.xla(*arguments) + by


def only_few(layer, query, positions, table):
  if table.shape == (SIZES.num_slots, SIZES.pages_per_slot):
    raise ValueError("too large\nfor this kernel")
  return paged_attention.xla(layer, query, positions, table)


FAKES = {
  "xla": paged_attention.xla,
  "missing": raises(ImportError("no such kernel")),
  "broken": raises(jax.errors.JaxRuntimeError("INTERNAL: first\nsecond")),
  "silent": raises(NotImplementedError()),
  "small": only_few,
  "wrong": off(np.float32(0.1)),
  "nothing": off(np.float32(np.nan)),
  "right": off(np.float32(1e-6)),
  "bug": raises(KeyError("bug")),
}


def first_right(*names):
  heads = tiny.MODEL.num_heads, tiny.MODEL.num_kv_heads, tiny.MODEL.head_dim
  trial = decode_trial(heads, SIZES, "float32")
  return choice.first_right(names, FAKES, trial)


def test_the_first_that_agrees_is_taken_and_the_others_are_named():
  name, refused = first_right(
    "missing", "broken", "silent", "small", "wrong", "nothing", "right", "bug"
  )
  assert name == "right"
  how_far = refused.pop("wrong")
  assert how_far.startswith("it is off by 0.")
  assert refused == {
    "missing": "ImportError: no such kernel",
    "broken": "JaxRuntimeError: INTERNAL: first",
    "silent": "NotImplementedError: ",
    "small": "ValueError: too large",
    "nothing": "it is off by nan of the norm",
  }


def test_where_none_agrees_it_is_xla():
  name, refused = first_right("wrong")
  assert (name, list(refused)) == ("xla", ["wrong"])


def test_an_error_that_no_kernel_should_raise_is_raised():
  with pytest.raises(KeyError, match="bug"):
    first_right("bug", "right")


def test_padding_does_not_count_unless_it_is_not_finite():
  arguments = rows_of(9)
  is_padding = np.arange(9)[None] >= arguments[3][:, None]
  is_padding = is_padding[:, :, None, None]

  def found(padding):
    def attend(*arguments, **window):
      mixed = reference.causal_xla(*arguments, **window)
      return jnp.where(is_padding, jnp.float32(padding), mixed)

    return choice.of_tokens(attend)(*arguments)

  np.testing.assert_array_equal(found(5), found(0))
  assert np.isnan(found(np.nan)).any()


def for_engine(wanted, model, sizes, mesh):
  return choice.for_engine(
    wanted,
    heads=(model.num_heads, model.num_kv_heads, model.head_dim),
    windows_within=model.windows_within,
    prefill=(sizes.prefill_rows, sizes.prefill_buckets[-1]),
    slots=(sizes.num_slots, sizes.cache_tokens),
    pages=(sizes.num_pages, sizes.page_tokens),
    dtype=jnp.dtype("float32"),
    mesh=mesh,
    rules=mesh_lib.ROLLOUT_RULES,
  )


def choose(wanted, num_devices=1, *, data=1, tensor=1, sizes=SIZES):
  mesh = mesh_lib.make_mesh(
    jax.devices()[:num_devices], mesh_lib.MeshShape(data=data, tensor=tensor)
  )
  return for_engine(wanted, tiny.MODEL, sizes, mesh)


@pytest.mark.parametrize("wanted", ["auto", "xla"])
def test_on_a_cpu_it_is_xla_and_nothing_is_tried(wanted, monkeypatch):
  monkeypatch.setattr(choice, "first_right", raises(AssertionError()))
  chosen = choose(wanted)
  assert chosen.prefill is reference.causal_xla
  assert chosen.decode is paged_attention.xla
  assert chosen.description == "prefill xla, decode xla over pages"
  slots = choose(wanted, sizes=tiny.SIZES)
  assert slots.description == "prefill xla, decode xla over slots"


@pytest.mark.parametrize(
  "name", [*sorted(reference.CAUSAL.keys() - {"xla"}), *KERNELS]
)
def test_a_kernel_asked_for_by_name_that_does_not_work_is_one_line(name):
  with pytest.raises(sections.ConfigError) as caught:
    choose(name)
  assert str(caught.value).startswith(f"rollout.attention: {name} does not")
  assert "\n" not in str(caught.value)


def test_a_name_that_does_not_exist_or_lacks_pages_is_one_line():
  with pytest.raises(
    sections.ConfigError, match="'flash' is not one of auto, x"
  ):
    choose("flash")
  with pytest.raises(sections.ConfigError, match="gpu_paged needs pages"):
    choose("gpu_paged", sizes=tiny.SIZES)


def test_a_platforms_candidates_exist():
  for name in sum(choice.PREFILL.values(), ()):
    assert name in reference.CAUSAL
  for name in sum(choice.DECODE.values(), ()):
    assert name in paged_attention.IMPLEMENTATIONS


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 1), (2, 2)])
def test_a_kernel_of_one_device_is_split_over_the_mesh(
  data, tensor, monkeypatch
):
  # XLA's stand in for kernels that see one device's heads and slots only.
  seen = []

  def one_device(attend):
    def spy(*arguments, **window):
      seen.append([np.shape(x) for x in jax.tree.leaves(arguments)])
      return attend(*arguments, **window)

    return spy

  monkeypatch.setitem(
    paged_attention.IMPLEMENTATIONS,
    "tpu_paged",
    one_device(paged_attention.xla),
  )
  monkeypatch.setitem(
    reference.CAUSAL, "splash", one_device(reference.causal_xla)
  )
  pages, rows = pages_of((4, 2, 8, 4, 3)), rows_of(9, 4, 2, 8)
  rows = [x[: SIZES.prefill_rows] for x in rows]
  chosen = choose("tpu_paged", data * tensor, data=data, tensor=tensor)
  found = jax.jit(chosen.decode)(*pages)
  expected = paged_attention.xla(*pages)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  keys, _, query, positions, table = seen[-1]
  assert keys[0] == 2 // tensor
  assert query[:2] == (4 // data, 4 // tensor)
  assert positions == (4 // data,)
  assert table == (4 // data, 3)
  chosen = choose("splash", data * tensor, data=data, tensor=tensor)
  found = jax.jit(chosen.prefill)(*rows)
  expected = reference.causal_xla(*rows)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  assert seen[-1][0] == (2 // data, 9, 4 // tensor, 8)
  assert seen[-1][1] == (2 // data, 9, 2 // tensor, 8)


@pytest.mark.slow
def test_an_engine_writes_the_same_with_a_kernel(monkeypatch):
  calls = []

  def counted(*arguments, **window):
    calls.append(1)
    return reference.causal_xla(*arguments, **window)

  monkeypatch.setitem(reference.CAUSAL, "cudnn", counted)
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  engine = type(tiny.engine())(
    tiny.MODEL,
    tiny.SIZES,
    mesh=mesh,
    seed=7,
    end_tokens=tiny.END_TOKENS,
    attention="cudnn",
  )
  row, params = tiny.Row(prompt=tiny.prompt(5)), tiny.engine_params()
  before = len(calls)
  (written,), _ = tiny.write(engine, params, [row], num_calls=2)
  assert len(calls) == before + tiny.MODEL.num_layers
  (expected,), _ = tiny.write(tiny.engine(), params, [row], num_calls=2)
  assert written == expected


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(14, 2, 64), (28, 4, 128)])
def test_a_gpu_takes_kernels_that_agree_with_xla(heads):
  dtype = jnp.dtype("bfloat16")
  sizes = dataclasses.replace(
    SIZES, num_pages=64, page_tokens=16, cache_tokens=1024
  )
  device = jax.devices("gpu")[0]

  def first(names, implementations, trial):
    placed = jax.device_put(trial.arguments, device)
    trial = dataclasses.replace(trial, arguments=placed)
    return choice.first_right(names, implementations, trial)

  trial = decode_trial(heads, sizes, dtype)
  found = first(("gpu_paged",), paged_attention.IMPLEMENTATIONS, trial)
  assert found == ("gpu_paged", {})
  trial = choice.prefill_trial(heads, 3, 16, dtype)
  causal = {
    name: choice.of_tokens(attend) for name, attend in reference.CAUSAL.items()
  }
  assert first(("cudnn",), causal, trial) == ("cudnn", {})
  trial = choice.packed_trial(heads, 8192, dtype)
  packed = {
    name: choice.with_gradients(name, None)
    for name in packed_attention.IMPLEMENTATIONS
  }
  for name in choice.PACKED["gpu"]:
    assert first((name,), packed, trial) == (name, {})
