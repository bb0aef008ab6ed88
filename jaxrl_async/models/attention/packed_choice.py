"""The choice of the attention over packed rows.

Of the platform's kernels, the trainer uses the first one that agrees with plain
XLA, in its gradients too. `kernel_choice` tries them on a device of the
training slice, with the heads, the windows and the dtype of the run.
"""

from collections.abc import Callable, Sequence

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
CANDIDATES = {"gpu": ("cudnn", "pallas_gpu"), "tpu": ("splash",)}
_TRIED_TOKENS = 256


def with_gradients(
  name: str, sliding_window: int | None
) -> Callable[..., jax.Array]:
  """Return a function that computes result and gradients as one flat array.

  The gradients are those of the sum of the squared results.
  """

  def all_of_it(
    query: jax.Array, key: jax.Array, value: jax.Array, start: jax.Array
  ) -> jax.Array:
    window = kernel_choice.tried_window(sliding_window, start.shape[1])
    attend = packed_attention.over_rows(
      name, start, query.shape[2], sliding_window=window
    )

    def total(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
      mixed = attend(*inputs)
      wide = mixed.astype(jnp.float32)
      return (wide * wide).sum(), mixed

    gradients, mixed = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(
      query, key, value
    )
    flat = [x.astype(jnp.float32).reshape(-1) for x in (mixed, *gradients)]
    return jnp.concatenate(flat)

  return all_of_it


def trial(
  heads: tuple[int, int, int], length: int, dtype: jnp.dtype
) -> kernel_choice.Trial:
  """Return the inputs of a trial: few tokens in three segments.

  The shapes are those of a whole row.
  """
  num_heads, num_kv_heads, head_dim = heads
  rng = np.random.default_rng(0)

  def shapes(length: int) -> tuple[tuple[int, ...], ...]:
    of_kv = 1, length, num_kv_heads, head_dim
    return (1, length, num_heads, head_dim), of_kv, of_kv

  few = [
    rng.standard_normal(shape, np.float32).astype(dtype)
    for shape in shapes(_TRIED_TOKENS)
  ]
  start = np.repeat([0, 100, 101], [100, 1, _TRIED_TOKENS - 101])
  return kernel_choice.Trial(
    arguments=(*few, start[None].astype(np.int32)),
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
  choice is "blocks", or "xla" for rows of at most two blocks.

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
  window, *others = set(sliding_windows)
  if others:
    sections.require(
      wanted == kernel_names.AUTO,
      field,
      f"{wanted} needs the same sliding window in all layers, and this model"
      " has it in some; use auto, xla or blocks",
    )
    candidates = {}

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
    name = "blocks"
  description = name
  for other, reason in refused.items():
    description += f"; not {other}: {reason}"
  log = logging.warning if refused else logging.info
  log("attention over packed rows on %s: %s", device.platform, description)
  return name
