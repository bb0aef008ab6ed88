"""The choice of attention implementations: the first that works and agrees.

It is made for packed rows in the trainer (`for_training`), and for prefill and
decoding in the engine (`for_engine`), with the heads, windows and dtype of the
run. Each kernel of the platform is run once, on one device and with few tokens.
Its results are compared with those of plain XLA in float32, computed from the
same inputs. A kernel agrees if none of its arrays is further away than three
times the error that plain XLA makes in the dtype of the run. In bfloat16 that
is about 0.7 % of the array's norm: rounding alone costs 0.2 to 0.5 %, and a
kernel that is wrong by 1 % is refused.

A kernel that agrees is then compiled at the sizes of the run, which may be too
large for it. A kernel that cannot be imported, lowered, compiled or run is
skipped. An error that is neither the compiler's nor one that kernels raise for
shapes they do not take is a bug and is raised.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from absl import logging
import jax
from jax import numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import topology
from jaxrl_async.models.attention import kernel_errors
from jaxrl_async.models.attention import kernel_names
from jaxrl_async.models.attention import packed_attention
from jaxrl_async.models.attention import paged_attention
from jaxrl_async.models.attention import reference

_ROLLOUT = "rollout.attention"  # the setting, for messages
# Kernels by platform, in the order in which they are tried.
PACKED = {"gpu": ("tokamax", "cudnn", "pallas_gpu"), "tpu": ("splash",)}
PREFILL = {"gpu": ("cudnn",), "tpu": ("splash",)}
DECODE = {"gpu": ("gpu_paged",), "tpu": ("tpu_paged",)}

# Errors are the norm of the difference, relative to the norm of what is right.
_TIMES_XLA = 3.0
# Of float32, where XLA itself may be exact: two orders of summation.
_LEAST = 1e-5
# Segments of the packed row that is tried, several blocks of a kernel. They
# begin and end within blocks.
_SEGMENTS = 200, 1, 300, 139
_PREFILL_TOKENS = 256
_DECODE_TOKENS = 1024  # at least two blocks of every kernel

# One array or several.
Results = Any
Implementation = Callable[..., Results]
# Numbers of query heads and of kv heads on a device, and the size of a head.
Heads = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """Inputs for trying an implementation.

  Attributes:
    arguments: few tokens; empty for a device that is only described.
    shapes: shapes of the largest call of the run.
  """

  arguments: tuple[Any, ...]
  shapes: tuple[Any, ...]


# -- the trial ----------------------------------------------------------------


def _distances(found: Results, expected: Results) -> np.ndarray:
  """Return the distance of each array from the right one, relative to its norm.

  An array of zeros is compared absolutely.
  """

  def distance(x: Any, right: Any) -> np.floating[Any]:
    wide, right = (np.asarray(a, np.float32) for a in (x, right))
    return np.linalg.norm(wide - right) / (np.linalg.norm(right) or 1.0)

  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  return np.array([distance(*pair) for pair in pairs])


@dataclasses.dataclass(frozen=True)
class Reference:
  """What a kernel is compared with.

  Attributes:
    results: of plain XLA in float32; None if no device can run programs.
    allowed: the largest distance from each of them.
  """

  results: Results
  allowed: np.ndarray

  @classmethod
  def of(cls, attend: Implementation, trial: Trial) -> "Reference":
    """Compute the results of plain XLA, and how exact they are in the dtype.

    Args:
      attend: plain XLA.
      trial: its inputs.
    """
    if not trial.arguments:
      return cls(None, np.zeros(()))
    with jax.default_matmul_precision("highest"):
      results = jax.jit(attend)(*jax.tree.map(_widened, trial.arguments))
    own = _distances(jax.jit(attend)(*trial.arguments), results)
    return cls(results, np.maximum(_TIMES_XLA * own, _LEAST))

  def errors(self, attend: Implementation, trial: Trial) -> np.ndarray:
    """Return how far each result of an implementation is from the right one."""
    return _distances(jax.jit(attend)(*trial.arguments), self.results)


def _widened(array: Any) -> Any:
  """Return an array of floats as the same numbers in float32."""
  is_float = jnp.issubdtype(array.dtype, jnp.floating)
  return array.astype(jnp.float32) if is_float else array


def refusal(attend: Implementation, trial: Trial, expected: Reference) -> str:
  """Return why an implementation cannot be used, or "" if it agrees.

  Args:
    attend: the implementation.
    trial: what it is run and compiled with.
    expected: what it is compared with. Where nothing can run, a kernel that
      compiles is assumed to be right.
  """
  try:
    if trial.arguments:
      errors = expected.errors(attend, trial)
      # NaN is no error that is small enough.
      if not (is_close := errors <= expected.allowed).all():
        worst = errors[~is_close].max()
        return f"it is off by {worst:.2g} of the norm"
    jax.jit(attend).lower(*trial.shapes).compile()
  except kernel_errors.refusals() as error:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
  return ""


def first_right(
  names: Sequence[str],
  implementations: Mapping[str, Implementation],
  trial: Trial,
) -> tuple[str, dict[str, str]]:
  """Return the first name whose implementation agrees with "xla".

  Args:
    names: in the order in which they are tried.
    implementations: by name, "xla" among them.
    trial: what they are run and compiled with.

  Returns:
    The name, which is "xla" if no other works, and the reason why each name
    before it was not chosen.
  """
  expected = Reference.of(implementations["xla"], trial)
  refused = {}
  for name in names:
    reason = refusal(implementations[name], trial, expected)
    if not reason:
      return name, refused
    refused[name] = reason
  return "xla", refused


def _pick(
  field: str,
  wanted: str,
  candidates: Mapping[str, tuple[str, ...]],
  implementations: Mapping[str, Implementation],
  make_trial: Callable[[], Trial],
  device: Any,
) -> tuple[str, dict[str, str]]:
  """Choose an implementation for a device, as `first_right` does.

  If only "xla" is left, nothing is compiled.

  Args:
    field: of the config, for messages.
    wanted: "auto", or a name that must then work. A name that is not among
      these implementations leaves "xla".
    candidates: names that "auto" tries, by platform.
    implementations: by name.
    make_trial: returns the inputs of the trial.
    device: one of the devices of the run. On a described device, which cannot
      run programs, a kernel is chosen if it compiles.

  Raises:
    ConfigError: the wanted implementation does not work.
  """
  if wanted == kernel_names.AUTO:
    names = candidates.get(device.platform, ())
  else:
    names = tuple({wanted} & implementations.keys() - {"xla"})
  if not names:
    return "xla", {}
  trial = make_trial()
  on_device = SingleDeviceSharding(device)
  is_there = not topology.is_described(device)
  trial = Trial(
    arguments=jax.device_put(trial.arguments, on_device) if is_there else (),
    shapes=jax.tree.map(lambda x: x.update(sharding=on_device), trial.shapes),
  )
  name, refused = first_right(names, implementations, trial)
  if wanted in refused:
    raise sections.ConfigError(
      f"{field}: {wanted} does not work here ({refused[wanted]});"
      f" use {kernel_names.AUTO} or xla"
    )
  return name, refused


def _told(
  what: str, device: Any, chosen: str, refused: Mapping[str, str]
) -> str:
  """Log what was chosen and why nothing else, and return that.

  The line is a warning if a candidate was refused, because the run is then
  slower than one would expect on this platform.
  """
  reasons = [f"not {name}: {reason}" for name, reason in refused.items()]
  description = "; ".join([chosen, *reasons])
  log = logging.warning if refused else logging.info
  log("attention %s on %s: %s", what, device.platform, description)
  return description


def _shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, dtype)


def _random(shapes: Any) -> Any:
  """Return normal numbers in the place of each shape."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: rng.standard_normal(x.shape, np.float32).astype(x.dtype), shapes
  )


