"""Attention over the trainer's packed rows, which hold segments side by side.

Query t sees the keys segment_start[t] <= s <= t, so `segment_start` is all that
a mask needs. It is equal within a segment and differs between segments, so
kernels that expect segment ids take it as well.

Every implementation gets the keys of whole rows and the queries of a part of
each row, from column `first` on: with a `context` axis, each device holds
another part of the queries. "xla" is the reference for all others; it computes
all [T, T] scores. "blocks" is plain XLA too, but skips pairs of blocks that
share no segment and keeps no scores for the backward pass. Its loops end where
the segments do, which a GPU would have to tell the host at every turn. There,
"chunks" takes its place: some queries at a time, with all keys.

With a sliding window, query t sees no key before t - sliding_window + 1. For
plain XLA and for Tokamax this is only a later `query_start`, which may
therefore differ between layers, and blocks of keys before it are skipped. The
other kernels have the window in their mask, and need the same one in every
layer.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any
import warnings

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models.attention import block_attention
from jaxrl_async.models.attention import reference
from jaxrl_async.models.attention import tokamax_api

# The rows of kernels are padded to a multiple of it too.
BLOCK = block_attention.BLOCK

# Query, key, value, segment_start of queries and of keys, first column.
PackedAttention = Callable[..., jax.Array]
# Query, key, value, over rows that are fixed.
RowAttention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def xla(
  query: Float[Array, "B Q N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  query_start: Int[Array, "B Q"],
  key_start: Int[Array, "B T"],
  first: int | Int[Array, ""] = 0,
  *,
  soft_cap: float | None = None,
) -> Float[Array, "B Q N H"]:
  """Return attention with the scores of all pairs in one array."""
  del key_start
  mask = _mask(query_start, key.shape[1], first)
  return reference.xla_attention(query, key, value, mask, soft_cap)


def _mask(
  start: Int[Array, "B Q"], length: int, first: int | Int[Array, ""] = 0
) -> Bool[Array, "B Q T"]:
  """Return True where a query may see a key."""
  columns = jnp.arange(length, dtype=jnp.int32)[None, None]
  own = first + jnp.arange(start.shape[1], dtype=jnp.int32)[None, :, None]
  return (start[:, :, None] <= columns) & (columns <= own)


def windowed_start(
  start: Int[Array, "B T"], sliding_window: int | Int[Array, ""] | None
) -> Int[Array, "B T"]:
  """Return the first column that each query of whole rows sees."""
  if sliding_window is None:
    return start
  columns = jnp.arange(start.shape[1], dtype=jnp.int32)[None]
  return jnp.maximum(start, columns - (sliding_window - 1))


def chunks(
  query: Float[Array, "B Q N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  query_start: Int[Array, "B Q"],
  key_start: Int[Array, "B T"],
  first: int | Int[Array, ""] = 0,
  *,
  soft_cap: float | None = None,
) -> Float[Array, "B Q N H"]:
  """Return attention of BLOCK queries at a time, in a loop of fixed length.

  The scores of one chunk exist at a time. The backward pass computes them
  again.
  """
  missing = -query.shape[1] % BLOCK

  def cut(rows: jax.Array) -> jax.Array:
    """Pad [B Q ...] and cut it into [chunks B BLOCK ...]."""
    pads = ((0, 0), (0, missing), *((0, 0),) * (rows.ndim - 2))
    rows = jnp.pad(rows, pads)
    rows = rows.reshape(rows.shape[0], -1, BLOCK, *rows.shape[2:])
    return jnp.swapaxes(rows, 0, 1)

  queries = cut(query)
  firsts = first + BLOCK * jnp.arange(len(queries), dtype=jnp.int32)

  @jax.checkpoint
  def of_chunk(chunk: tuple[jax.Array, ...]) -> jax.Array:
    q, start, first = chunk
    return xla(q, key, value, start, key_start, first, soft_cap=soft_cap)

  mixed = lax.map(of_chunk, (queries, cut(query_start), firsts))
  mixed = jnp.swapaxes(mixed, 0, 1)
  mixed = mixed.reshape(mixed.shape[0], -1, *mixed.shape[3:])
  return mixed[:, : query.shape[1]]


def splash(
  query: Float[Array, "B Q N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  query_start: Int[Array, "B Q"],
  key_start: Int[Array, "B T"],
  *,
  sliding_window: int | None = None,
  kernel: Any = None,
  interpret: bool = False,
) -> Float[Array, "B Q N H"]:
  """Return JAX's splash attention for TPU.

  It skips blocks that the causal mask and the window hide, and blocks of other
  segments.

  Args:
    query: queries without the scale; a part of each row if `kernel` is for that
      part.
    key: keys of whole rows.
    value: values of whole rows.
    query_start: segment ids of the queries for the kernel.
    key_start: segment ids of the keys.
    sliding_window: number of tokens that a query sees, itself included; None is
      all of its segment. It must be that of `kernel`.
    kernel: result of `splash_kernel` for rows of this length; None makes one.
    interpret: run without a TPU.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention

  length, num_heads, head_dim = query.shape[1:]
  if kernel is None:
    kernel = splash_kernel(
      key.shape[1],
      num_heads,
      sliding_window=sliding_window,
      interpret=interpret,
    )
  missing = -length % BLOCK

  def segment_ids(start: jax.Array) -> jax.Array:
    return jnp.pad(start, ((0, 0), (0, missing)), constant_values=length)

  def one_row(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: jax.Array,
    k_ids: jax.Array,
  ) -> jax.Array:
    ids = splash_attention.SegmentIds(q=q_ids, kv=k_ids)
    return _without_other_segments(kernel, q_ids)(q, k, v, ids)

  scaled = query * jnp.asarray(head_dim**-0.5, query.dtype)
  mixed = jax.vmap(one_row)(
    reference.heads_first(scaled, missing),
    reference.heads_first(key, missing),
    reference.heads_first(value, missing),
    segment_ids(query_start),
    segment_ids(key_start),
  )
  return jnp.swapaxes(mixed, 1, 2)[:, :length]


