"""Attention over packed rows against one sequence at a time."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import remat as remat_lib
from jaxrl_async.models.attention import block_attention
from jaxrl_async.models.attention import choice
from jaxrl_async.models.attention import packed_attention

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
# Segments of three rows; what is left of a row is padding.
LENGTHS = [[300], [130, 1, 127, 40], [5, 128, 60, 60]]


def rows(lengths, length, seed=0):
  """Random queries, keys and values, and where each token's segment begins."""
  rng = np.random.default_rng(seed)
  start = np.tile(np.arange(length, dtype=np.int32), (len(lengths), 1))
  for row, segments in zip(start, lengths, strict=True):
    for first, n in zip(np.cumsum([0, *segments]), segments, strict=False):
      row[first : first + n] = first
  heads = (HEADS, KV_HEADS, KV_HEADS)
  arrays = (
    rng.standard_normal((len(lengths), length, n, HEAD_DIM), np.float32)
    for n in heads
  )
  return tuple(map(jnp.asarray, (*arrays, start)))


def one_by_one(query, key, value, lengths, window=10_000):
  """Each segment alone, in float64; zero in padding."""
  mixed = np.zeros(query.shape)
  query, key, value = (np.asarray(x, float) for x in (query, key, value))
  for b, segments in enumerate(lengths):
    first = 0
    for n in segments:
      for t in range(first, first + n):
        for head in range(HEADS):
          kv = head // (HEADS // KV_HEADS)
          seen = slice(max(first, t + 1 - window), t + 1)
          scores = key[b, seen, kv] @ query[b, t, head] / np.sqrt(HEAD_DIM)
          weights = np.exp(scores - scores.max())
          mixed[b, t, head] = weights @ value[b, seen, kv] / weights.sum()
      first += n
  return mixed


@functools.cache
def example():
  arrays = rows(LENGTHS, 301)
  return arrays, one_by_one(*arrays[:3], LENGTHS)


def is_token(start):
  """Padding sees itself only, but so does a segment of one token."""
  del start
  mask = np.zeros((3, 301, 1, 1), bool)
  for row, segments in zip(mask, LENGTHS, strict=True):
    row[: sum(segments)] = True
  return mask


KERNELS = {
  "xla": packed_attention.xla,
  "blocks": block_attention.blocks,
  "blocks of 32": functools.partial(block_attention.blocks, block=32),
  "chunks": packed_attention.chunks,
  "splash": functools.partial(packed_attention.splash, interpret=True),
  "pallas_gpu": functools.partial(packed_attention.pallas_gpu, interpret=True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_packed_rows_are_attended_one_segment_at_a_time(name):
  (query, key, value, start), expected = example()
  mixed = jax.jit(KERNELS[name])(query, key, value, start, start)
  mask = is_token(start)
  found = np.where(mask, mixed, 0)
  np.testing.assert_allclose(found, np.where(mask, expected, 0), atol=1e-5)
  assert np.isfinite(mixed).all()


@pytest.mark.parametrize("name", sorted(KERNELS.keys() - {"xla"}))
def test_gradients_are_those_of_plain_xla(name):
  (query, key, value, start), _ = example()
  weights = np.random.default_rng(1).standard_normal(query.shape, np.float32)
  weights = np.where(is_token(start), weights, 0)

  def gradients(attend):
    def total(q, k, v):
      return (attend(q, k, v, start, start) * weights).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(query, key, value)

  for found, expected in zip(
    gradients(KERNELS[name]), gradients(packed_attention.xla), strict=True
  ):
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_blocks_of_other_segments_are_not_read():
  """What stands in a block that no segment joins may be anything."""
  lengths = [[128, 128, 128]]
  query, key, value, start = rows(lengths, 384)
  # Even a weight of 0 would let a value that is NaN through.
  value = value.at[:, :128].set(np.nan)
  mixed = block_attention.blocks(query, key, value, start, start)
  assert np.isnan(mixed[:, :128]).all()
  assert np.isfinite(mixed[:, 128:]).all()


def test_splash_reads_no_block_of_other_segments():
  """Forward, and in both passes backward."""
  first, second = [128, 256, 256], [384, 256]
  query, key, value, start = rows([first, second], 640)
  nan = np.nan

  def passes(query, key, value, d_mixed):
    attend = functools.partial(packed_attention.splash, interpret=True)
    mixed, pull = jax.vjp(
      lambda *x: attend(*x, start, start), query, key, value
    )
    return mixed, *pull(d_mixed)

  passes = jax.jit(passes)
  right = passes(query, key, value, query)
  # What a row's first segment holds is read by that segment alone.
  unread = [x.at[0, :128].set(nan).at[1, :384].set(nan) for x in (key, value)]
  mixed, d_query, _, _ = passes(query, *unread, query)
  for found, expected in [(mixed, right[0]), (d_query, right[1])]:
    for row, end in enumerate((128, 384)):
      assert np.isnan(found[row, :end]).all()
      np.testing.assert_array_equal(found[row, end:], expected[row, end:])
  # Nor does the last segment's gradient reach keys of the others.
  d_mixed = query.at[0, 384:].set(nan).at[1, 384:].set(nan)
  for found, expected in zip(
    passes(query, key, value, d_mixed)[2:], right[2:], strict=True
  ):
    assert np.isnan(found[:, 384:]).all()
    np.testing.assert_array_equal(found[:, :384], expected[:, :384])


PLACES = [
  (shape, kv_heads)
  for kv_heads in (("tensor",), (), ("context",), None)
  for shape in (
    mesh_lib.MeshShape(context=2, tensor=2),
    mesh_lib.MeshShape(data=2, context=4),
    mesh_lib.MeshShape(fsdp=2, tensor=2),
  )
  if kv_heads != ("context",) or KV_HEADS % shape.context == 0
]
# Both axes; one that no kv head can be split over; heads cut through.
SOME_PLACES = PLACES[0], PLACES[4], PLACES[8]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "kv_heads"),
  [
    place
    if place in SOME_PLACES
    else pytest.param(*place, marks=pytest.mark.nightly)
    for place in PLACES
  ],
)
@pytest.mark.parametrize("name", ["xla", "blocks", "chunks", "splash"])
def test_a_mesh_attends_as_one_device(name, shape, kv_heads):
  lengths = [[256, 100, 150], [1, 511], [300], [64] * 8]
  query, key, value, start = rows(lengths, 512)
  mesh = mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape)
  if kv_heads is None:
    rules = sections.ShardingRules(heads=(), kv_heads=(), head=("tensor",))
  else:
    rules = sections.ShardingRules(kv_heads=kv_heads)
  if "context" in (kv_heads or ()):
    rules = sections.ShardingRules(kv_heads=kv_heads, tokens=())
  layout = mesh_lib.Layout(mesh=mesh, rules=rules)
  attend = packed_attention.over_rows(
    name, start, HEADS, layout, interpret=True
  )

  def gradients(attend):
    def total(q, k, v):
      mixed = attend(q, k, v)
      return (mixed * mixed).sum(), mixed

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(
      query, key, value
    )

  found = gradients(attend)
  alone = packed_attention.over_rows("xla", start, HEADS)
  expected = gradients(alone)
  for a, b in zip(
    jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
  ("remat", "num_products"),
  [
    (sections.Remat.FULL, 9),
    (sections.Remat.ATTENTION, 7),
    (sections.Remat.DOTS, 7),
  ],
)
def test_what_a_policy_keeps_of_blocks_is_not_made_again(remat, num_products):
  """Two products forward, five backward; with FULL two of them again."""
  query, key, value, start = rows([[200, 56]], 256)
  attend = jax.checkpoint(
    lambda *inputs: block_attention.blocks(*inputs, start, start),
    policy=remat_lib.POLICIES[remat],
  )
  gradient = jax.grad(lambda *inputs: attend(*inputs).sum(), argnums=(0, 1, 2))
  program = str(jax.make_jaxpr(gradient)(query, key, value))
  assert program.count("dot_general") == num_products


