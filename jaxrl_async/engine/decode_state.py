"""Arguments and results of the engine's programs: prefixes, slots, results.

The leaves of these trees are arrays, or in other uses of the same classes their
shardings. They are therefore annotated as `Any`.

Letters in shapes: B slots, M entries of an insertion, R rows of a prefill, N
steps per call, S cached tokens per slot, S' tokens per slot that can be
replayed, P pages per slot, E end tokens per slot.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, TypeVar

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import sampling
from jaxrl_async.models import configs
from jaxrl_async.models import gated_delta

T = TypeVar("T")

PICK = -1  # in place of a slot number: the device picks an idle slot


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
  """The fixed shapes of the programs, as in `config.RolloutSection`."""

  num_slots: int
  cache_tokens: int
  decode_steps_per_call: int
  prefill_rows: int
  prefill_buckets: tuple[int, ...]
  window_buckets: tuple[int, ...]
  prefill_chunk: int = 0
  num_pages: int = 0
  page_tokens: int = 0
  preemption: sections.Preemption = sections.Preemption.FAST
  kept_tokens: int = 0

  @property
  def kept_pages(self) -> int:
    """The most pages that are kept after their sequences have ended."""
    return self.kept_tokens // self.page_tokens if self.num_pages else 0

  @property
  def pages_per_slot(self) -> int:
    """The pages of the longest sequence; 0 if every slot has its own cache."""
    return self.cache_tokens // self.page_tokens if self.num_pages else 0

  @property
  def insert_rows(self) -> int:
    """The number of entries of one insertion."""
    return min(self.num_slots, self.prefill_rows)

  @property
  def replay_tokens(self) -> int:
    """The number of tokens that a slot can replay.

    It is 0 unless preemption is exact. Tokens are replayed when they are fed
    through the decode program again after a preemption.
    """
    is_exact = self.preemption is sections.Preemption.EXACT
    return self.cache_tokens if self.num_pages and is_exact else 0

  def prefill_rows_axis(self, layout: mesh_lib.Layout) -> str | None:
    """Return the logical axis that the rows of a prefill are sharded along.

    The rows are sharded like the slots if their number is divisible. Otherwise
    the result is None, and each replica computes all rows.
    """
    return None if self.prefill_rows % layout.parts("batch") else "batch"

  def is_chunked(self, bucket: int) -> bool:
    """Return whether prompts of this bucket are prefilled in several calls."""
    return 0 < self.prefill_chunk < bucket


def _pytree(cls: type[T]) -> type[T]:
  """Register a dataclass as a tree in which every field is a child."""
  return jax.tree_util.register_dataclass(cls, [*cls.__annotations__], [])


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineParams:
  """Weights and their policy version.

  The layers of the weights are unstacked and in the rollout dtype.
  """

  weights: Any
  version: Any


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
  """Prefilled rows.

  Attributes:
    cache: a pair of arrays [R, ...] for each layer, or its state.
    tokens: [R T] the padded tokens.
    lengths: [R] number of tokens of each row without padding.
    adapters: [R] the adapter of each row, if the model has a stack of them.
  """

  cache: Any
  tokens: Any
  lengths: Any
  adapters: Any = None


def prefix_sharding(
  model: configs.ModelConfig,
  sizes: EngineSizes,
  mesh: Mesh,
  rules: sections.ShardingRules,
) -> Prefix:
  """Return the sharding of each array of a prefix."""
  rows_axis = sizes.prefill_rows_axis(mesh_lib.Layout(mesh=mesh, rules=rules))
  rows = mesh_lib.sharding(mesh, rules, rows_axis)
  layer = mesh_lib.sharding(mesh, rules, rows_axis, "kv_heads")
  return Prefix(
    cache=with_state_shardings(
      [(layer, layer)] * model.num_layers, model, rows_axis, mesh, rules
    ),
    tokens=rows,
    lengths=rows,
    adapters=rows if model.lora and model.lora.num_adapters else None,
  )


def with_state_shardings(
  layers: list[Any],
  model: configs.ModelConfig,
  rows_axis: str | None,
  mesh: Mesh,
  rules: sections.ShardingRules,
) -> list[Any]:
  """Return the shardings of a cache, with those of the layers with states.

  Args:
    layers: shardings of each layer. Those of layers with states are replaced.
    model: the architecture.
    rows_axis: the logical axis of the rows of states.
    mesh: of the rollout slice.
    rules: of the rollout slice.
  """
  states = jax.tree.map(
    lambda axes: mesh_lib.sharding(mesh, rules, rows_axis, *axes[1:]),
    gated_delta.STATE_AXES,
    is_leaf=lambda x: type(x) is tuple,
  )
  is_delta = model.is_delta or (False,) * model.num_layers
  return [
    states if has else layer
    for has, layer in zip(is_delta, layers, strict=True)
  ]


def _slot_field(
  fill: int | float, width: str | None = None, dtype: Any = np.int32
) -> Any:
  """Declare an array of `SlotSettings`.

  Args:
    fill: the value in rows that describe no sequence.
    width: the name, in `unused_slots`, of the number of values per row. With
      None there is one value per row, and the array has no second axis.
    dtype: dtype of the array.
  """
  return dataclasses.field(
    metadata={"fill": fill, "width": width, "dtype": dtype}
  )


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSettings:
  """How sequences are to be generated, one row per sequence.

  A `DecodeState` holds a row for each slot, and an `Insertion` holds a row for
  each of its entries. Inserting copies every field from the insertion to the
  state. To add a field, declare it here, fill it in `Sequence.describe`, and
  read it in the program that needs it. No other code has to name it.

  Attributes:
    tickets: [B] number under which the scheduler inserted the sequence. It
      is returned with the results of the slot.
    limits: [B] number of tokens at which the sequence ends.
    temperature: [B] sampling temperature; 0 is greedy.
    top_k: [B] as in `sampling.Filters`.
    top_p: [B] as in `sampling.Filters`.
    min_p: [B] as in `sampling.Filters`.
    min_lengths: [B] no end token is drawn before the sequence is that long.
    end_tokens: [B E] tokens that end the sequence; -1 stands for none.
    replay: [B S'] tokens that are already known, by position.
    replay_lengths: [B] number of positions whose token is taken from `replay`
      and not drawn.
    pages: [B P] pages in which the tokens are cached; empty for a cache
      without pages.
    adapters: [B] the adapter that the sequence is generated with. None unless
      the model has a stack of adapters.
  """

  tickets: Any = _slot_field(-1)
  limits: Any = _slot_field(0)
  temperature: Any = _slot_field(1, dtype=np.float32)
  top_k: Any = _slot_field(0)
  top_p: Any = _slot_field(1, dtype=np.float32)
  min_p: Any = _slot_field(0, dtype=np.float32)
  min_lengths: Any = _slot_field(0)
  end_tokens: Any = _slot_field(-1, "end_tokens")
  replay: Any = _slot_field(0, "replay_tokens")
  replay_lengths: Any = _slot_field(0)
  pages: Any = _slot_field(0, "pages")
  adapters: Any = _slot_field(0)


def unused_slots(
  full: Callable[..., Any],
  num_rows: int,
  sizes: EngineSizes,
  num_end_tokens: int,
  *,
  has_adapters: bool = False,
) -> SlotSettings:
  """Return settings in which no row describes a sequence.

  Args:
    full: makes an array from (shape, value, dtype). It is `numpy.full` on the
      host and `jax.numpy.full` in a program.
    num_rows: number of slots, or of entries of an insertion.
    sizes: shapes of the engine's programs.
    num_end_tokens: number of end tokens that fit into a row.
    has_adapters: whether the model has a stack of adapters.
  """
  widths = {
    "end_tokens": num_end_tokens,
    "replay_tokens": sizes.replay_tokens,
    "pages": sizes.pages_per_slot,
  }
  arrays = {}
  for field in dataclasses.fields(SlotSettings):
    width = field.metadata["width"]
    shape = (num_rows,) if width is None else (num_rows, widths[width])
    arrays[field.name] = full(
      shape, field.metadata["fill"], field.metadata["dtype"]
    )
  if not has_adapters:
    arrays["adapters"] = None  # programs without adapters take no such array
  return SlotSettings(**arrays)


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """The state on the device between two calls, donated to each call.

  Attributes:
    cache: keys and values of each layer, as the cache's layout has them, or
      its `gated_delta.State`.
    tokens: [B] the newest token of each slot, which is not yet in the cache.
    positions: [B] its position, which is also the number of cached tokens.
    is_active: [B] whether the slot is generating.
    keys: [B 2] result of `sampling.row_keys`.
    settings: a row for each slot.
  """

  cache: Any
  tokens: Any
  positions: Any
  is_active: Any
  keys: Any
  settings: SlotSettings


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Insertion:
  """Prefilled rows to be put into slots, and how they are continued.

  The arrays are NumPy's and have M entries.

  Attributes:
    slots: [M] the slot of each row. With `PICK` the device takes an idle slot,
      if there is one. num_slots marks an unused entry.
    sources: [M] row of the prefix.
    streams: [M] argument of `sampling.row_keys`.
    groups: [M] argument of `sampling.row_keys`.
    members: [M] argument of `sampling.row_keys`.
    settings: a row for each entry.
  """

  slots: Any
  sources: Any
  streams: Any
  groups: Any
  members: Any
  settings: SlotSettings


def unused_insertion(
  sizes: EngineSizes, num_end_tokens: int, *, has_adapters: bool = False
) -> Insertion:
  """Return an insertion without used entries, for the caller to fill in."""
  m = sizes.insert_rows
  return Insertion(
    slots=np.full((m,), sizes.num_slots, np.int32),
    sources=np.zeros((m,), np.int32),
    streams=np.full((m,), sampling.Stream.SERVE, np.int32),
    groups=np.zeros((m,), np.int32),
    members=np.zeros((m,), np.int32),
    settings=unused_slots(
      np.full, m, sizes, num_end_tokens, has_adapters=has_adapters
    ),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
  """The result of one call of `generate`, on the host.

  Attributes:
    tokens: [B N] the token of each slot and step.
    is_valid: [B N] whether the token was drawn. It is False after the end of
      the sequence, and for replayed tokens.
    logprobs: [B N] float32, under the distribution that the token was drawn
      from.
    policy_versions: [B N] version of the weights that drew the token.
    has_ended: [B] whether the sequence ended in this call, or the slot idled.
    tickets: [B] tickets of the sequences in the slots.
    is_steered: [B N] whether a guide has changed the distribution of the token,
      see `sampling.is_steered`. None without guides.
  """

  tokens: np.ndarray
  is_valid: np.ndarray
  logprobs: np.ndarray
  policy_versions: np.ndarray
  has_ended: np.ndarray
  tickets: np.ndarray
  is_steered: np.ndarray | None = None


def pack_result(
  state: DecodeState,
  version: Int[Array, ""],
  tokens: Int[Array, "N B"],
  is_valid: Bool[Array, "N B"],
  logprobs: Float[Array, "N B"],
  is_steered: Bool[Array, "N B"] | None = None,
) -> Int[Array, "B W"]:
  """Pack the result of a call into one integer array.

  A single array needs only one transfer to the host.

  Args:
    state: the state after the call.
    version: policy version of the weights.
    tokens: token of each step and slot.
    is_valid: which of the tokens were drawn.
    logprobs: float32; their bits are stored as integers.
    is_steered: as in `StepResult`; without guides it takes no columns.
  """
  columns = [
    tokens.T,
    is_valid.T.astype(jnp.int32),
    (state.positions + 1)[:, None],
    jax.lax.bitcast_convert_type(logprobs.T, jnp.int32),
    jnp.broadcast_to(version, tokens.T.shape),
    (~state.is_active).astype(jnp.int32)[:, None],
    state.settings.tickets[:, None],
  ]
  if is_steered is not None:
    columns.append(is_steered.T.astype(jnp.int32))
  return jnp.concatenate(columns, axis=1)


def result_tokens(data: jax.Array, n: int) -> jetstream_api.ResultTokens:
  """Return a packed result in JetStream's form.

  Args:
    data: result of `pack_result`.
    n: number of steps per call.
  """
  return jetstream_api.ResultTokens(
    data=data,
    tokens_idx=(0, n),
    valid_idx=(n, 2 * n),
    length_idx=(2 * n, 2 * n + 1),
    samples_per_slot=1,
  )


def unpack_result(data: np.ndarray, n: int) -> StepResult:
  """Return the columns of an array that `pack_result` made.

  Args:
    data: the packed array, on the host.
    n: number of steps per call.
  """
  logprobs = np.ascontiguousarray(data[:, 2 * n + 1 : 3 * n + 1])
  is_steered = data[:, 4 * n + 3 :].astype(bool)
  return StepResult(
    tokens=data[:, :n],
    is_valid=data[:, n : 2 * n].astype(bool),
    logprobs=logprobs.view(np.float32),
    policy_versions=data[:, 3 * n + 1 : 4 * n + 1],
    has_ended=data[:, 4 * n + 1].astype(bool),
    tickets=data[:, 4 * n + 2],
    is_steered=is_steered if is_steered.size else None,
  )