def _qkv(
  heads: Heads, rows: int, length: int, dtype: jnp.dtype
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Return the shapes of queries, keys and values of rows."""
  num_heads, num_kv_heads, head_dim = heads
  of_kv = _shape(dtype, rows, length, num_kv_heads, head_dim)
  return _shape(dtype, rows, length, num_heads, head_dim), of_kv, of_kv


def _tried_window(window: int | None, num_tokens: int) -> int | None:
  """Return the window for a call of this length, which may be a trial's.

  A trial may have fewer tokens than the window. It then gets a window of half
  its length, so that the window is tried at all.
  """
  if window is None or window < num_tokens:
    return window
  return num_tokens // 2


def _held(
  mesh: Mesh, rules: sections.ShardingRules, axis: str | None, size: int
) -> int:
  """Return how many of an axis each device holds."""
  return mesh_lib.sharding(mesh, rules, axis).shard_shape((size,))[0]


# -- packed rows --------------------------------------------------------------


def with_gradients(
  name: str, sliding_window: int | None, soft_cap: float | None = None
) -> Implementation:
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
    window = _tried_window(sliding_window, start.shape[1])
    attend = packed_attention.over_rows(
      name,
      start,
      query.shape[2],
      sliding_window=window,
      soft_cap=soft_cap,
    )
    mixed, gradients = jax.vjp(attend, query, key, value)
    return mixed, *gradients(weights)

  return all_of_it


def packed_trial(heads: Heads, length: int, dtype: jnp.dtype) -> Trial:
  """Return a row of several segments, and the shapes of a row of a run."""

  def shapes(length: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    query, key, value = _qkv(heads, 1, length, dtype)
    return query, key, value, query

  firsts = np.cumsum([0, *_SEGMENTS[:-1]])
  start = np.repeat(firsts, _SEGMENTS)[None].astype(np.int32)
  return Trial(
    arguments=(*_random(shapes(sum(_SEGMENTS))), start),
    shapes=(*shapes(length), _shape(np.int32, 1, length)),
  )


def for_training(
  wanted: str,
  *,
  heads: Heads,
  tokens_per_row: int,
  dtype: jnp.dtype,
  layout: mesh_lib.Layout,
  sliding_windows: Sequence[int | None] = (None,),
  soft_cap: float | None = None,
) -> str:
  """Return the name of the implementation for packed rows that a run takes.

  Kernels are tried first, their gradients too, and the choice is logged. If no
  kernel works, the choice is "blocks", on a GPU "chunks", and "xla" for rows of
  at most two blocks.

  Args:
    wanted: `kernel_names.AUTO`, or a name that must then work.
    heads: of the whole model.
    tokens_per_row: of the run.
    dtype: of the forward pass.
    layout: of the training slice.
    sliding_windows: the window of each layer, as far as it matters in rows of
      this length.
    soft_cap: of the scores of all layers.

  Raises:
    ConfigError: there is no such name, or it does not work here.
  """
  field = "train.attention"
  kernel_names.check_packed(wanted)
  if wanted in packed_attention.PLAIN:
    return wanted
  mesh, rules = layout.mesh, layout.rules
  device = mesh.devices.flat[0]
  candidates = PACKED
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
  num_heads = _held(mesh, rules, "heads", heads[0])
  num_kv_heads = _held(mesh, rules, "kv_heads", heads[1])
  if not packed_attention.are_together(layout):
    num_kv_heads = num_heads
  name, refused = _pick(
    field,
    wanted,
    candidates,
    {
      name: with_gradients(name, window, soft_cap)
      for name in packed_attention.IMPLEMENTATIONS
    },
    lambda: packed_trial(
      (num_heads, num_kv_heads, heads[2]), tokens_per_row, dtype
    ),
    device,
  )
  if name == "xla" and tokens_per_row > 2 * packed_attention.BLOCK:
    name = "chunks" if device.platform == "gpu" else "blocks"
  _told("over packed rows", device, name, refused)
  return name


# -- prefill and decoding -----------------------------------------------------


def prefill_trial(
  heads: Heads, rows: int, longest: int, dtype: jnp.dtype
) -> Trial:
  """Return a few rows of several lengths, for the functions of `CAUSAL`.

  Args:
    heads: on a device.
    rows: rows of a prefill on a device.
    longest: length of the longest rows.
    dtype: dtype of the cache.
  """
  lengths = np.array([1, 100, _PREFILL_TOKENS], np.int32)
  few = _random(_qkv(heads, len(lengths), _PREFILL_TOKENS, dtype))
  large = _qkv(heads, rows, longest, dtype)
  return Trial(
    arguments=(*few, lengths), shapes=(*large, _shape(np.int32, rows))
  )


def of_tokens(
  attend: reference.CausalAttention,
  windows: Iterable[int | None] = (None,),
  soft_cap: float | None = None,
) -> Implementation:
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
      window = _tried_window(window, length)
      mixed = attend(
        query, key, value, lengths, sliding_window=window, soft_cap=soft_cap
      )
      results.append(mixed * is_token)
    return results

  return masked


def decode_trial(
  heads: Heads,
  *,
  slots: int,
  num_pages: int,
  page_tokens: int,
  pages_per_slot: int,
  dtype: jnp.dtype,
) -> Trial:
  """Return a few pages, for the functions of `paged_attention.IMPLEMENTATIONS`.

  Some pages are full and some are not. As in a run, the entries of a table past
  the end of its sequence are out of range.

  Args:
    heads: on a device.
    slots: slots on a device.
    num_pages: pages of the pool.
    page_tokens: tokens of a page.
    pages_per_slot: pages of the longest sequence.
    dtype: dtype of the cache.
  """
  num_heads, num_kv_heads, head_dim = heads

  def shapes(rows: int, num_pages: int) -> tuple[Any, Any]:
    pool = _shape(dtype, num_kv_heads, num_pages, page_tokens, head_dim)
    return (pool, pool), _shape(dtype, rows, num_heads, head_dim)

  width = -(-_DECODE_TOKENS // page_tokens)
  full, few_pages = width * page_tokens, width + 3
  positions = np.array([0, page_tokens, full // 2, full - 1], np.int32)
  rng = np.random.default_rng(0)
  pages = rng.integers(0, few_pages, (len(positions), width), np.int32)
  is_past = np.arange(width)[None] > positions[:, None] // page_tokens
  pages = np.where(is_past, np.int32(few_pages), pages)
  return Trial(
    arguments=(*_random(shapes(len(positions), few_pages)), positions, pages),
    shapes=(
      *shapes(slots, num_pages),
      _shape(np.int32, slots),
      _shape(np.int32, slots, pages_per_slot),
    ),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineAttention:
  """The attention of prefill and decode, for the whole rollout mesh.

  Attributes:
    description: the names of the implementations, and the reasons why others
      were not chosen.
  """

  prefill: reference.CausalAttention
  decode: paged_attention.PagedAttention
  description: str


def for_engine(
  wanted: str,
  *,
  heads: Heads,
  windows_within: Callable[[int], Iterable[int | None]],
  prefill: tuple[int, int],
  slots: tuple[int, int],
  pages: tuple[int, int],
  dtype: jnp.dtype,
  mesh: Mesh,
  rules: sections.ShardingRules,
  soft_cap: float | None = None,
) -> EngineAttention:
  """Try the platform's implementations, and log which ones are chosen.

  Args:
    wanted: kernel_names.AUTO, or a name in `reference.CAUSAL` or
      `paged_attention.IMPLEMENTATIONS`. A named implementation must work. If
      only one of the two has the name, the other uses "xla".
    heads: of the whole model.
    windows_within: as in `ModelConfig`.
    prefill: the rows of a prefill call, and their greatest length.
    slots: the number of slots, and the tokens that each may hold.
    pages: the number of pages and the tokens of each; 0 of them if each slot
      has its own cache, from which XLA always decodes.
    dtype: dtype of the cache.
    mesh: mesh of the rollout slice.
    rules: sharding rules of the rollout slice.
    soft_cap: of the scores of all layers.

  Raises:
    ConfigError: there is no such name, or the implementation does not work
      here.
  """
  num_pages, _ = pages
  kernel_names.check_rollout(wanted, has_pages=num_pages > 0)
  if mesh.size > 1 and rules.heads != rules.kv_heads:
    sections.require(
      wanted in (kernel_names.AUTO, "xla"),
      _ROLLOUT,
      f"{wanted} needs query heads where their kv heads are; give"
      " mesh.rollout_rules.heads and kv_heads the same axes",
    )
    wanted = "xla"
  device = mesh.devices.flat[0]
  held = functools.partial(_held, mesh, rules)
  own = held("heads", heads[0]), held("kv_heads", heads[1]), heads[2]
  rows, longest = prefill
  # The rows of a prefill are split like the slots if their number is divisible.
  # Otherwise each replica computes all of them.
  parts = mesh_lib.Layout(mesh=mesh, rules=rules).parts("batch")
  rows_axis = None if rows % parts else "batch"
  windows = sorted({*windows_within(longest)}, key=str)
  prefill_name, refused = _pick(
    _ROLLOUT,
    wanted,
    PREFILL,
    {
      name: of_tokens(attend, windows, soft_cap)
      for name, attend in reference.CAUSAL.items()
    },
    lambda: prefill_trial(own, held(rows_axis, rows), longest, dtype),
    device,
  )
  decode_name = "xla"
  if num_pages:
    decode_name, too = _pick_decode(
      wanted,
      own,
      slots=slots,
      pages=pages,
      held=held,
      windows_within=windows_within,
      soft_cap=soft_cap,
      dtype=dtype,
      device=device,
    )
    refused = {**refused, **too}
  cache = "pages" if num_pages else "slots"
  chosen = f"prefill {prefill_name}, decode {decode_name} over {cache}"
  if topology.is_described(device):
    chosen += " (they compile; whether they are right was not tried)"
  spec = functools.partial(mesh_lib.spec, rules)
  row, slot = spec((rows_axis, None, "heads")), spec(("batch",))
  slot_heads, pool = spec(("batch", "heads")), spec(("kv_heads",))
  return EngineAttention(
    prefill=_over_mesh(
      reference.CAUSAL[prefill_name],
      prefill_name,
      mesh,
      (row, row, row, spec((rows_axis,))),
      row,
    ),
    decode=_over_mesh(
      paged_attention.IMPLEMENTATIONS[decode_name],
      decode_name,
      mesh,
      ((pool, pool), slot_heads, slot, slot),
      slot_heads,
    ),
    description=_told("of the engine", device, chosen, refused),
  )


def _pick_decode(
  wanted: str,
  own: Heads,  # those that one device holds
  *,
  slots: tuple[int, int],
  pages: tuple[int, int],
  held: Callable[[str | None, int], int],
  windows_within: Callable[[int], Iterable[int | None]],
  soft_cap: float | None,
  dtype: jnp.dtype,
  device: Any,
) -> tuple[str, dict[str, str]]:
  """Return what decodes from pages, and why others do not; see `for_engine`."""
  (num_slots, cache_tokens), (num_pages, page_tokens) = slots, pages
  window = next(iter({*windows_within(cache_tokens)} - {None}), None)
  return _pick(
    _ROLLOUT,
    wanted,
    DECODE,
    {
      name: functools.partial(attend, sliding_window=window, soft_cap=soft_cap)
      for name, attend in paged_attention.IMPLEMENTATIONS.items()
    },
    lambda: decode_trial(
      own,
      slots=held("batch", num_slots),
      num_pages=num_pages,
      page_tokens=page_tokens,
      pages_per_slot=cache_tokens // page_tokens,
      dtype=dtype,
    ),
    device,
  )


def _over_mesh(
  attend: Callable[..., jax.Array],
  name: str,
  mesh: Mesh,
  arguments: Any,
  result: Any,
) -> Callable[..., jax.Array]:
  """Return an implementation that runs on the whole mesh.

  The compiler partitions XLA's attention by itself. A kernel runs on a single
  single device, so each device applies it to the heads and slots that it holds.
  `arguments` and `result` are partition specs.
  """
  if name == "xla" or mesh.size == 1:
    return attend

  def on_mesh(
    *arrays: Any,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
  ) -> jax.Array:
    mapped = jax.shard_map(
      functools.partial(
        attend, sliding_window=sliding_window, soft_cap=soft_cap
      ),
      mesh=mesh,
      in_specs=arguments,
      out_specs=result,
      check_vma=False,
    )
    return mapped(*arrays)

  return on_mesh