def _without_other_segments(kernel: Any, start: Int[Array, "Q"]) -> Any:
  """Return a splash kernel that skips the blocks before a row's segments.

  A kernel knows, for each pair of blocks, whether to compute it, and which
  block to fetch next. Both are arrays, which may depend on the row.

  Args:
    kernel: result of `splash_kernel`, or what a device has of it.
    start: the first column that each query sees, ascending.
  """
  block = kernel.kwargs["block_sizes"].block_q
  first = start.reshape(-1, block).min(axis=1) // block

  def of_queries(info: Any) -> Any:
    """Of forward and of dq: for each block of queries, blocks of keys."""
    keys, seen_from = info.data_next.astype(jnp.int32), first[None, :, None]
    return _limited(info, keys >= seen_from, jnp.maximum(keys, seen_from))

  def of_keys(info: Any) -> Any:
    """Of dk and dv: for each block of keys, blocks of queries."""
    queries = info.data_next.astype(jnp.int32)
    keys = jnp.arange(queries.shape[2], dtype=jnp.int32)
    sees_them = first[:, None] <= keys[None]
    last = sees_them.sum(axis=0, dtype=jnp.int32) - 1
    is_seen = jnp.take_along_axis(sees_them, queries[0], axis=0, mode="clip")
    return _limited(info, is_seen[None], jnp.minimum(queries, last[None, None]))

  (forward, dq, dkv), kwargs = kernel.tree_flatten()
  infos = of_queries(forward), of_queries(dq), of_keys(dkv)
  return kernel.tree_unflatten(kwargs, infos)


def _limited(info: Any, is_seen: jax.Array, data_next: jax.Array) -> Any:
  """Return a kernel's blocks without those that are not seen."""
  return info._replace(
    block_mask=jnp.where(is_seen, info.block_mask, 0).astype(
      info.block_mask.dtype
    ),
    data_next=data_next.astype(info.data_next.dtype),
  )


def splash_kernel(
  length: int,
  num_heads: int,
  *,
  parts: int = 1,
  sliding_window: int | None = None,
  interpret: bool = False,
) -> Any:
  """Return splash attention over rows of that length, as a pytree.

  Args:
    length: of a whole row.
    num_heads: query heads on each device.
    parts: number of parts that the queries of each row are split into.
    sliding_window: as in `splash`.
    interpret: run without a TPU.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

  padded = length + -length % BLOCK
  block = reference.splash_block(padded // parts)
  mask = reference.splash_mask(padded, sliding_window)
  return splash_lib.make_splash_mha(
    splash_lib.MultiHeadMask([mask] * num_heads),
    block_sizes=splash_lib.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=block,
      block_q_dkv=block,
      block_kv_dkv=block,
      block_kv_dkv_compute=block,
      block_q_dq=block,
      block_kv_dq=block,
    ),
    head_shards=1,
    q_seq_shards=parts,
    residual_checkpoint_name=reference.MIXED,
    interpret=interpret,
  )


def tokamax(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  query_start: Int[Array, "B T"],
  key_start: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
  """Return Tokamax's flash attention for GPUs, which skips other segments."""
  del key_start
  return tokamax_api.attend(query, key, value, query_start)


