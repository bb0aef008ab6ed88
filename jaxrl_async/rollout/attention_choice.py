"""Which attention the engine takes: the first of the platform's that agrees.

A kernel is tried once, on the rollout mesh's first device, with the model's
heads, head size, page and dtype but few tokens, and compared with plain XLA at
full precision; then it is compiled at the engine's sizes, which may be too
large for it. One that cannot be imported, lowered, compiled or run is passed
over, for a stated set of errors; any other error is a bug, and raised.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from absl import logging
import jax
from jax import numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from jaxrl_async import config
from jaxrl_async.models import attention
from jaxrl_async.models import configs
from jaxrl_async.rollout import kv_cache
from jaxrl_async.rollout import paged_attention
from jaxrl_async.rollout.decode_state import EngineSizes

AUTO = "auto"
# By platform, in the order in which they are tried.
PREFILL_CANDIDATES = {"gpu": ("cudnn",), "tpu": ("splash",)}
DECODE_CANDIDATES = {"gpu": ("gpu_paged",), "tpu": ("tpu_paged",)}
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}

_HEADS = P(None, None, "tensor")
_PREFILL_SPECS = (_HEADS, _HEADS, _HEADS, P()), _HEADS
_POOL, _ROWS = P("tensor"), P("data")
_DECODE_SPECS = (
  ((_POOL, _POOL), P("data", "tensor"), _ROWS, _ROWS),
  P("data", "tensor"),
)

_DECODE_TOKENS = 1024  # two blocks of any kernel
_PREFILL_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """What an implementation is tried on.

  Attributes:
    arguments: few tokens.
    shapes: of the engine's largest call.
  """

  arguments: tuple[Any, ...]
  shapes: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
  """What prefill and decode run, for the whole rollout mesh.

  Attributes:
    description: their names, and why others are not taken.
  """

  prefill: attention.CausalAttention
  decode: kv_cache.PagedAttention
  description: str


def refusals() -> tuple[type[Exception], ...]:
  """What a kernel that does not fit raises somewhere on its way to a device.

  RuntimeError covers JaxRuntimeError (a compiler's and a device's errors),
  NotImplementedError and a cuDNN that is not there.
  """
  # Those of Pallas have no public name but one, and no base of their own.
  from jax._src.pallas.mosaic import error_handling
  from jax._src.pallas.triton import lowering
  from jax.experimental.pallas import tpu

  return (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    ImportError,
    error_handling.MosaicError,
    lowering.LoweringError,
    tpu.LoweringException,
  )


def refusal(
  attend: Callable[..., jax.Array],
  trial: Trial,
  expected: np.ndarray,
  tolerance: float,
) -> str:
  """Why an implementation is not to be taken; "" when it is right."""
  compiled = jax.jit(attend)
  try:
    found = np.asarray(compiled(*trial.arguments), np.float32)
    compiled.lower(*trial.shapes).compile()
  except refusals() as error:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
  if np.allclose(found, expected, rtol=tolerance, atol=tolerance):
    return ""
  return f"it is off by {np.abs(found - expected).max():.2g}"


def first_right(
  names: Sequence[str],
  implementations: Mapping[str, Callable[..., jax.Array]],
  trial: Trial,
  tolerance: float,
) -> tuple[str, dict[str, str]]:
  """The first name whose implementation agrees with "xla", which is the last.

  Returns:
    It, and why each one before it was not taken.
  """
  with jax.default_matmul_precision("highest"):
    expected = jax.jit(implementations["xla"])(*trial.arguments)
  expected = np.asarray(expected, np.float32)
  refused = {}
  for name in names:
    reason = refusal(implementations[name], trial, expected, tolerance)
    if not reason:
      return name, refused
    refused[name] = reason
  return "xla", refused


def _random(rng: np.random.Generator, dtype: jnp.dtype):
  return lambda shape: rng.standard_normal(shape, np.float32).astype(dtype)


def prefill_trial(
  heads: tuple[int, int, int], sizes: EngineSizes, dtype: jnp.dtype
) -> Trial:
  """Arguments of `attention.CAUSAL`: few rows, of several lengths.

  Args:
    heads: query heads and kv heads of a device, and the size of a head.
    sizes: of the engine.
    dtype: of the cache.
  """
  num_heads, num_kv_heads, head_dim = heads

  def arguments(make, rows, length):
    of_kv = rows, length, num_kv_heads, head_dim
    return make((rows, length, num_heads, head_dim)), make(of_kv), make(of_kv)

  def shape(shape, dtype=dtype):
    return jax.ShapeDtypeStruct(shape, dtype)

  rng = np.random.default_rng(0)
  lengths = np.array([1, 100, _PREFILL_TOKENS], np.int32)
  few = arguments(_random(rng, dtype), len(lengths), _PREFILL_TOKENS)
  rows, longest = sizes.prefill_rows, sizes.prefill_buckets[-1]
  return Trial(
    arguments=(*few, lengths),
    shapes=(*arguments(shape, rows, longest), shape((rows,), jnp.int32)),
  )


def of_tokens(attend: attention.CausalAttention) -> attention.CausalAttention:
  """Padding comes out as 0, unless it was not finite."""

  def masked(query, key, value, lengths):
    mixed = attend(query, key, value, lengths)
    is_token = jnp.arange(mixed.shape[1])[None] < lengths[:, None]
    return mixed * is_token[:, :, None, None].astype(mixed.dtype)

  return masked


def decode_trial(
  heads: tuple[int, int, int], sizes: EngineSizes, slots: int, dtype: jnp.dtype
) -> Trial:
  """Arguments of `paged_attention.IMPLEMENTATIONS`: few pages, full and not.

  As in a run, a table's entries past its row's end are out of range.

  Args:
    heads: query heads and kv heads of a device, and the size of a head.
    sizes: of the engine.
    slots: of a device.
    dtype: of the cache.
  """
  num_heads, num_kv_heads, head_dim = heads
  page_tokens = sizes.page_tokens

  def arguments(make, rows, num_pages):
    pool = num_kv_heads, num_pages, page_tokens, head_dim
    return (make(pool), make(pool)), make((rows, num_heads, head_dim))

  def shape(shape, dtype=dtype):
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
  return Trial(
    arguments=(*few, positions, pages),
    shapes=(
      *arguments(shape, slots, sizes.num_pages),
      shape((slots,), jnp.int32),
      shape(table, jnp.int32),
    ),
  )


def _pick(
  wanted: str,
  candidates: Mapping[str, tuple[str, ...]],
  implementations: Mapping[str, Callable[..., jax.Array]],
  make_trial: Callable[[], Trial],
  device: Any,
) -> tuple[str, dict[str, str]]:
  """As `first_right`; where only "xla" is left, nothing is compiled."""
  if wanted == AUTO:
    names = candidates.get(device.platform, ())
  else:
    names = tuple({wanted} & implementations.keys() - {"xla"})
  if not names:
    return "xla", {}
  trial = make_trial()
  on_device = SingleDeviceSharding(device)
  trial = Trial(
    arguments=jax.device_put(trial.arguments, on_device),
    shapes=jax.tree.map(lambda x: x.update(sharding=on_device), trial.shapes),
  )
  tolerance = TOLERANCES[jax.tree.leaves(trial.shapes)[0].dtype.name]
  name, refused = first_right(names, implementations, trial, tolerance)
  if wanted in refused:
    raise config.ConfigError(
      f"rollout.attention: {wanted} does not work here ({refused[wanted]});"
      f" use {AUTO} or xla"
    )
  return name, refused


def choose(
  wanted: str,
  *,
  model: configs.ModelConfig,
  sizes: EngineSizes,
  dtype: jnp.dtype,
  mesh: Mesh,
) -> Choice:
  """Tries what the platform has, and logs what is taken.

  The line is a warning when something is not: a run is slower than it seems.

  Args:
    wanted: AUTO, or a name of `attention.CAUSAL` or
      `paged_attention.IMPLEMENTATIONS`, which then has to work; what the name
      is not of takes "xla".
    model: whose heads are tried.
    sizes: of the engine; a cache of slots has XLA only.
    dtype: of the cache.
    mesh: of the rollout slice.

  Raises:
    ConfigError: no such name, or it does not work here.
  """
  decode = paged_attention.IMPLEMENTATIONS
  known = dict.fromkeys((AUTO, *attention.CAUSAL, *decode))
  if wanted not in known:
    raise config.ConfigError(
      f"rollout.attention: {wanted!r} is not one of {', '.join(known)}"
    )
  if not sizes.num_pages and wanted in decode.keys() - {"xla"}:
    raise config.ConfigError(
      f"rollout.attention: {wanted} reads pages, and rollout.num_pages is 0"
    )
  device = mesh.devices.flat[0]
  parts = mesh.shape["tensor"]
  heads = model.num_heads // parts, model.num_kv_heads // parts, model.head_dim
  prefill_name, refused = _pick(
    wanted,
    PREFILL_CANDIDATES,
    {name: of_tokens(attend) for name, attend in attention.CAUSAL.items()},
    lambda: prefill_trial(heads, sizes, dtype),
    device,
  )
  decode_name, cache = "xla", "slots"
  if sizes.num_pages:
    slots = sizes.num_slots // mesh.shape["data"]
    decode_name, too = _pick(
      wanted,
      DECODE_CANDIDATES,
      decode,
      lambda: decode_trial(heads, sizes, slots, dtype),
      device,
    )
    refused, cache = {**refused, **too}, "pages"
  description = f"prefill {prefill_name}, decode {decode_name} over {cache}"
  for name, reason in refused.items():
    description += f"; not {name}: {reason}"
  log = logging.warning if refused else logging.info
  log("attention on %s: %s", device.platform, description)
  return Choice(
    prefill=over_mesh(attention.CAUSAL, prefill_name, mesh, _PREFILL_SPECS),
    decode=over_mesh(decode, decode_name, mesh, _DECODE_SPECS),
    description=description,
  )


def over_mesh(
  implementations: Mapping[str, Callable[..., jax.Array]],
  name: str,
  mesh: Mesh,
  specs: tuple[Any, P],
) -> Callable[..., jax.Array]:
  """An implementation for the whole mesh.

  XLA's is split by the compiler; a kernel is of one device, and each gets the
  heads and slots that it holds.

  Args:
    implementations: by name.
    name: which of them.
    mesh: of the rollout slice.
    specs: of its arguments and of its result.
  """
  attend = implementations[name]
  if name == "xla" or mesh.size == 1:
    return attend
  arguments, result = specs
  return jax.shard_map(
    attend,
    mesh=mesh,
    in_specs=arguments,
    out_specs=result,
    check_vma=False,
  )
