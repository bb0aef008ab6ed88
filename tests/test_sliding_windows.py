"""Sliding windows in every path; test_parity.py compares with transformers."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import test_attention
import test_engine_mesh
import test_hf_weights
import test_packed_attention
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.models import hf_config
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import choice
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.models.attention import paged_attention
from jaxrl_async.planning import matmul_rate
from jaxrl_async.planning import memory_estimate
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import train_step

WINDOW = 6
# The window is in the first layer, because nothing that a prefill computes of
# the last one enters the cache.
SOME = dataclasses.replace(tiny.MODEL, sliding_windows=(WINDOW, None))
ALL = dataclasses.replace(tiny.MODEL, sliding_windows=(WINDOW, WINDOW))
SPLASH = functools.partial(packed_attention.splash, interpret=True)


@pytest.mark.parametrize(
  ("windows", "message"),
  [
    ((3,), "1 entries for num_layers 2"),
    ((None, 0), "below 1"),
    ((None, None), "leave it empty"),
  ],
)
def test_windows_that_no_model_has_are_refused(windows, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(tiny.MODEL, sliding_windows=windows)


def test_a_window_that_hides_nothing_is_none():
  assert SOME.windows_within(WINDOW) == (None, None)
  assert SOME.windows_within(WINDOW + 1) == (WINDOW, None)
  assert tiny.MODEL.windows_within(100) == (None, None)


def test_windows_are_read_as_transformers_reads_them(tmp_path):
  mistral = hf_config.config_json(test_hf_weights.MISTRAL)
  assert test_hf_weights.described(tmp_path, mistral).sliding_windows == (7, 7)
  assert test_hf_weights.described(
    tmp_path, mistral | {"sliding_window": None}
  ) == (dataclasses.replace(test_hf_weights.MISTRAL, sliding_windows=()))
  del mistral["sliding_window"]
  assert test_hf_weights.described(tmp_path, mistral).sliding_windows == (
    4096,
    4096,
  )
  qwen = hf_config.config_json(test_hf_weights.QWEN2) | {
    "use_sliding_window": True
  }
  full, sliding = "full_attention", "sliding_attention"
  for more, windows in (
    ({}, ()),
    ({"max_window_layers": 0}, (4096, 4096)),
    ({"max_window_layers": 1, "sliding_window": 9}, (None, 9)),
    ({"max_window_layers": 0, "sliding_window": None}, ()),
    ({"max_window_layers": 0, "use_sliding_window": False}, ()),
    ({"layer_types": [sliding, full], "sliding_window": 3}, (3, None)),
    ({"layer_types": [full, full], "max_window_layers": 0}, ()),
  ):
    assert (
      test_hf_weights.described(tmp_path, qwen | more).sliding_windows
      == windows
    )


# -- packed rows -------------------------------------------------------------


def attention(name, window):
  """Attention over rows, as a function of query, key, value and start."""

  def attend(query, key, value, start):
    if name == "splash":
      return SPLASH(query, key, value, start, start, sliding_window=window)
    over = packed_attention.over_rows(
      name, start, query.shape[2], sliding_window=window
    )
    return over(query, key, value)

  return attend


@pytest.mark.parametrize(
  ("name", "window"),
  [
    pytest.param("xla", 1, marks=pytest.mark.slow),
    ("xla", 40),
    ("blocks", 40),
    pytest.param("blocks", 1, marks=pytest.mark.slow),
    pytest.param("blocks", 200, marks=pytest.mark.slow),
    pytest.param("splash", 40, marks=pytest.mark.slow),
  ],
)
def test_a_query_sees_its_window_and_no_other_segment(name, window):
  lengths = test_packed_attention.LENGTHS
  (*arrays, start), _ = test_packed_attention.example()
  expected = test_packed_attention.one_by_one(*arrays, lengths, window=window)
  mixed = jax.jit(attention(name, window))(*arrays, start)
  mask = test_packed_attention.is_token(start)
  np.testing.assert_allclose(
    np.where(mask, mixed, 0), np.where(mask, expected, 0), atol=1e-5
  )


@pytest.mark.parametrize(
  "name", ["blocks", pytest.param("splash", marks=pytest.mark.slow)]
)
def test_gradients_within_windows_are_those_of_plain_xla(name):
  query, key, value, start = test_packed_attention.rows([[200, 56]], 256)
  weights = np.random.default_rng(1).standard_normal(query.shape, np.float32)

  def gradients(name):
    def total(q, k, v):
      return (attention(name, 40)(q, k, v, start) * weights).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(query, key, value)

  for found, expected in zip(gradients(name), gradients("xla"), strict=True):
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_blocks_before_the_window_are_not_read():
  query, key, value, start = test_packed_attention.rows([[384]], 384)
  # Even a weight of 0 would let a value that is NaN through.
  value = value.at[:, :128].set(np.nan)
  mixed = attention("blocks", 128)(query, key, value, start)
  assert np.isnan(mixed[:, :256]).all()
  assert np.isfinite(mixed[:, 256:]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "is_array"),
  [
    pytest.param("blocks", True, marks=pytest.mark.nightly),
    ("blocks", False),
    ("xla", True),
    ("splash", False),
  ],
)
def test_windows_reach_over_the_parts_of_a_context(name, is_array):
  lengths = [[256, 100, 150], [1, 511]]
  query, key, value, start = test_packed_attention.rows(lengths, 512)
  shape = mesh_lib.MeshShape(context=2, tensor=2)
  mesh = mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape)
  layout = mesh_lib.Layout(mesh=mesh, rules=sections.ShardingRules())

  def gradients(name, layout, window):
    attend = packed_attention.over_rows(
      name,
      start,
      test_packed_attention.HEADS,
      layout,
      sliding_window=window,
      interpret=True,
    )

    def total(q, k, v):
      mixed = attend(q, k, v)
      return (mixed * mixed).sum(), mixed

    return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)

  if is_array:
    compiled = jax.jit(functools.partial(gradients, name, layout))
    found = compiled(jnp.int32(140))
  else:
    found = jax.jit(lambda: gradients(name, layout, 140))()
  expected = gradients("xla", None, 140)
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
  "name", ["blocks", pytest.param("xla", marks=pytest.mark.slow)]
)
def test_scanned_layers_have_their_own_windows(name):
  sequences = [tiny.prompt(n) for n in (20, 30)]
  batch = tiny.packed(sequences)
  params = tiny.params(0, SOME)
  settings = train_step.ForwardSettings(
    model=SOME,
    compute_dtype="float32",
    remat=sections.Remat.NONE,
    attention=name,
    temperature=1.0,
    vocab_chunk=40,
  )
  logprobs, _ = jax.jit(functools.partial(train_step.token_logprobs, settings))(
    params, batch
  )
  unstacked = transformer.unstack(params, SOME.num_layers)
  hidden = jax.jit(
    functools.partial(tiny.hidden_states, SOME, is_stacked=False, batch=batch)
  )(unstacked)
  logits = hidden[0] @ params["embedding"].T
  expected = jax.nn.log_softmax(logits)[
    np.arange(49), np.asarray(batch.tokens)[0, 1:50]
  ]
  is_inside = np.arange(1, 50) != 20  # the first token of the second one
  np.testing.assert_allclose(
    np.asarray(logprobs)[0, 1:50][is_inside], expected[is_inside], atol=1e-5
  )


@pytest.mark.slow
def test_a_token_depends_on_its_window_alone():
  model = dataclasses.replace(tiny.MODEL, num_layers=1, sliding_windows=(3,))
  depends = tiny.input_dependence(
    model, tiny.params(0, model), np.arange(10, 18), np.ones(8)
  )
  distance = np.arange(8)[:, None] - np.arange(8)[None]
  np.testing.assert_array_equal(depends > 0, (distance >= 0) & (distance < 3))


def choose(wanted, windows):
  return choice.for_training(
    wanted,
    heads=(4, 2, 8),
    tokens_per_row=384,
    dtype=jnp.dtype("float32"),
    layout=mesh_lib.Layout(
      mesh=mesh_lib.make_mesh(jax.devices()[:1]),
      rules=sections.ShardingRules(),
    ),
    sliding_windows=windows,
  )


def test_kernels_without_windows_are_refused_by_name():
  assert choose("auto", (None, 9)) == "blocks"
  assert choose("xla", (None, 9)) == "xla"
  for wanted, windows, words in (
    ("splash", (None, 9), "splash needs the same sliding window in all layers"),
    ("pallas_gpu", (9, 9), "pallas_gpu does not work here .*no sliding"),
  ):
    with pytest.raises(
      sections.ConfigError, match=f"^train.attention: {words}"
    ):
      choose(wanted, windows)
  arguments = test_attention.pages_of(test_attention.SHAPES[0])
  for attend in (paged_attention.gpu_paged, paged_attention.tpu_paged):
    with pytest.raises(NotImplementedError, match="no sliding windows"):
      attend(*arguments, sliding_window=3)
  with pytest.raises(sections.ConfigError, match="gpu_paged does not work"):
    mesh = mesh_lib.make_mesh(jax.devices()[:1])
    test_attention.for_engine("gpu_paged", SOME, test_attention.SIZES, mesh)


# -- the cache ---------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 5, 17])
@pytest.mark.parametrize("shape", [test_attention.SHAPES[0], (4, 1, 8, 4, 3)])
def test_of_pages_only_those_in_the_window_count(shape, window):
  (keys, values), query, positions, table = test_attention.pages_of(shape)
  found = paged_attention.xla(
    (keys, values), query, positions, table, sliding_window=window
  )
  for row, position in enumerate(positions):
    live = table[row, : position // shape[3] + 1]

    def cached(pool, live=live, position=position):
      times = np.concatenate([pool[:, page] for page in live], axis=1)
      times = np.swapaxes(times, 0, 1)[: position + 1]
      return times[-window:]

    expected = test_attention.one_by_one(
      query[row], cached(keys), cached(values)
    )
    np.testing.assert_allclose(found[row], expected, atol=1e-5)


CACHES = {
  "slots": (SOME, {"window_buckets": (4, 16, 32)}),  # a ring of two parts
  "pages": (SOME, {"num_pages": 24, "page_tokens": 4}),
  "windows only": (ALL, {}),
  "chunks": (SOME, {"prefill_chunk": 8}),
  "few pages": (
    ALL,
    {
      "num_pages": 12,
      "page_tokens": 4,
      "preemption": sections.Preemption.EXACT,
    },
  ),
}
# The other two are nightly.
MARKS = {"slots": (), "pages": pytest.mark.slow, "few pages": pytest.mark.slow}


def write(engine, model, *, shared=()):
  """Sequences up to five windows long, with caches rebuilt on the way."""
  scheduler = scheduler_lib.Scheduler(
    engine,
    kv_on_adopt=sections.KvOnAdopt.RECOMPUTE,
    busy=metrics_lib.BusyClock(),
  )
  weights = transformer.unstack(tiny.params(0, model), model.num_layers)
  scheduler.adopt(engine.load_params(weights, 0), 0)
  sequences = [
    tiny.sequence(
      np.concatenate([shared, tiny.prompt(n)]).astype(np.int32),
      group=n,
      limit=32,
    )
    for n in (1, 3, 7, 12, 15)
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  for _ in range(3):
    scheduler.step()
  # The same weights again: every running sequence is prefilled anew.
  scheduler.adopt(engine.load_params(weights, 1), 1)
  tiny.finish(scheduler)
  return sequences, scheduler


@pytest.mark.parametrize(
  "cache",
  [
    pytest.param(name, marks=MARKS.get(name, pytest.mark.nightly))
    for name in CACHES
  ],
)
def test_what_is_decoded_is_what_the_trainer_computes(cache):
  model, sizes = CACHES[cache]
  engine = tiny.engine(model, end_tokens=(), **sizes)
  shared = tiny.prompt(8, seed=1) if cache == "chunks" else ()
  sequences, scheduler = write(engine, model, shared=shared)
  assert all(len(sequence.tokens) == 32 for sequence in sequences)
  if cache == "few pages":
    assert scheduler.stats.preemptions > 0
  for sequence in sequences:
    (expected,) = tiny.trainer_logprobs(
      tiny.params(0, model), [sequence.tokens], model=model
    )
    mask = sequence.loss_mask
    np.testing.assert_allclose(
      sequence.behavior_logprobs[mask], expected[mask], atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("cache", ["slots", "chunks", "pages"])
def test_windows_are_the_same_on_a_mesh(cache):
  model = dataclasses.replace(SOME, vocab_size=96)
  sizes = dataclasses.replace(tiny.SIZES, **test_engine_mesh.CACHES[cache])

  def written(shape):
    engine = engine_lib.Engine(
      model,
      sizes,
      mesh=mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape),
      seed=7,
      end_tokens=(),
    )
    return write(engine, model)[0]

  for found, expected in zip(
    written(test_engine_mesh.BOTH_AXES), written(mesh_lib.ONE), strict=True
  ):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(
      found.behavior_logprobs, expected.behavior_logprobs, atol=1e-4
    )


# -- planning ----------------------------------------------------------------


@pytest.mark.parametrize("model", [tiny.MODEL, SOME, ALL])
@pytest.mark.parametrize("num_pages", [0, 24])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_is_as_large_as_is_estimated(model, num_pages, dtype):
  pages = {"num_pages": num_pages, "page_tokens": 4 if num_pages else 0}
  section = sections.RolloutSection(
    num_slots=tiny.SIZES.num_slots,
    cache_tokens=tiny.SIZES.cache_tokens,
    prefill_buckets=tiny.SIZES.prefill_buckets,
    dtype=dtype,
    **pages,
  )
  engine = tiny.engine(model, end_tokens=(), dtype=dtype, **pages)
  state = jax.eval_shape(engine.init_decode_state)
  estimate = memory_estimate.rollout(
    model,
    mesh_lib.ONE,
    mesh_lib.ROLLOUT_RULES,
    section,
    published=0,
    on_cpu=True,
  )
  by_layer = [
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer))
    for layer in state.cache
  ]
  assert estimate["cache"] == sum(by_layer)
  if not num_pages and model is SOME:
    assert by_layer[0] * tiny.SIZES.cache_tokens == by_layer[1] * WINDOW


def test_flops_count_the_pairs_within_windows():
  lengths = np.array([1, 5, 6, 7, 40])
  pairs = {None: 0, WINDOW: 0}
  for window in pairs:
    for length in lengths:
      for t in range(length):
        pairs[window] += sum(
          window is None or t - s < window for s in range(t + 1)
        )
  model = tiny.MODEL
  products = 6 * model.num_params * lengths.sum()
  of_a_layer = 12 * model.num_heads * model.head_dim
  for model, seen in (
    (tiny.MODEL, 2 * pairs[None]),
    (SOME, pairs[None] + pairs[WINDOW]),
    (ALL, 2 * pairs[WINDOW]),
  ):
    found = matmul_rate.model_flops(model, lengths)
    assert found == products + of_a_layer * seen