def pallas_gpu(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  query_start: Int[Array, "B T"],
  key_start: Int[Array, "B T"],
  *,
  sliding_window: int | None = None,
  interpret: bool = False,
) -> Float[Array, "B T N H"]:
  """Return JAX's Triton flash attention for GPUs; it pads rows to 128.

  Raises:
    NotImplementedError: there is a window, which the kernel cannot mask.
  """
  with warnings.catch_warnings():
    # JAX 0.11 gives a DeprecationWarning on this import.
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas.ops.gpu import attention as gpu_attention

  if sliding_window is not None:
    raise NotImplementedError("it has no sliding windows")
  del key_start
  length, num_heads, head_dim = query.shape[1:]
  missing = -length % BLOCK
  group = num_heads // key.shape[2]

  def padded(rows: jax.Array, fill: int = 0) -> jax.Array:
    pads = ((0, 0), (0, missing), *((0, 0),) * (rows.ndim - 2))
    return jnp.pad(rows, pads, constant_values=fill)

  mixed = gpu_attention.mha(
    padded(query),
    padded(jnp.repeat(key, group, axis=2)),
    padded(jnp.repeat(value, group, axis=2)),
    padded(query_start, length),
    sm_scale=head_dim**-0.5,
    causal=True,
    interpret=interpret,
  )
  assert isinstance(mixed, jax.Array)  # the result alone, without residuals
  return mixed[:, :length]


def cudnn(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K H"],
  query_start: Int[Array, "B T"],
  key_start: Int[Array, "B T"],
  *,
  sliding_window: int | None = None,
) -> Float[Array, "B T N H"]:
  """Return cuDNN's flash attention for 16-bit types, with a [T, T] mask."""
  same = query_start[:, None, :, None] == key_start[:, None, None, :]
  if sliding_window is not None:
    columns = jnp.arange(key.shape[1], dtype=jnp.int32)
    is_near = columns[:, None] - columns[None] < sliding_window
    same &= is_near[None, None]
  return jax.nn.dot_product_attention(
    query, key, value, mask=same, is_causal=True, implementation="cudnn"
  )


IMPLEMENTATIONS: dict[str, PackedAttention] = {
  "xla": xla,
  "blocks": block_attention.blocks,
  "chunks": chunks,
  "splash": splash,
  "tokamax": tokamax,
  "cudnn": cudnn,
  "pallas_gpu": pallas_gpu,
}


def are_together(layout: mesh_lib.Layout) -> bool:
  """Return whether each device holds the kv heads of its query heads."""
  heads, kv_heads = (
    [axis for axis in axes if layout.mesh.shape[axis] > 1]
    for axes in (layout.rules.heads, layout.rules.kv_heads)
  )
  return heads == kv_heads


def _by_compiler(
  mask: Bool[Array, "B T T"],
  layout: mesh_lib.Layout | None,
  soft_cap: float | None,
) -> RowAttention:
  """Return the reference, split over the mesh by the compiler."""

  def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    if layout is None:
      return reference.xla_attention(query, key, value, mask, soft_cap)
    axes = "batch", "tokens", "heads", "head"
    kv_axes = "batch", None, "kv_heads", "head"
    mixed = reference.xla_attention(
      layout.constrain(query, *axes),
      layout.constrain(key, *kv_axes),
      layout.constrain(value, *kv_axes),
      mask,
      soft_cap,
    )
    return layout.constrain(mixed, *axes)

  return attend


# Implementations that accept a part of each row's queries; the others need
# whole rows.
_TAKE_PARTS = ("blocks", "chunks", "splash")
PLAIN = ("xla", "blocks", "chunks")
# For these, a window is only another `query_start`.
TAKE_ANY_WINDOW = (*PLAIN, "tokamax")


