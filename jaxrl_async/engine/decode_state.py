"""What the engine's programs take and give: weights, prefixes, slots, results.

Array leaves may in the same tree be their shardings: hence `Any`. Letters: B
slots, M entries of an insertion, R rows of a prefill, N steps a call, S cached
tokens a slot, S' of them that can be replayed, P pages a slot, E end tokens a
slot.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, TypeVar

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import sampling

T = TypeVar("T")

PICK = -1  # instead of a slot: any idle one


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
  """Fixed shapes of the programs, as in `config.RolloutSection`."""

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

  @property
  def pages_per_slot(self) -> int:
    """Pages of the longest sequence; 0 when every slot has its own cache."""
    return self.cache_tokens // self.page_tokens if self.num_pages else 0

  @property
  def insert_rows(self) -> int:
    """Entries of one insertion."""
    return min(self.num_slots, self.prefill_rows)

  @property
  def replay_tokens(self) -> int:
    """Room a slot has for tokens to be decoded again; 0 when none are."""
    is_exact = self.preemption is sections.Preemption.EXACT
    return self.cache_tokens if self.num_pages and is_exact else 0

  def prefill_rows_axis(self, layout: mesh_lib.Layout) -> str | None:
    """The logical axis of a prefill's rows: split as slots are, if that fits.

    What does not fit is computed by every replica.
    """
    return None if self.prefill_rows % layout.parts("batch") else "batch"

  def is_chunked(self, bucket: int) -> bool:
    """Whether prompts of this bucket are prefilled in several calls."""
    return 0 < self.prefill_chunk < bucket


def _pytree(cls: type[T]) -> type[T]:
  """Registers a dataclass whose fields are all part of the tree."""
  return jax.tree_util.register_dataclass(cls, [*cls.__annotations__], [])


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineParams:
  """Weights (layers unstacked, rollout dtype) and their policy version."""

  weights: Any
  version: Any


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
  """Prefilled rows: cache [R, ...] a layer, padded tokens [R T], lengths."""

  cache: Any
  tokens: Any
  lengths: Any


def _slot_field(
  fill: int | float, width: str | None = None, dtype: Any = np.int32
) -> Any:
  """Declares an array of `SlotSettings`.

  Args:
    fill: the value in rows that describe no sequence.
    width: what a row has several values for, a name in `unused_slots`; None
      is one value a row, without an axis of its own.
    dtype: of the array.
  """
  return dataclasses.field(
    metadata={"fill": fill, "width": width, "dtype": dtype}
  )


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotSettings:
  """How sequences are to be written: a row for each of them.

  A `DecodeState` holds a row for each slot, an `Insertion` one for each of its
  entries, and to insert is to copy every field from the latter to the former.
  So a new field is declared here, filled in by `Sequence.describe`, and read by
  the program that needs it; nothing else names it.

  Attributes:
    tickets: [B] number under which the scheduler inserted the sequence. It
      comes back with the results of the slot.
    limits: [B] the sequence ends when it has that many tokens.
    temperature: [B] 0 is greedy.
    top_k: [B] as in `sampling.Filters`, like the next two.
    top_p: [B]
    min_p: [B]
    min_lengths: [B] no end token is drawn before the sequence is that long.
    end_tokens: [B E] each of them ends the sequence; -1 is none.
    replay: [B S'] tokens that are known already, by position.
    replay_lengths: [B] up to where they are taken instead of drawn ones.
    pages: [B P] where the tokens are cached; empty without pages.
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


def unused_slots(
  full: Callable[..., Any],
  num_rows: int,
  sizes: EngineSizes,
  num_end_tokens: int,
) -> SlotSettings:
  """Returns settings in which no row describes a sequence.

  Args:
    full: makes an array of (shape, value, dtype): numpy's on the host, that of
      jax.numpy in a program.
    num_rows: slots, or entries of an insertion.
    sizes: of the engine.
    num_end_tokens: that a row has room for.
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
  return SlotSettings(**arrays)


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """What lives on device between two calls; donated to each of them.

  Attributes:
    cache: a pair of arrays a layer.
    tokens: [B] the newest token of each slot, not yet in the cache.
    positions: [B] its position, which is also the number of cached tokens.
    is_active: [B] the slot is writing.
    keys: [B 2] of `sampling.row_keys`.
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
  """Which prefilled rows start to be written on, and how; numpy, M entries.

  Attributes:
    slots: [M] where to; `PICK` takes an idle slot, if there is one, and
      num_slots marks an unused entry.
    sources: [M] row of the prefix.
    streams: [M], with groups and members: of `sampling.row_keys`.
    settings: a row for each entry.
  """

  slots: Any
  sources: Any
  streams: Any
  groups: Any
  members: Any
  settings: SlotSettings


def unused_insertion(sizes: EngineSizes, num_end_tokens: int) -> Insertion:
  """Returns an insertion to be filled in: none of its entries is used."""
  m = sizes.insert_rows
  return Insertion(
    slots=np.full((m,), sizes.num_slots, np.int32),
    sources=np.zeros((m,), np.int32),
    streams=np.full((m,), sampling.Stream.SERVE, np.int32),
    groups=np.zeros((m,), np.int32),
    members=np.zeros((m,), np.int32),
    settings=unused_slots(np.full, m, sizes, num_end_tokens),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
  """One call's outcome, on the host.

  Attributes:
    tokens: [B N]; entry i of a row is its i-th new token.
    is_valid: [B N] False after the row's end, and for replayed tokens.
    logprobs: [B N] float32, under the distribution of the draw.
    policy_versions: [B N] version of the weights that drew the token.
    has_ended: [B] the row wrote its last token in this call (or idled).
    tickets: [B] the sequences that sat in the slots.
  """

  tokens: np.ndarray
  is_valid: np.ndarray
  logprobs: np.ndarray
  policy_versions: np.ndarray
  has_ended: np.ndarray
  tickets: np.ndarray


def pack_result(
  state: DecodeState,
  version: Int[Array, ""],
  tokens: Int[Array, "N B"],
  is_valid: Bool[Array, "N B"],
  logprobs: Float[Array, "N B"],
) -> Int[Array, "B W"]:
  """Puts a call's outcome into one integer array: one transfer to the host.

  Args:
    state: after the call.
    version: of the weights.
    tokens: of each step and slot.
    is_valid: which of them were drawn.
    logprobs: float32; their bits travel as integers.
  """
  columns = (
    tokens.T,
    is_valid.T.astype(jnp.int32),
    (state.positions + 1)[:, None],
    jax.lax.bitcast_convert_type(logprobs.T, jnp.int32),
    jnp.broadcast_to(version, tokens.T.shape),
    (~state.is_active).astype(jnp.int32)[:, None],
    state.settings.tickets[:, None],
  )
  return jnp.concatenate(columns, axis=1)


def result_tokens(data: jax.Array, n: int) -> jetstream_api.ResultTokens:
  """A packed result in JetStream's form."""
  return jetstream_api.ResultTokens(
    data=data,
    tokens_idx=(0, n),
    valid_idx=(n, 2 * n),
    length_idx=(2 * n, 2 * n + 1),
    samples_per_slot=1,
  )


def unpack_result(data: np.ndarray, n: int) -> StepResult:
  """The columns of `pack_result`."""
  logprobs = np.ascontiguousarray(data[:, 2 * n + 1 : 3 * n + 1])
  return StepResult(
    tokens=data[:, :n],
    is_valid=data[:, n : 2 * n].astype(bool),
    logprobs=logprobs.view(np.float32),
    policy_versions=data[:, 3 * n + 1 : 4 * n + 1],
    has_ended=data[:, 4 * n + 1].astype(bool),
    tickets=data[:, 4 * n + 2],
  )
