"""The choice of the attention over packed rows.

Of the platform's kernels, the trainer uses the first one that agrees with plain
XLA, in its gradients too. `kernel_choice` tries them on a device of the
training slice, with the heads, the windows and the dtype of the run.
"""

from collections.abc import Sequence

from absl import logging
import jax
from jax import numpy as jnp
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models.attention import kernel_choice
from jaxrl_async.models.attention import kernel_names
from jaxrl_async.models.attention import packed_attention

# Kernels by platform, in the order in which they are tried.
CANDIDATES = {"gpu": ("tokamax", "cudnn", "pallas_gpu"), "tpu": ("splash",)}
# Enough for several blocks of a kernel; the segments begin and end within them.
_TRIED_TOKENS = 640
_TRIED_SEGMENTS = 200, 1, 300, 139


def with_gradients(
  name: str, sliding_window: int | None
) -> kernel_choice.Implementation:
  """Return a function that computes the result and its gradients.

  The gradients are those of the weighted sum of the results, with respect to
  queries, keys and values.
  """

  def all_of_it(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    weights: jax.Array,
    start: jax.Array,
  ) -> tuple[jax.Array, ...]:
    window = kernel_choice.tried_window(sliding_window, start.shape[1])
    attend = packed_attention.over_rows(
      name, start, query.shape[2], sliding_window=window
    )
    mixed, gradients = jax.vjp(attend, query, key, value)
    return mixed, *gradients(weights)

  return all_of_it


def trial(
  heads: tuple[int, int, int], length: int, dtype: jnp.dtype
) -> kernel_choice.Trial:
  """Return the inputs of a trial: few tokens in several segments.

  The shapes are those of a whole row.
  """
  num_heads, num_kv_heads, head_dim = heads
  rng = np.random.default_rng(0)

  def shapes(length: int) -> tuple[tuple[int, ...], ...]:
    of_query = 1, length, num_heads, head_dim
    of_kv = 1, length, num_kv_heads, head_dim
    return of_query, of_kv, of_kv, of_query

  few = [
    rng.standard_normal(shape, np.float32).astype(dtype)
    for shape in shapes(_TRIED_TOKENS)
  ]
  firsts = np.cumsum([0, *_TRIED_SEGMENTS[:-1]])
  start = np.repeat(firsts, _TRIED_SEGMENTS)[None].astype(np.int32)
  return kernel_choice.Trial(
    arguments=(*few, start),
    shapes=(
      *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes(length)),
      jax.ShapeDtypeStruct((1, length), np.int32),
    ),
  )


def choose(
  wanted: str,
  *,
  num_heads: int,
  num_kv_heads: int,
  head_dim: int,
  tokens_per_row: int,
  dtype: jnp.dtype,
  layout: mesh_lib.Layout,
  sliding_windows: Sequence[int | None] = (None,),
) -> str:
  """Return the name of the implementation that a run takes.

  Kernels are tried first, and the choice is logged. If no kernel works, the
  choice is "blocks", on a GPU "chunks", and "xla" for rows of at most two
  blocks.

  Args:
    wanted: `kernel_names.AUTO`, or a name that must then work.
    num_heads: query heads of the whole model.
    num_kv_heads: key and value heads of the whole model.
    head_dim: size of a head.
    tokens_per_row: of the run.
    dtype: of the forward pass.
    layout: of the training slice.
    sliding_windows: the window of each layer, as far as it matters in rows of
      this length.

  Raises:
    ConfigError: there is no such name, or it does not work here.
  """
  field = "train.attention"
  kernel_names.check_packed(wanted)
  if wanted in packed_attention.PLAIN:
    return wanted
  mesh, rules = layout.mesh, layout.rules
  device = mesh.devices.flat[0]
  candidates = CANDIDATES
  parts = layout.parts("tokens")
  if parts > 1 and tokens_per_row % (parts * packed_attention.BLOCK):
    sections.require(
      wanted != "splash",
      field,
      f"splash needs rows of {parts} times a multiple of"
      f" {packed_attention.BLOCK} tokens; change train.tokens_per_row, or use"
      " blocks",
    )
    candidates = {}
  any_window = packed_attention.TAKE_ANY_WINDOW
  window, *others = set(sliding_windows)
  if others:
    sections.require(
      wanted in (kernel_names.AUTO, *any_window),
      field,
      f"{wanted} needs the same sliding window in all layers, and this model"
      f" has it in some; use auto, {', '.join(any_window)}",
    )
    candidates = {
      platform: tuple(name for name in names if name in any_window)
      for platform, names in candidates.items()
    }
    window = min(filter(None, sliding_windows))

  def held(axis: str, size: int) -> int:
    return mesh_lib.sharding(mesh, rules, axis).shard_shape((size,))[0]

  num_heads = held("heads", num_heads)
  num_kv_heads = held("kv_heads", num_kv_heads)
  if not packed_attention.are_together(layout):
    num_kv_heads = num_heads
  name, refused = kernel_choice.pick(
    field,
    wanted,
    candidates,
    {
      name: with_gradients(name, window)
      for name in packed_attention.IMPLEMENTATIONS
    },
    lambda: trial((num_heads, num_kv_heads, head_dim), tokens_per_row, dtype),
    device,
  )
  if name == "xla" and tokens_per_row > 2 * packed_attention.BLOCK:
    name = "chunks" if device.platform == "gpu" else "blocks"
  description = name
  for other, reason in refused.items():
    description += f"; not {other}: {reason}"
  log = logging.warning if refused else logging.info
  log("attention over packed rows on %s: %s", device.platform, description)
  return name
