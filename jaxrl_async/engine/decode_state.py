"""What the engine's programs take and give: weights, prefixes, slots, results.

Array leaves may in the same tree be their shardings: hence `Any`. Letters: B
slots, M entries of an insertion, R rows of a prefill, N steps a call, S cached
tokens a slot, P pages a slot, E end tokens a slot.
"""

import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import sampling

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


def _pytree(cls):
  names = [field.name for field in dataclasses.fields(cls)]
  return jax.tree_util.register_dataclass(cls, names, [])


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


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """What lives on device between two calls; donated to each of them.

  Attributes:
    cache: a pair of arrays a layer.
    tokens: [B] the newest token of each slot, not yet in the cache.
    positions: [B] its position, which is also the number of cached tokens.
    limits: [B] a trajectory ends when it has that many tokens.
    is_active: [B] the slot is writing.
    tickets: [B] which sequence sits there, by the number it was inserted with.
    keys: [B 2] of `sampling.row_keys`.
    temperature: [B] 0 is greedy.
    filters: [B] each, of `sampling.Filters`.
    min_lengths: [B] no end token is drawn before that many tokens.
    end_tokens: [B E] each of them ends the sequence; -1 is none.
    replay: [B S'] tokens known already, by position; S' = replay_tokens.
    replay_lengths: [B] up to where they are taken instead of drawn ones.
    pages: [B P] where the slot's tokens are cached; empty without pages.
  """

  cache: Any
  tokens: Any
  positions: Any
  limits: Any
  is_active: Any
  tickets: Any
  keys: Any
  temperature: Any
  filters: Any
  min_lengths: Any
  end_tokens: Any
  replay: Any
  replay_lengths: Any
  pages: Any


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Insertion:
  """Which prefilled rows start to be written on, and how; numpy, M entries.

  Attributes:
    slots: [M] where to; `PICK` takes an idle slot, if there is one, and
      num_slots marks an unused entry.
    sources: [M] row of the prefix.
    tickets: [M] comes back with the slot's results.
    streams: [M], with groups and members: of `sampling.row_keys`.
  """

  slots: Any
  sources: Any
  tickets: Any
  limits: Any
  streams: Any
  groups: Any
  members: Any
  temperature: Any
  filters: Any
  min_lengths: Any
  end_tokens: Any
  replay: Any
  replay_lengths: Any
  pages: Any


def unused_insertion(sizes: EngineSizes, num_end_tokens: int) -> Insertion:
  """One in which no entry is used."""
  m = sizes.insert_rows

  def full(value, *shape, dtype: Any = np.int32) -> Any:
    return np.full((m, *shape), value, dtype)

  return Insertion(
    slots=full(sizes.num_slots),
    sources=full(0),
    tickets=full(-1),
    limits=full(sizes.cache_tokens),
    streams=full(sampling.Stream.SERVE),
    groups=full(0),
    members=full(0),
    temperature=full(1, dtype=np.float32),
    filters=sampling.Filters(
      top_k=full(0),
      top_p=full(1, dtype=np.float32),
      min_p=full(0, dtype=np.float32),
    ),
    min_lengths=full(0),
    end_tokens=full(-1, num_end_tokens),
    replay=full(0, sizes.replay_tokens),
    replay_lengths=full(0),
    pages=full(sizes.num_pages, sizes.pages_per_slot),
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
  state: DecodeState, version, tokens, is_valid, logprobs
) -> jax.Array:
  """One int32 array a call: one transfer to the host.

  Args:
    state: after the call.
    version: of the weights.
    tokens: [N B], like the rest.
    is_valid: bool.
    logprobs: float32; their bits travel as integers.
  """
  columns = (
    tokens.T,
    is_valid.T.astype(jnp.int32),
    (state.positions + 1)[:, None],
    jax.lax.bitcast_convert_type(logprobs.T, jnp.int32),
    jnp.broadcast_to(version, tokens.T.shape),
    (~state.is_active).astype(jnp.int32)[:, None],
    state.tickets[:, None],
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