def choose(wanted, tokens_per_row, shape=mesh_lib.ONE):
  mesh = mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape)
  layout = mesh_lib.Layout(mesh=mesh, rules=sections.ShardingRules())
  return choice.for_training(
    wanted,
    heads=(tiny.MODEL.num_heads, tiny.MODEL.num_kv_heads, tiny.MODEL.head_dim),
    tokens_per_row=tokens_per_row,
    dtype=jnp.dtype("float32"),
    layout=layout,
  )


@pytest.mark.parametrize(
  ("wanted", "tokens_per_row", "name"),
  [
    ("auto", 256, "xla"),
    ("auto", 384, "blocks"),
    ("xla", 384, "xla"),
    ("blocks", 64, "blocks"),
  ],
)
def test_plain_xla_is_taken_on_a_cpu(wanted, tokens_per_row, name):
  assert choose(wanted, tokens_per_row) == name


def test_where_no_kernel_works_a_gpu_gets_loops_of_fixed_length(monkeypatch):
  class Gpu:
    platform = "gpu"
    device_kind = "a GPU"

  monkeypatch.setattr(choice, "PACKED", {})
  mesh = mesh_lib.make_mesh([Gpu()])
  name = choice.for_training(
    "auto",
    heads=(6, 2, 16),
    tokens_per_row=8192,
    dtype=jnp.dtype("float32"),
    layout=mesh_lib.Layout(mesh=mesh, rules=sections.ShardingRules()),
  )
  assert name == "chunks"


def test_chunks_and_blocks_loop_as_they_say():
  """Of chunks, the number of turns is known to the compiler, in both passes."""
  query, key, value, start = rows([[1024]], 1024)

  def loops(attend):
    total = jax.grad(lambda *x: attend(*x, start, start).sum(), argnums=(0, 1))
    text = jax.jit(total).lower(query, key, value).compile().as_text()
    return [x for x in text.splitlines() if " while(" in x]

  found = loops(packed_attention.chunks)
  assert found and all("known_trip_count" in x for x in found)
  assert not all("known_trip_count" in x for x in loops(block_attention.blocks))


@pytest.mark.parametrize(
  ("wanted", "tokens_per_row", "words"),
  [
    ("flash", 384, "'flash' is not one of auto, xla, blocks, chunks, splash"),
    ("splash", 512, "splash does not work here .*; use auto or xla"),
    ("splash", 320, "splash needs rows of 2 times a multiple of 128 tokens"),
  ],
)
def test_attention_that_cannot_be_is_one_line(wanted, tokens_per_row, words):
  shape = mesh_lib.MeshShape(context=2)
  with pytest.raises(sections.ConfigError, match=f"^train.attention: {words}"):
    choose(wanted, tokens_per_row, shape)