def over_rows(
  name: str,
  start: Int[Array, "B T"],
  num_heads: int,
  layout: mesh_lib.Layout | None = None,
  *,
  sliding_window: int | Int[Array, ""] | None = None,
  soft_cap: float | None = None,
  interpret: bool = False,
) -> RowAttention:
  """Return a function of query, key and value that attends over these rows.

  The compiler splits "xla". The other implementations run per device, on its
  rows, its heads and its part of the queries; keys are gathered over `context`.

  Args:
    name: of `IMPLEMENTATIONS`.
    start: `segment_start` of the rows.
    num_heads: query heads of the model.
    layout: of the mesh; None or a single device splits nothing.
    sliding_window: number of tokens that a query sees, itself included; None is
      all of its segment. For `TAKE_ANY_WINDOW` it may be an array.
    soft_cap: of the scores, as in `reference.xla_attention`.
    interpret: run splash without a TPU.

  Raises:
    NotImplementedError: there is a soft cap, and this is a kernel, none of
      which has one.
  """
  if name == "xla":
    first_seen = windowed_start(start, sliding_window)
    mask = _mask(first_seen, start.shape[1])
    return _by_compiler(mask, layout, soft_cap)
  implementation = IMPLEMENTATIONS[name]
  if soft_cap is not None:
    if name not in PLAIN:
      reference.refuse_soft_cap(soft_cap)
    implementation = functools.partial(implementation, soft_cap=soft_cap)
  query_start, own_window = start, sliding_window
  if name in TAKE_ANY_WINDOW:
    query_start, own_window = windowed_start(start, sliding_window), None
  if own_window is not None:
    assert isinstance(own_window, int), "a kernel's mask is not an array"
    implementation = functools.partial(
      implementation, sliding_window=own_window
    )
  if layout is None or all(layout.mesh.shape[x] == 1 for x in layout.axes):
    return lambda q, k, v: implementation(q, k, v, query_start, start)
  mesh, rules = layout.context, layout.rules
  # A head is never split, whatever the rules say, because scores are sums over
  # it.
  axes = "batch", "tokens", "heads"
  kv_axes = "batch", None, "kv_heads"
  if name not in _TAKE_PARTS:
    axes = "batch", None, "heads"
  if not are_together(layout):
    # Otherwise the query heads of a device would not belong to its kv heads.
    # The kv heads are repeated, one per query head, and split like query heads.
    kv_axes = "batch", None, "heads"
  parts = layout.parts("tokens") if name in _TAKE_PARTS else 1
  of_arrays = axes, kv_axes, kv_axes, axes[:2], ("batch", None)
  in_specs: list[Any] = [mesh_lib.spec(rules, names) for names in of_arrays]
  extra: tuple[Any, ...] = ()
  if name == "splash":
    heads = num_heads // layout.parts("heads")
    kernel = splash_kernel(
      start.shape[1],
      heads,
      parts=parts,
      sliding_window=own_window,
      interpret=interpret,
    )
    of_context = mesh_lib.sharding(mesh, rules, None, "tokens")
    in_specs.append(kernel.manual_sharding_spec(of_context))
    extra = (kernel,)

  def on_device(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_start: jax.Array,
    key_start: jax.Array,
    *kernel: Any,
  ) -> jax.Array:
    arguments = query, key, value, query_start, key_start
    if kernel:
      return splash(*arguments, kernel=kernel[0])
    if parts == 1:
      return implementation(*arguments)
    index = lax.axis_index(rules.tokens)
    return implementation(*arguments, index * query.shape[1])

  mapped = jax.shard_map(
    on_device,
    mesh=mesh,
    in_specs=tuple(in_specs),
    out_specs=in_specs[0],
    axis_names=layout.axes,
    check_vma=False,
  )

  def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    if kv_axes[2] == "heads":
      group = num_heads // key.shape[2]
      key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    return mapped(query, key, value, query_start, start, *extra)

  return attend


def over_layers(
  name: str,
  start: Int[Array, "B T"],
  num_heads: int,
  layout: mesh_lib.Layout | None,
  sliding_windows: Sequence[int | None],
  soft_cap: float | None = None,
) -> tuple[Callable[..., tuple[jax.Array, None]], Int[Array, "L"] | None]:
  """Return attention over these rows, for a decoder that scans its layers.

  Args:
    name: of `IMPLEMENTATIONS`.
    start: `segment_start` of the rows.
    num_heads: query heads of the model.
    layout: as in `over_rows`.
    sliding_windows: of each layer, as far as they matter in these rows.
    soft_cap: of the scores of all layers.

  Returns:
    The `attend` of `transformer.Decoder.hidden`, which keeps nothing, and the
    window of each layer, which the scan is to give it. If all layers have the
    same window, the latter is None.
  """
  over = functools.partial(
    over_rows, name, start, num_heads, layout, soft_cap=soft_cap
  )
  if len(set(sliding_windows)) == 1:
    mix = over(sliding_window=sliding_windows[0])
    return lambda _, q, k, v: (mix(q, k, v), None), None

  def attend(
    window: jax.Array, query: jax.Array, key: jax.Array, value: jax.Array
  ) -> tuple[jax.Array, None]:
    return over(sliding_window=window)(query, key, value), None

  length = start.shape[1]
  return attend, jnp.array([x or length for x in sliding_windows], jnp.int32)
