"""The device programs of the rollout slice, behind JetStream's `Engine`.

Three of them: `prefill` (rows of one padded length -> cached prefix), `insert`
(rows -> slots), `generate` (several tokens for every slot). Weights are an
argument of each, so the next call with other weights is the interruption.

Two things depart from what one expects. Prefill samples nothing: the last
prompt token enters the slot as its *current* token, and the first decode step
writes it to the cache and samples after it, so every token of a trajectory
comes out of the same program. And a finished slot needs no freeing: it idles
until something is inserted over it.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from jaxrl_async import mesh as mesh_lib
from jaxrl_async.models import attention
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.rollout import jetstream_api
from jaxrl_async.rollout import kv_cache
from jaxrl_async.rollout import sampling


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["weights", "version"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineParams:
  """Weights (layers unstacked, rollout dtype) and their policy version."""

  weights: Any
  version: Any  # array, or its sharding


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["cache", "tokens", "lengths"],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefix:
  """Prefilled rows: cache [R, ...] a layer, padded tokens [R T], lengths."""

  cache: Any
  tokens: Any
  lengths: Any


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=[
    "cache",
    "tokens",
    "positions",
    "limits",
    "is_active",
    "keys",
    "temperature",
  ],
  meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
  """What lives on device between two calls; donated to each of them.

  Leaves are arrays, or in the same tree their shardings: hence `Any`.

  Attributes:
    cache: a pair of arrays a layer.
    tokens: [B] the newest token of each slot, not yet in the cache.
    positions: [B] its position, which is also the number of cached tokens.
    limits: [B] a trajectory ends when it has that many tokens.
    is_active: [B] the slot is writing.
    keys: [B 2] of `sampling.row_keys`.
    temperature: [B] 0 is greedy.
  """

  cache: list[Any]
  tokens: Any
  positions: Any
  limits: Any
  is_active: Any
  keys: Any
  temperature: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Insertion:
  """What to put where, for all slots at once; numpy [B], B = num_slots.

  Unused entries have slots == num_slots and write nothing.
  """

  slots: np.ndarray
  sources: np.ndarray
  limits: np.ndarray
  streams: np.ndarray
  groups: np.ndarray
  members: np.ndarray
  temperature: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSizes:
  """Fixed shapes of the programs, as in `config.RolloutSection`."""

  num_slots: int
  cache_tokens: int
  decode_steps_per_call: int
  prefill_rows: int
  prefill_buckets: tuple[int, ...]
  window_buckets: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
  """One call's outcome, on the host; N = decode_steps_per_call.

  Attributes:
    tokens: [B N]; entry i of a row is its i-th new token.
    is_valid: [B N] False after the row's end.
    logprobs: [B N] float32, under the distribution of the draw.
    policy_versions: [B N] version of the weights that drew the token.
    has_ended: [B] the row wrote its last token in this call (or idled).
  """

  tokens: np.ndarray
  is_valid: np.ndarray
  logprobs: np.ndarray
  policy_versions: np.ndarray
  has_ended: np.ndarray


class Engine(jetstream_api.Engine):
  """Compiled programs for one model, mesh and set of shapes.

  Threads: the engine has no state beyond its compiled programs; callers own
  the `DecodeState`s, each of which belongs to one thread at a time.
  """

  def __init__(
    self,
    model: configs.ModelConfig,
    sizes: EngineSizes,
    *,
    mesh: Mesh,
    seed: int,
    end_tokens: tuple[int, ...],
    dtype: str = "float32",
  ):
    self.model = model
    self.sizes = sizes
    self.seed = seed
    self.end_tokens = end_tokens
    self.dtype = jnp.dtype(dtype)
    self._mesh = mesh
    replicated = mesh_lib.replicated(mesh)
    self._result_sharding = replicated
    rows = NamedSharding(mesh, P("data"))
    layer = NamedSharding(mesh, P("data", "tensor"))
    cache = [(layer, layer)] * model.num_layers
    self._state_sharding = DecodeState(
      cache=cache,
      tokens=rows,
      positions=rows,
      limits=rows,
      is_active=rows,
      keys=rows,
      temperature=rows,
    )
    self.params_sharding = EngineParams(
      weights=mesh_lib.shardings(
        mesh,
        mesh_lib.ROLLOUT_RULES,
        transformer.logical_axes(model, is_stacked=False),
      ),
      version=replicated,
    )
    self._init = jax.jit(self._init_state, out_shardings=self._state_sharding)
    self._prefill = jax.jit(self._prefill_rows)
    self._insert = jax.jit(
      self._insert_rows,
      donate_argnames="state",
      out_shardings=self._state_sharding,
    )
    self._generate = jax.jit(
      self._decode_steps,
      static_argnames="window",
      donate_argnames="state",
      out_shardings=(self._state_sharding, replicated),
    )

  # -- device programs ------------------------------------------------------

  def _init_state(self) -> DecodeState:
    b = self.sizes.num_slots
    return DecodeState(
      cache=kv_cache.init(
        self.model,
        slots=b,
        tokens=self.sizes.cache_tokens,
        dtype=self.dtype,
      ),
      tokens=jnp.zeros((b,), jnp.int32),
      positions=jnp.zeros((b,), jnp.int32),
      limits=jnp.zeros((b,), jnp.int32),
      is_active=jnp.zeros((b,), bool),
      keys=jnp.zeros((b, 2), jnp.uint32),
      temperature=jnp.ones((b,), jnp.float32),
    )

  def _prefill_rows(self, params: EngineParams, tokens, lengths) -> Prefix:
    rows, width = tokens.shape
    order = jnp.arange(width, dtype=jnp.int32)[None]
    segments = (order < lengths[:, None]).astype(jnp.int32)
    mask = attention.packed_mask(segments)
    positions = jnp.broadcast_to(order, (rows, width))

    def attend(layer, query, key, value):
      del layer
      mixed = attention.IMPLEMENTATIONS["xla"](query, key, value, mask)
      return mixed, kv_cache.from_prefill(key, value, self.dtype)

    model = transformer.bind(self.model, params.weights, is_stacked=False)
    _, cache = model.hidden(tokens, positions, attend, self.dtype)
    return Prefix(cache=cache, tokens=tokens, lengths=lengths)

  def _insert_rows(
    self, prefix: Prefix, state: DecodeState, entries: dict[str, jax.Array]
  ) -> DecodeState:
    slots, sources = entries["slots"], entries["sources"]
    lengths = prefix.lengths[sources]
    newest = prefix.tokens[sources, lengths - 1]
    keys = sampling.row_keys(
      jnp.int32(self.seed),
      entries["streams"],
      entries["groups"],
      entries["members"],
    )

    def put(array, rows):
      return array.at[slots].set(rows.astype(array.dtype), mode="drop")

    return DecodeState(
      cache=[
        kv_cache.insert_rows(layer, rows, slots, sources)
        for layer, rows in zip(state.cache, prefix.cache, strict=True)
      ],
      tokens=put(state.tokens, newest),
      positions=put(state.positions, lengths - 1),
      limits=put(state.limits, entries["limits"]),
      is_active=put(state.is_active, lengths < entries["limits"]),
      keys=put(state.keys, keys),
      temperature=put(state.temperature, entries["temperature"]),
    )

  def _decode_one(
    self, params: EngineParams, window: int, state: DecodeState
  ) -> tuple[DecodeState, tuple[jax.Array, ...]]:
    positions = state.positions

    def attend(layer, query, key, value):
      written = kv_cache.write_token(state.cache[layer], key, value, positions)
      mixed = kv_cache.attend(written, query, positions, window)
      return mixed, written

    model = transformer.bind(self.model, params.weights, is_stacked=False)
    hidden, cache = model.hidden(state.tokens, positions, attend, self.dtype)
    logits = jnp.matmul(
      hidden,
      model.head().astype(hidden.dtype),
      preferred_element_type=jnp.float32,
    )
    tokens, logprobs = sampling.sample(
      logits, state.keys, positions + 1, state.temperature
    )
    is_end = jnp.zeros_like(state.is_active)
    for end_token in self.end_tokens:
      is_end = is_end | (tokens == end_token)
    grown = positions + 2 >= state.limits  # tokens of the row, this one too
    was_active = state.is_active
    after = dataclasses.replace(
      state,
      cache=cache,
      tokens=jnp.where(was_active, tokens, state.tokens),
      positions=jnp.where(was_active, positions + 1, positions),
      is_active=was_active & ~is_end & ~grown,
    )
    return after, (tokens, was_active, logprobs)

  def _decode_steps(
    self, params: EngineParams, state: DecodeState, *, window: int
  ) -> tuple[DecodeState, jax.Array]:
    def step(state, _):
      return self._decode_one(params, window, state)

    state, (tokens, is_valid, logprobs) = jax.lax.scan(
      step, state, None, length=self.sizes.decode_steps_per_call
    )
    versions = jnp.broadcast_to(params.version, tokens.shape)
    columns = (
      tokens.T,
      is_valid.T.astype(jnp.int32),
      (state.positions + 1)[:, None],
      jax.lax.bitcast_convert_type(logprobs.T, jnp.int32),
      versions.T,
      (~state.is_active).astype(jnp.int32)[:, None],
    )
    return state, jnp.concatenate(columns, axis=1)

  # -- JetStream's interface ------------------------------------------------

  def load_params(self, weights: Any, version: int) -> EngineParams:
    """Weights of a version, placed as the programs expect them."""
    params = EngineParams(weights=weights, version=np.int32(version))
    return jax.device_put(params, self.params_sharding)

  def init_decode_state(self) -> DecodeState:
    """An empty cache with every slot idle."""
    return self._init()

  def prefill(
    self,
    *,
    params: EngineParams,
    existing_prefix: Prefix | None = None,
    padded_tokens: np.ndarray | jax.Array,
    true_length: int | np.ndarray,
  ) -> Prefix:
    """Caches rows of tokens.

    Args:
      params: of `load_params`.
      existing_prefix: not supported; must be None.
      padded_tokens: [T] or [R T] with R <= prefill_rows; T is one of
        prefill_buckets.
      true_length: tokens of each row that are not padding, at least 1.

    Raises:
      ValueError: a shape no program was made for.
    """
    if existing_prefix is not None:
      raise ValueError("existing_prefix: prefill starts at position 0 here")
    tokens = np.atleast_2d(np.asarray(padded_tokens, np.int32))
    lengths = np.atleast_1d(np.asarray(true_length, np.int32))
    rows, width = tokens.shape
    if width not in self.sizes.prefill_buckets:
      raise ValueError(
        f"padded_tokens has length {width}; the buckets are"
        f" {self.sizes.prefill_buckets}"
      )
    if rows > self.sizes.prefill_rows:
      raise ValueError(
        f"{rows} rows; a prefill takes {self.sizes.prefill_rows}"
      )
    missing = self.sizes.prefill_rows - rows
    tokens = np.pad(tokens, ((0, missing), (0, 0)))
    lengths = np.pad(lengths, (0, missing), constant_values=1)
    return self._prefill(params, tokens, lengths)

  def insert(
    self,
    prefix: Prefix,
    decode_state: DecodeState,
    slot: int | Insertion,
  ) -> DecodeState:
    """Puts prefilled rows into slots; `decode_state` is consumed.

    Args:
      prefix: of `prefill`.
      decode_state: to be written into.
      slot: one slot, for row 0 with sampling defaults (JetStream's form), or
        an `Insertion` for many.
    """
    if not isinstance(slot, Insertion):
      b = self.sizes.num_slots
      zeros = np.zeros((b,), np.int32)
      slot = Insertion(
        slots=np.where(np.arange(b) == 0, slot, b).astype(np.int32),
        sources=zeros,
        limits=np.full((b,), self.sizes.cache_tokens, np.int32),
        streams=np.full((b,), sampling.Stream.SERVE, np.int32),
        groups=zeros,
        members=zeros,
        temperature=np.ones((b,), np.float32),
      )
    entries = {
      field.name: getattr(slot, field.name)
      for field in dataclasses.fields(slot)
    }
    return self._insert(prefix, decode_state, entries)

  def generate(
    self,
    params: EngineParams,
    decode_state: DecodeState,
    *,
    window: int | None = None,
  ) -> tuple[DecodeState, jetstream_api.ResultTokens]:
    """Writes decode_steps_per_call tokens in every active slot.

    Args:
      params: weights of this call; they may change at every call.
      decode_state: consumed.
      window: one of window_buckets, larger than any position reached in this
        call; None attends to the whole cache.
    """
    window = window or self.sizes.cache_tokens
    state, data = self._generate(params, decode_state, window=window)
    n = self.sizes.decode_steps_per_call
    result = jetstream_api.ResultTokens(
      data=data,
      tokens_idx=(0, n),
      valid_idx=(n, 2 * n),
      length_idx=(2 * n, 2 * n + 1),
      samples_per_slot=1,
    )
    return state, result

  def read(self, result: jetstream_api.ResultTokens) -> StepResult:
    """Brings a call's packed result to the host; waits for the call."""
    data = np.asarray(result.data)
    n = self.sizes.decode_steps_per_call
    logprobs = np.ascontiguousarray(data[:, 2 * n + 1 : 3 * n + 1])
    return StepResult(
      tokens=data[:, :n],
      is_valid=data[:, n : 2 * n].astype(bool),
      logprobs=logprobs.view(np.float32),
      policy_versions=data[:, 3 * n + 1 : 4 * n + 1],
      has_ended=data[:, 4 * n + 1].astype(bool),
    )

  def get_prefix_destination_sharding(self) -> Any:
    """Where prefixes are expected: on this engine's mesh."""
    return mesh_lib.replicated(self._mesh)

  def get_tokenizer(self) -> Any:
    """Tokens are made outside of the engine; there is nothing to describe."""
    return jetstream_api.TokenizerParameters()

  @property
  def max_concurrent_decodes(self) -> int:
    """Number of slots."""
    return self.sizes.num_slots

  @property
  def samples_per_slot(self) -> int:
    """One sequence a slot."""
    return 1

  @property
  def max_prefill_length(self) -> int:
    """The longest prefill bucket."""
    return self.sizes.prefill_buckets[-1]

  @property
  def mesh(self) -> Mesh:
    """The rollout mesh."""
    return self._mesh

  @property
  def colocated_cpus(self) -> None:
    """Not used here."""
    return None
