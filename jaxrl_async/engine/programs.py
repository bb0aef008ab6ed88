"""The engine's programs: pure functions of weights, prefixes and slots."""

import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import kv_cache
from jaxrl_async.engine import sampling
from jaxrl_async.engine.decode_state import DecodeState
from jaxrl_async.engine.decode_state import EngineParams
from jaxrl_async.engine.decode_state import EngineSizes
from jaxrl_async.engine.decode_state import Insertion
from jaxrl_async.engine.decode_state import Prefix
from jaxrl_async.models import configs
from jaxrl_async.models import experts as experts_lib
from jaxrl_async.models import gated_delta
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
  """The device programs for one model and set of shapes, not yet compiled.

  Attributes:
    layout: the layout of the cache, which also defines how decoding attends.
    prefill_attention: attention for prefilling whole rows at once.
    seed: seed of the run, from which the key of every token is derived.
    num_end_tokens: number of end tokens that fit into a slot.
    dtype: dtype of weights and activations.
    cache_dtype: dtype of cached keys and values.
    on_mesh: the mesh and its rules, for what the compiler would split badly.
      None leaves all of it to the compiler.
  """

  model: configs.ModelConfig
  sizes: EngineSizes
  layout: kv_cache.Slots | kv_cache.Pages
  prefill_attention: reference.CausalAttention
  seed: int
  num_end_tokens: int
  dtype: jnp.dtype
  cache_dtype: jnp.dtype
  on_mesh: mesh_lib.Layout | None = None

  def _placement(self, *, is_prefill: bool) -> experts_lib.Placement | None:
    """Return how the states of tokens are split."""
    if self.on_mesh is None:
      return None
    if not is_prefill:
      return experts_lib.Placement(self.on_mesh, ("batch",))
    rows = self.sizes.prefill_rows_axis(self.on_mesh)
    return experts_lib.Placement(self.on_mesh, (rows, None))

  @property
  def has_adapters(self) -> bool:
    """Whether each sequence chooses one of several adapters."""
    return self.model.lora is not None and self.model.lora.num_adapters > 0

  def init_state(self) -> DecodeState:
    """Return a state with an empty cache and every slot idle."""
    b = self.sizes.num_slots
    return DecodeState(
      cache=kv_cache.with_states(
        self.model,
        b,
        self.cache_dtype,
        self.layout.init(self.model, self.cache_dtype),
      ),
      tokens=jnp.zeros((b,), jnp.int32),
      positions=jnp.zeros((b,), jnp.int32),
      is_active=jnp.zeros((b,), bool),
      keys=jnp.zeros((b, 2), jnp.uint32),
      settings=decode_state_lib.unused_slots(
        jnp.full,
        b,
        self.sizes,
        self.num_end_tokens,
        has_adapters=self.has_adapters,
      ),
    )

  def prefill_rows(
    self,
    params: EngineParams,
    tokens: Int[Array, "R T"],
    lengths: Int[Array, "R"],
    adapters: Int[Array, "R"] | None = None,
  ) -> Prefix:
    """Prefill whole rows at once; `adapters` is as in `open_rows`."""
    rows, width = tokens.shape
    order = jnp.arange(width, dtype=jnp.int32)[None]
    positions = jnp.broadcast_to(order, (rows, width))
    windows = self.model.windows_within(width)

    def attend(
      layer: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, kv_cache.Layer]:
      mixed = self.prefill_attention(
        query,
        key,
        value,
        lengths,
        sliding_window=windows[layer],
        soft_cap=self.model.attention_soft_cap,
      )
      return mixed, kv_cache.from_prefill(key, value, self.cache_dtype)

    def recur(
      _: int,
      inputs: gated_delta.Inputs,
      filters: gated_delta.Filters,
      activation: gated_delta.Activation,
    ) -> tuple[jax.Array, gated_delta.State | None]:
      assert self.model.delta is not None
      empty = gated_delta.empty(self.model.delta, rows, self.cache_dtype)
      return gated_delta.over_rows(
        inputs, filters, activation, positions, empty, lengths - 1
      )

    model = transformer.bind(self.model, params.weights, is_stacked=False)
    embedded = model.embed(tokens, self.dtype)
    _, cache = model.hidden(
      embedded,
      positions,
      attend,
      rows=adapters,
      recur=recur,
      placement=self._placement(is_prefill=True),
    )
    return Prefix(
      cache=cache, tokens=tokens, lengths=lengths, adapters=adapters
    )

  def open_rows(
    self,
    tokens: Int[Array, "R T"],
    lengths: Int[Array, "R"],
    adapters: Int[Array, "R"] | None = None,
  ) -> Prefix:
    """Return rows in which nothing is cached yet.

    Args:
      tokens: padded tokens of each row.
      lengths: number of tokens of each row without padding.
      adapters: the adapter of each row, if there are several.
    """
    rows, width = tokens.shape
    cache = kv_cache.empty_rows(
      self.model, rows=rows, tokens=width, dtype=self.cache_dtype
    )
    return Prefix(
      cache=cache, tokens=tokens, lengths=lengths, adapters=adapters
    )

  def open_pages(
    self,
    tokens: Int[Array, "R T"],
    lengths: Int[Array, "R"],
    adapters: Int[Array, "R"] | None,
    pools: list[kv_cache.Layer],
    pages: Int[Array, "R W"],
  ) -> Prefix:
    """Return rows in which what the pages hold is cached.

    Args:
      tokens: as in `open_rows`.
      lengths: as in `open_rows`.
      adapters: as in `open_rows`.
      pools: the cache of pages.
      pages: the pages of each row, as in `kv_cache.Pages.rows`.
    """
    assert isinstance(self.layout, kv_cache.Pages)
    cache = [self.layout.rows(pool, pages) for pool in pools]
    return Prefix(
      cache=cache, tokens=tokens, lengths=lengths, adapters=adapters
    )

  def extend_rows(
    self,
    params: EngineParams,
    prefix: Prefix,
    start: Int[Array, ""] | Int[Array, "R"],
  ) -> Prefix:
    """Cache the chunk of every row that begins at `start`.

    Args:
      params: weights and their policy version.
      prefix: the rows, cached up to `start`.
      start: one position for all rows, or one for each.
    """
    (rows, width), chunk = prefix.tokens.shape, self.sizes.prefill_chunk
    positions = kv_cache.positions_from(start, chunk)
    positions = jnp.broadcast_to(positions, (rows, chunk))
    if jnp.ndim(start):
      tokens = jnp.take_along_axis(prefix.tokens, positions, axis=1)
    else:
      tokens = jax.lax.dynamic_slice_in_dim(prefix.tokens, start, chunk, axis=1)
    windows = self.model.windows_within(width)

    def attend(
      layer: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, kv_cache.Layer]:
      added = kv_cache.from_prefill(key, value, self.cache_dtype)
      written = kv_cache.extend_rows(prefix.cache[layer], added, start)
      mixed = kv_cache.attend_rows(
        written,
        query,
        start,
        sliding_window=windows[layer],
        soft_cap=self.model.attention_soft_cap,
      )
      return mixed, written

    def recur(
      layer: int,
      inputs: gated_delta.Inputs,
      filters: gated_delta.Filters,
      activation: gated_delta.Activation,
    ) -> tuple[jax.Array, gated_delta.State | None]:
      num_kept = jnp.clip(prefix.lengths - 1 - positions[:, 0], 0, chunk)
      return gated_delta.over_rows(
        inputs, filters, activation, positions, prefix.cache[layer], num_kept
      )

    model = transformer.bind(self.model, params.weights, is_stacked=False)
    embedded = model.embed(tokens, self.dtype)
    _, cache = model.hidden(
      embedded,
      positions,
      attend,
      rows=prefix.adapters,
      recur=recur,
      placement=self._placement(is_prefill=True),
    )
    return dataclasses.replace(prefix, cache=cache)

  def fill_pages(
    self,
    prefix: Prefix,
    row: Int[Array, ""],
    state: DecodeState,
    pages: Int[Array, "W"],
  ) -> DecodeState:
    """Copy a prefilled row into pages."""
    assert isinstance(self.layout, kv_cache.Pages)
    layers = zip(state.cache, prefix.cache, strict=True)
    cache = [
      x
      if isinstance(x, gated_delta.State)
      else self.layout.fill(x, rows, row, pages)
      for x, rows in layers
    ]
    return dataclasses.replace(state, cache=cache)

  def insert_rows(
    self, prefix: Prefix, state: DecodeState, entries: Insertion
  ) -> DecodeState:
    """Put prefilled rows into slots; see `Insertion`."""
    num_slots = self.sizes.num_slots
    # The j-th new entry with `PICK` gets the j-th idle slot, or none. Tickets
    # are taken in order, so an entry whose ticket is not above the newest one
    # in a slot was taken by an earlier call.
    is_new = entries.settings.tickets > state.settings.tickets.max()
    is_picking = (entries.slots == decode_state_lib.PICK) & is_new
    (idle,) = jnp.nonzero(
      ~state.is_active, size=num_slots, fill_value=num_slots
    )
    rank = jnp.clip(jnp.cumsum(is_picking) - 1, 0, num_slots - 1)
    wanted = jnp.where(entries.slots < 0, num_slots, entries.slots)
    slots = jnp.where(is_picking, idle[rank], wanted)
    sources = entries.sources
    lengths = prefix.lengths[sources]
    cache = []
    for layer, rows in zip(state.cache, prefix.cache, strict=True):
      if isinstance(layer, gated_delta.State):
        layer = kv_cache.insert_states(layer, rows, slots, sources)
      elif isinstance(self.layout, kv_cache.Slots):
        layer = self.layout.insert(layer, rows, slots, sources, prefix.lengths)
      cache.append(layer)

    def put(array: jax.Array, rows: jax.Array) -> jax.Array:
      return array.at[slots].set(rows.astype(array.dtype), mode="drop")

    return DecodeState(
      cache=cache,
      tokens=put(state.tokens, prefix.tokens[sources, lengths - 1]),
      positions=put(state.positions, lengths - 1),
      is_active=put(state.is_active, lengths < entries.settings.limits),
      keys=put(
        state.keys,
        sampling.row_keys(
          jnp.int32(self.seed), entries.streams, entries.groups, entries.members
        ),
      ),
      settings=jax.tree.map(put, state.settings, entries.settings),
    )

  def release_slots(
    self, state: DecodeState, tickets: Int[Array, "B"]
  ) -> DecodeState:
    """Stop the sequences with these tickets."""
    is_released = (state.settings.tickets[:, None] == tickets[None]).any(axis=1)
    return dataclasses.replace(state, is_active=state.is_active & ~is_released)

  def _is_allowed(
    self, state: DecodeState, guided: Int[Array, "B W"] | None
  ) -> jax.Array:
    """Return [B V]: False for what guides forbid, and for early end tokens.

    These are the end tokens of sequences below min_lengths.
    """
    rows = jnp.arange(self.sizes.num_slots)[:, None]
    is_early = state.positions + 1 < state.settings.min_lengths
    ends = jnp.where(is_early[:, None], state.settings.end_tokens, -1)
    ends = jnp.where(ends < 0, self.model.vocab_size, ends)  # out of range
    allowed = jnp.ones((self.sizes.num_slots, self.model.vocab_size), bool)
    if guided is not None:
      allowed = sampling.unpacked(guided, self.model.vocab_size)
    return allowed.at[rows, ends].set(False, mode="drop")

  def _filters(
    self, state: DecodeState, guided: Int[Array, "B W"] | None
  ) -> sampling.Filters:
    """Return what the tokens of this step are drawn from."""
    return sampling.Filters(
      top_k=state.settings.top_k,
      top_p=state.settings.top_p,
      min_p=state.settings.min_p,
      is_allowed=self._is_allowed(state, guided),
    )

  def _decode_one(
    self,
    params: EngineParams,
    window: int,
    is_filtered: bool,
    guided: Int[Array, "B W"] | None,
    numbers: tuple[Float[Array, "B"], Float[Array, "B"]],
    state: DecodeState,
  ) -> tuple[DecodeState, tuple[jax.Array, ...]]:
    """Draw one token in every active slot, and cache the one before it.

    Args:
      params: weights and their policy version.
      window: as in `decode_steps`.
      is_filtered: as in `decode_steps`.
      guided: as in `decode_steps`.
      numbers: the quantiles that draw the tokens, and their fractions.
      state: the state to continue from.

    Returns:
      The new state, and tokens, validity and logprobs [B]. With guides also
      whether they have changed the distribution of each row [B].
    """
    positions, settings = state.positions, state.settings
    was_active = state.is_active
    # A kernel then reads only one token for an idle slot.
    seen = jnp.where(was_active, positions, 0)
    windows = self.model.windows_within(window)

    def attend(
      layer: int, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, Any]:
      written: Any = self.layout.write(
        state.cache[layer],
        key,
        value,
        positions,
        settings.pages,
        was_active,
        window,
      )
      mixed = self.layout.attend(
        written,
        query,
        seen,
        settings.pages,
        window,
        windows[layer],
        self.model.attention_soft_cap,
      )
      return mixed, written

    model = transformer.bind(self.model, params.weights, is_stacked=False)
    embedded = model.embed(state.tokens, self.dtype)
    hidden, cache = model.hidden(
      embedded,
      positions,
      attend,
      rows=settings.adapters,
      recur=lambda layer, inputs, filters, activation: gated_delta.step(
        inputs, filters, activation, state.cache[layer]
      ),
      placement=self._placement(is_prefill=False),
    )
    logits = model.logits(hidden)
    filters = self._filters(state, guided) if is_filtered else None
    quantiles, fractions = numbers
    tokens, logprobs = sampling.sample(
      logits, quantiles, settings.temperature, filters, fractions
    )
    is_drawn = was_active
    if self.sizes.replay_tokens:
      index = (positions + 1)[:, None]
      known = jnp.take_along_axis(settings.replay, index, axis=1, mode="clip")
      is_known = positions + 1 < settings.replay_lengths
      tokens = jnp.where(is_known, known[:, 0], tokens)
      is_drawn = was_active & ~is_known
    is_end = (tokens[:, None] == settings.end_tokens).any(axis=1) & is_drawn
    # The row has positions + 2 tokens, the new one included.
    grown = positions + 2 >= settings.limits
    after = dataclasses.replace(
      state,
      cache=cache,
      tokens=jnp.where(was_active, tokens, state.tokens),
      positions=jnp.where(was_active, positions + 1, positions),
      is_active=was_active & ~is_end & ~grown,
    )
    if guided is None:
      return after, (tokens, is_drawn, logprobs)
    is_steered = sampling.is_steered(
      logits,
      settings.temperature,
      sampling.unpacked(guided, self.model.vocab_size),
    )
    return after, (tokens, is_drawn, logprobs, is_steered)

  def decode_steps(
    self,
    params: EngineParams,
    state: DecodeState,
    tickets: Int[Array, "B"],
    pages: Int[Array, "B P"],
    guided: Int[Array, "B W"] | None = None,
    *,
    window: int,
    is_filtered: bool,
  ) -> tuple[DecodeState, jax.Array]:
    """Decode several tokens in every slot, or one if there are guides.

    Args:
      params: weights and their policy version.
      state: the state to continue from.
      tickets: the ticket that the host expects in each slot.
      pages: the pages of these sequences.
      guided: a bit for each token that may be drawn next, see
        `sampling.unpacked`. It requires `is_filtered`.
      window: number of cached tokens that attention covers, larger than any
        position reached in this call.
      is_filtered: whether any slot needs more than a temperature.

    Returns:
      The new state, and the packed result of `decode_state.pack_result`.
    """
    # A slot keeps its own pages if its sequence is not the one that the host
    # expects there.
    settings = state.settings
    is_known = (settings.tickets == tickets)[:, None]
    settings = dataclasses.replace(
      settings, pages=jnp.where(is_known, pages, settings.pages)
    )
    state = dataclasses.replace(state, settings=settings)

    # A slot that is active goes on by a position in each step. Drawn here, the
    # numbers of all steps cost hardly more than those of one.
    n = self.sizes.decode_steps_per_call if guided is None else 1
    steps = jnp.arange(n, dtype=jnp.int32)
    positions = state.positions[None] + 1 + steps[:, None]
    numbers = (
      sampling.uniforms(state.keys, positions),
      sampling.fractions(state.keys, positions),
    )

    def step(
      state: DecodeState, numbers: tuple[jax.Array, jax.Array]
    ) -> tuple[DecodeState, tuple[jax.Array, ...]]:
      return self._decode_one(
        params, window, is_filtered, guided, numbers, state
      )

    # The number of steps is fixed. If it depended on the slots, a GPU would
    # have to ask the host after each of them.
    state, written = jax.lax.scan(step, state, numbers)
    return state, decode_state_lib.pack_result(state, params.version, *written)
