"""The choice of the engine's attention implementations.

Of the platform's candidates the engine uses the first one that agrees with
XLA. `kernel_choice` tries them on the first device of the rollout mesh, with
the heads, head size, page size and dtype of the run.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
from typing import Any

from absl import logging
import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import topology
from jaxrl_async.engine import kv_cache
from jaxrl_async.engine import paged_attention
from jaxrl_async.engine.decode_state import EngineSizes
from jaxrl_async.models import configs
from jaxrl_async.models.attention import kernel_choice
from jaxrl_async.models.attention import kernel_names
from jaxrl_async.models.attention import reference

# Kernels by platform, in the order in which they are tried.
PREFILL_CANDIDATES = {"gpu": ("cudnn",), "tpu": ("splash",)}
DECODE_CANDIDATES = {"gpu": ("gpu_paged",), "tpu": ("tpu_paged",)}

_DECODE_TOKENS = 1024  # at least two blocks of every kernel
_PREFILL_TOKENS = 256


# Returns an array of the given shape, or only its description.
Make = Callable[[tuple[int, ...]], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """The attention of prefill and decode, for the whole rollout mesh.

  Attributes:
    description: the names of the implementations, and the reasons why others
      were not chosen.
  """

  prefill: reference.CausalAttention
  decode: kv_cache.PagedAttention
  description: str


def _random(rng: np.random.Generator, dtype: jnp.dtype) -> Make:
  return lambda shape: rng.standard_normal(shape, np.float32).astype(dtype)


def prefill_trial(
  heads: tuple[int, int, int], sizes: EngineSizes, rows: int, dtype: jnp.dtype
) -> kernel_choice.Trial:
  """Return inputs for trying prefill attention: a few rows of several lengths.

  They are arguments of the functions in `reference.CAUSAL`.

  Args:
    heads: number of query heads and of kv heads per device, and the head size.
    sizes: shapes of the engine's programs.
    rows: number of rows per device.
    dtype: dtype of the cache.
  """
  num_heads, num_kv_heads, head_dim = heads

  def arguments(make: Make, rows: int, length: int) -> tuple[Any, ...]:
    of_kv = rows, length, num_kv_heads, head_dim
    return make((rows, length, num_heads, head_dim)), make(of_kv), make(of_kv)

  def shape(shape: tuple[int, ...], dtype: Any = dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)

  rng = np.random.default_rng(0)
  lengths = np.array([1, 100, _PREFILL_TOKENS], np.int32)
  few = arguments(_random(rng, dtype), len(lengths), _PREFILL_TOKENS)
  longest = sizes.prefill_buckets[-1]
  return kernel_choice.Trial(
    arguments=(*few, lengths),
    shapes=(*arguments(shape, rows, longest), shape((rows,), jnp.int32)),
  )


def of_tokens(
  attend: reference.CausalAttention, windows: Iterable[int | None] = (None,)
) -> kernel_choice.Implementation:
  """Return attention under each window, 0 at padding if it was finite there.

  Implementations may return different values at padding, and only results at
  tokens are to be compared. Values that are not finite become NaN, so that the
  comparison still finds them.
  """

  def masked(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array
  ) -> list[jax.Array]:
    length = query.shape[1]
    is_token = jnp.arange(length)[None] < lengths[:, None]
    is_token = is_token[:, :, None, None].astype(query.dtype)
    results = []
    for window in windows:
      window = kernel_choice.tried_window(window, length)
      mixed = attend(query, key, value, lengths, sliding_window=window)
      results.append(mixed * is_token)
    return results

  return masked


def decode_trial(
  heads: tuple[int, int, int], sizes: EngineSizes, slots: int, dtype: jnp.dtype
) -> kernel_choice.Trial:
  """Return inputs for trying decode attention over a few pages.

  They are arguments of the functions in `paged_attention.IMPLEMENTATIONS`. Some
  pages are full and some are not. As in a run, the entries of a table past the
  end of its sequence are out of range.

  Args:
    heads: number of query heads and of kv heads per device, and the head size.
    sizes: shapes of the engine's programs.
    slots: number of slots per device.
    dtype: dtype of the cache.
  """
  num_heads, num_kv_heads, head_dim = heads
  page_tokens = sizes.page_tokens

  def arguments(make: Make, rows: int, num_pages: int) -> tuple[Any, Any]:
    pool = num_kv_heads, num_pages, page_tokens, head_dim
    return (make(pool), make(pool)), make((rows, num_heads, head_dim))

  def shape(shape: tuple[int, ...], dtype: Any = dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)

  rng = np.random.default_rng(0)
  width = -(-_DECODE_TOKENS // page_tokens)
  full, num_pages = width * page_tokens, width + 3
  positions = np.array([0, page_tokens, full // 2, full - 1], np.int32)
  pages = rng.integers(0, num_pages, (len(positions), width), np.int32)
  is_past = np.arange(width)[None] > positions[:, None] // page_tokens
  pages = np.where(is_past, np.int32(num_pages), pages)
  few = arguments(_random(rng, dtype), len(positions), num_pages)
  table = slots, sizes.pages_per_slot
  return kernel_choice.Trial(
    arguments=(*few, positions, pages),
    shapes=(
      *arguments(shape, slots, sizes.num_pages),
      shape((slots,), jnp.int32),
      shape(table, jnp.int32),
    ),
  )


def choose(
  wanted: str,
  *,
  model: configs.ModelConfig,
  sizes: EngineSizes,
  dtype: jnp.dtype,
  mesh: Mesh,
  rules: sections.ShardingRules,
) -> Choice:
  """Try the platform's implementations, and log which ones are chosen.

  The line in the log is a warning if a candidate was refused, because the run
  is then slower than one would expect on this platform.

  Args:
    wanted: kernel_names.AUTO, or a name in `reference.CAUSAL` or
      `paged_attention.IMPLEMENTATIONS`. A named implementation must work. If
      only one of the two has the name, the other uses "xla".
    model: the model whose heads are tried.
    sizes: shapes of the engine's programs. Decoding from a cache of slots is
      always done by XLA.
    dtype: dtype of the cache.
    mesh: mesh of the rollout slice.
    rules: sharding rules of the rollout slice.

  Raises:
    ConfigError: there is no such name, or the implementation does not work
      here.
  """
  kernel_names.check_rollout(wanted, has_pages=sizes.num_pages > 0)
  decode = paged_attention.IMPLEMENTATIONS
  if mesh.size > 1 and rules.heads != rules.kv_heads:
    if wanted not in (kernel_names.AUTO, "xla"):
      raise sections.ConfigError(
        f"rollout.attention: {wanted} needs query heads where their kv heads"
        " are; give mesh.rollout_rules.heads and kv_heads the same axes"
      )
    wanted = "xla"
  device = mesh.devices.flat[0]

  def held(axis: str | None, size: int) -> int:
    return mesh_lib.sharding(mesh, rules, axis).shard_shape((size,))[0]

  rows_axis = sizes.prefill_rows_axis(mesh_lib.Layout(mesh=mesh, rules=rules))

  heads = (
    held("heads", model.num_heads),
    held("kv_heads", model.num_kv_heads),
    model.head_dim,
  )
  windows = set(model.windows_within(sizes.prefill_buckets[-1]))
  prefill_name, refused = kernel_choice.pick(
    "rollout.attention",
    wanted,
    PREFILL_CANDIDATES,
    {
      name: of_tokens(attend, sorted(windows, key=str))
      for name, attend in reference.CAUSAL.items()
    },
    lambda: prefill_trial(
      heads, sizes, held(rows_axis, sizes.prefill_rows), dtype
    ),
    device,
  )
  decode_name, cache = "xla", "slots"
  if sizes.num_pages:
    slots = held("batch", sizes.num_slots)
    windows = set(model.windows_within(sizes.cache_tokens)) - {None}
    window = windows.pop() if windows else None
    decode_name, too = kernel_choice.pick(
      "rollout.attention",
      wanted,
      DECODE_CANDIDATES,
      {
        name: functools.partial(attend, sliding_window=window)
        for name, attend in decode.items()
      },
      lambda: decode_trial(heads, sizes, slots, dtype),
      device,
    )
    refused, cache = {**refused, **too}, "pages"
  description = f"prefill {prefill_name}, decode {decode_name} over {cache}"
  if topology.is_described(device):
    description += " (they compile; whether they are right was not tried)"
  for name, reason in refused.items():
    description += f"; not {name}: {reason}"
  log = logging.warning if refused else logging.info
  log("attention on %s: %s", device.platform, description)

  of_prefill, of_decode = _specs(rules, rows_axis)
  return Choice(
    prefill=over_mesh(reference.CAUSAL, prefill_name, mesh, of_prefill),
    decode=over_mesh(decode, decode_name, mesh, of_decode),
    description=description,
  )


def _specs(rules: sections.ShardingRules, rows_axis: str | None) -> Any:
  """Return how arguments and results of prefill and of decode are split."""
  rows, lengths, slot_heads, slot, pool = (
    mesh_lib.spec(rules, axes)
    for axes in (
      (rows_axis, None, "heads"),
      (rows_axis,),
      ("batch", "heads"),
      ("batch",),
      ("kv_heads",),
    )
  )
  of_prefill = (rows, rows, rows, lengths), rows
  of_decode = ((pool, pool), slot_heads, slot, slot), slot_heads
  return of_prefill, of_decode


def over_mesh(
  implementations: Mapping[str, Callable[..., jax.Array]],
  name: str,
  mesh: Mesh,
  specs: tuple[Any, P],
) -> Callable[..., jax.Array]:
  """Return an implementation that runs on the whole mesh.

  The compiler partitions XLA's attention by itself. A kernel runs on a single
  device, so each device applies it to the heads and slots that it holds.

  Args:
    implementations: implementations by name.
    name: the name of the chosen one.
    mesh: mesh of the rollout slice.
    specs: partition specs of the arguments and of the result.
  """
  attend = implementations[name]
  if name == "xla" or mesh.size == 1:
    return attend
  arguments, result = specs

  def on_mesh(*arrays: Any, sliding_window: int | None = None) -> jax.Array:
    mapped = jax.shard_map(
      functools.partial(attend, sliding_window=sliding_window),
      mesh=mesh,
      in_specs=arguments,
      out_specs=result,
      check_vma=False,
    )
    return mapped(*arrays)

  return on_mesh
