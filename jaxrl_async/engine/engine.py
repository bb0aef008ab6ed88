"""The device programs of the rollout slice, behind JetStream's `Engine`.

There are three main programs:

- `prefill` turns rows of one padded length into a cached prefix.
- `insert` puts rows of a prefix into slots.
- `generate` decodes several tokens in every slot.

The weights are an argument of prefill and generate. Running sequences are
interrupted simply by passing other weights to the next call.

The engine differs from other engines in three ways:

- Prefill does not sample. The last prompt token enters the slot as its
  *current* token. The first decode step writes it to the cache and samples the
  next one. Every token of a trajectory is therefore drawn by the same program.
- `insert` may let the device choose an idle slot. A slot is then refilled in
  the call that follows the end of its sequence, before the host has read that
  it ended. The tickets in the results tell which sequence is in which slot.
- A finished slot does not have to be freed. It idles until another sequence is
  inserted over it.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Int
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.devices import shard_copies
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import jitted as jitted_lib
from jaxrl_async.engine import kv_cache
from jaxrl_async.engine import programs as programs_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine.decode_state import DecodeState
from jaxrl_async.engine.decode_state import EngineParams
from jaxrl_async.engine.decode_state import EngineSizes
from jaxrl_async.engine.decode_state import Insertion
from jaxrl_async.engine.decode_state import Prefix
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import quantization
from jaxrl_async.models import transformer
from jaxrl_async.models.attention import choice
from jaxrl_async.models.attention import kernel_names
from jaxrl_async.planning import aot


def _cache_layout(
  sizes: EngineSizes, attention: choice.EngineAttention
) -> kv_cache.Pages | kv_cache.Slots:
  """Return pages that slots share, or a row of the cache for each slot."""
  if not sizes.num_pages:
    return kv_cache.Slots(
      num_slots=sizes.num_slots,
      cache_tokens=sizes.cache_tokens,
      windows=sizes.window_buckets,
    )
  return kv_cache.Pages(
    num_pages=sizes.num_pages,
    page_tokens=sizes.page_tokens,
    attention=attention.decode,
  )


class Engine(jetstream_api.Engine):
  """The compiled programs for one model, mesh and set of shapes.

  Threads: the engine has no state besides its compiled programs and the base
  of a model with LoRA, which is set once, before the first `load_params`.
  Callers own the `DecodeState`s, and each state belongs to one thread at a
  time.

  Attributes:
    calls_in_flight: how many calls a scheduler should have dispatched before it
      reads the first of them.
  """

  def __init__(
    self,
    model: configs.ModelConfig,
    sizes: EngineSizes,
    *,
    mesh: Mesh,
    rules: sections.ShardingRules = mesh_lib.ROLLOUT_RULES,
    seed: int,
    end_tokens: tuple[int, ...],
    dtype: str = "float32",
    weights: sections.WeightFormat = sections.WeightFormat.FLOAT,
    attention: str = kernel_names.AUTO,
  ):
    """Build the programs; each is compiled at its first call.

    Args:
      model: architecture of the model.
      sizes: shapes of the programs.
      mesh: mesh of the rollout slice.
      rules: sharding rules of the rollout slice.
      seed: seed of the run, from which the key of every token is derived.
      end_tokens: tokens that end a sequence unless its settings ignore them.
      dtype: dtype of weights and activations, and of the cache, which is
        float32 on a CPU.
      weights: format of the published weights.
      attention: the wanted implementation; see `choice.for_engine`.

    Raises:
      ConfigError: the wanted attention does not exist or does not work here, or
        pages are to be kept for a model with states.
    """
    sections.require(
      model.delta is None or not sizes.kept_tokens,
      "rollout.kept_tokens",
      "this model has layers with states (the gated delta rule), which are not"
      " in pages; use 0",
    )
    self.model = model
    self.sizes = sizes
    self.seed = seed
    self.end_tokens = end_tokens
    # A run has some, and a turn may have as many more.
    self.num_end_tokens = len(end_tokens) + 2 * sampling.MAX_END_TOKENS
    self.dtype = jnp.dtype(dtype)
    # A call on a CPU has ended when it returns. Elsewhere the device needs its
    # next call before the host has read the last one.
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    self.calls_in_flight = 1 if is_cpu else 2
    self._mesh = mesh
    self._base: Any = None
    self.attention = choice.for_engine(
      attention,
      heads=(model.num_heads, model.num_kv_heads, model.head_dim),
      windows_within=model.windows_within,
      prefill=(sizes.prefill_rows, sizes.prefill_buckets[-1]),
      slots=(sizes.num_slots, sizes.cache_tokens),
      pages=(sizes.num_pages, sizes.page_tokens),
      dtype=self.dtype,
      mesh=mesh,
      rules=rules,
      soft_cap=model.attention_soft_cap,
    )
    axes = transformer.logical_axes(model, is_stacked=False)
    axes = quantization.logical_axes(axes, weights)
    self._replicated = mesh_lib.replicated(mesh)
    self.params_sharding = EngineParams(
      weights=mesh_lib.shardings(mesh, rules, axes), version=self._replicated
    )
    programs = programs_lib.Programs(
      model=model,
      sizes=sizes,
      layout=_cache_layout(sizes, self.attention),
      prefill_attention=self.attention.prefill,
      seed=seed,
      num_end_tokens=self.num_end_tokens,
      dtype=self.dtype,
      cache_dtype=jnp.dtype("float32") if is_cpu else self.dtype,
      on_mesh=mesh_lib.Layout(mesh=mesh, rules=rules),
    )
    self._has_adapters = programs.has_adapters
    held = self.params_sharding
    # On several devices, `load_params` must run no program.
    is_float = weights is sections.WeightFormat.FLOAT
    self._turn = lambda weights: weights
    if is_cpu and is_float and mesh.size == 1 and self.dtype == jnp.bfloat16:
      self._turn = jax.jit(quantization.channels_first)
      leaves = quantization.channels_first_leaves(held.weights)
      held = dataclasses.replace(held, weights=leaves)
    self._jitted = jitted_lib.make(programs, held, mesh=mesh, rules=rules)

  def programs(self, weights: Any) -> list[aot.Program]:
    """Return the largest prefill and decode programs, for planning.

    Args:
      weights: shapes and dtypes of the published weights.
    """
    return self._jitted.largest(jax.eval_shape(self._turn, weights))

  # -- JetStream's interface ------------------------------------------------

  def hold_base(self, weights: Any) -> None:
    """Keep the weights that no policy version changes.

    From now on `load_params` takes adapters alone. As there, weights that are
    placed already are not copied, except for bfloat16 on a single CPU device.

    Args:
      weights: the base of a model with LoRA, as it was published.
    """
    shardings = lora_lib.base(self.params_sharding.weights)
    self._base = self._turn(shard_copies.put(weights, shardings))

  def load_params(self, weights: Any, version: int) -> EngineParams:
    """Return the weights of a policy version, placed as the programs expect.

    Weights that are placed already, as a channel's are, are not copied, except
    for bfloat16 on a single CPU device, which gets a copy in another order.
    """
    shardings = self.params_sharding.weights
    if self._base is not None:
      shardings = lora_lib.adapters(shardings)
    if self._replicated.is_fully_addressable:
      weights = shard_copies.put(weights, shardings)
    # Between several processes, weights come as they have to be placed.
    if self._base is None:
      weights = self._turn(weights)
    else:
      weights = lora_lib.joined(self._base, weights)
    placed = mesh_lib.put(np.array(version, np.int32), self._replicated)
    return EngineParams(weights=weights, version=placed)

  def init_decode_state(self) -> DecodeState:
    """Return a state with an empty cache and every slot idle."""
    return self._jitted.init()

  def prefill(
    self,
    *,
    params: EngineParams,
    existing_prefix: Prefix | None = None,
    padded_tokens: np.ndarray | jax.Array,
    true_length: int | np.ndarray,
    adapters: np.ndarray | None = None,
  ) -> Prefix:
    """Prefill whole rows of tokens in one call.

    Args:
      params: result of `load_params`.
      existing_prefix: not supported; must be None.
      padded_tokens: [T] or [R T] with R <= prefill_rows; T is one of
        prefill_buckets.
      true_length: number of tokens of each row without padding, at least 1.
      adapters: [R] the adapter of each row, if the model has a stack of them.

    Raises:
      ValueError: there is no program for this shape, or an existing prefix is
        given.
    """
    if existing_prefix is not None:
      raise ValueError("existing_prefix: use open_prefix and extend_prefix")
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
    return self._jitted.prefill(
      params, *self._padded(tokens, lengths, adapters)
    )

  def _padded(
    self,
    tokens: Int[np.ndarray, "_ T"],
    lengths: Int[np.ndarray, "_"],
    adapters: Int[np.ndarray, "_"] | None,
  ) -> tuple[
    Int[np.ndarray, "R T"], Int[np.ndarray, "R"], Int[np.ndarray, "R"] | None
  ]:
    """Add rows of one token until there are prefill_rows of them.

    The programs are compiled for exactly that many rows.
    """
    missing = self.sizes.prefill_rows - len(tokens)
    if adapters is None:
      adapters = np.zeros_like(lengths)
    adapters = np.pad(adapters, (0, missing)) if self._has_adapters else None
    tokens = np.pad(tokens, ((0, missing), (0, 0)))
    return tokens, np.pad(lengths, (0, missing), constant_values=1), adapters

  def open_prefix(
    self,
    tokens: np.ndarray,
    lengths: np.ndarray,
    adapters: np.ndarray | None = None,
  ) -> Prefix:
    """Return a prefix whose rows are to be cached by `extend_prefix`.

    Args:
      tokens: [R T] with R <= prefill_rows; T is one of prefill_buckets.
      lengths: [R] number of tokens of each row without padding.
      adapters: as in `prefill`.
    """
    tokens, lengths, adapters = self._padded(tokens, lengths, adapters)
    return self._jitted.open(tokens, lengths, adapters)

  def open_prefix_of_pages(
    self,
    tokens: np.ndarray,
    lengths: np.ndarray,
    decode_state: DecodeState,
    pages: np.ndarray,
    adapters: np.ndarray | None = None,
  ) -> Prefix:
    """Return a prefix in whose rows is cached what pages hold.

    Args:
      tokens: as in `open_prefix`.
      lengths: as in `open_prefix`.
      decode_state: the state whose pages are read. The call is dispatched
        before any that fills them again.
      pages: [R W] for each page_tokens tokens of a row, the page that holds
        them. num_pages means that they are not cached.
      adapters: as in `prefill`.
    """
    tokens, lengths, adapters = self._padded(tokens, lengths, adapters)
    missing = self.sizes.prefill_rows - len(pages)
    pages = np.pad(
      pages, ((0, missing), (0, 0)), constant_values=self.sizes.num_pages
    )
    return self._jitted.open_pages(
      tokens, lengths, adapters, decode_state.cache, pages
    )

  def extend_prefix(
    self, params: EngineParams, prefix: Prefix, start: int | np.ndarray
  ) -> Prefix:
    """Cache prefill_chunk tokens of every row, beginning at `start`.

    Args:
      params: weights of this call.
      prefix: the rows. They are donated and must not be used again.
      start: one position for all rows, or one for each [R], R <= prefill_rows.
        The chunk must not reach beyond the rows' end.
    """
    start = np.asarray(start, np.int32)
    if start.ndim:
      start = np.pad(start, (0, self.sizes.prefill_rows - len(start)))
    return self._jitted.extend(params, prefix, start)

  def fill_pages(
    self,
    prefix: Prefix,
    row: int,
    decode_state: DecodeState,
    pages: np.ndarray,
  ) -> DecodeState:
    """Copy a prefilled row into pages of the cache.

    Args:
      prefix: result of `prefill`, or of `extend_prefix` once all chunks are
        cached.
      row: index of the row in the prefix.
      decode_state: the state to write into; it is donated and must not be used
        again.
      pages: [W] for each page_tokens tokens of the row, the page they are
        copied to. num_pages means that they are not copied.
    """
    return self._jitted.fill(prefix, np.int32(row), decode_state, pages)

  def insert(
    self,
    prefix: Prefix,
    decode_state: DecodeState,
    slot: int | Insertion,
  ) -> DecodeState:
    """Put prefilled rows into slots.

    With a cache of pages, the pages must have been filled with `fill_pages`
    before.

    Args:
      prefix: result of `prefill`, or of `extend_prefix` once all chunks are
        cached.
      decode_state: the state to write into; it is donated and must not be used
        again.
      slot: an `Insertion`, which may fill many slots. A single slot number is
        JetStream's form: it takes row 0 and the default sampling settings.

    Raises:
      ValueError: a slot number is given, but the cache consists of pages.
    """
    if not isinstance(slot, Insertion):
      if self.sizes.num_pages:
        raise ValueError("a cache of pages takes an Insertion")
      entry, slot = slot, self.unused_insertion()
      slot.slots[0] = entry
      settings = slot.settings
      settings.limits[0] = self.sizes.cache_tokens
      settings.end_tokens[0, : len(self.end_tokens)] = self.end_tokens
    return self._jitted.insert(prefix, decode_state, slot)

  def unused_insertion(self) -> Insertion:
    """Return an insertion without used entries, for the caller to fill in."""
    return decode_state_lib.unused_insertion(
      self.sizes, self.num_end_tokens, has_adapters=self._has_adapters
    )

  def release(
    self, decode_state: DecodeState, tickets: Sequence[int]
  ) -> DecodeState:
    """Stop the sequences with these tickets, whatever slots they are in.

    `decode_state` is donated and must not be used again.
    """
    b = self.sizes.num_slots
    for start in range(0, len(tickets), b):
      padded = np.full((b,), -1, np.int32)  # no sequence has this ticket
      some = tickets[start : start + b]
      padded[: len(some)] = some
      decode_state = self._jitted.release(decode_state, padded)
    return decode_state

  def generate(
    self,
    params: EngineParams,
    decode_state: DecodeState,
    *,
    window: int | None = None,
    is_filtered: bool = False,
    tables: tuple[np.ndarray, np.ndarray] | None = None,
    guided: np.ndarray | None = None,
  ) -> tuple[DecodeState, jetstream_api.ResultTokens]:
    """Decode up to decode_steps_per_call tokens in every active slot.

    Args:
      params: weights of this call; they may change with every call.
      decode_state: the state to continue from; it is donated and must not be
        used again.
      window: one of window_buckets, larger than any position reached in this
        call; None attends to the whole cache.
      is_filtered: whether any slot needs more than a temperature, as in
        `sampling.SamplingSettings.is_filtered`.
      tables: [B] the ticket that the host expects in each slot, and [B P] the
        pages of its sequence. A slot that holds another ticket keeps its own
        pages. None changes no pages.
      guided: [B W] int32, a bit for each token that may be drawn next in each
        slot. Only one token is then decoded, since what may follow depends on
        it. None allows all.

    Returns:
      The new state, and the packed result for `read`.
    """
    window = window or self.sizes.cache_tokens
    b, n = self.sizes.num_slots, self.sizes.decode_steps_per_call
    masks = () if guided is None else (guided,)
    if tables is None:
      no_pages = np.zeros((b, self.sizes.pages_per_slot), np.int32)
      tables = np.full((b,), -2, np.int32), no_pages
    state, data = self._jitted.generate(
      params,
      decode_state,
      *tables,
      *masks,
      window=window,
      is_filtered=is_filtered or bool(masks),
    )
    return state, decode_state_lib.result_tokens(data, 1 if masks else n)

  def read(
    self, result: jetstream_api.ResultTokens
  ) -> decode_state_lib.StepResult:
    """Wait until a call is finished and return its result on the host."""
    n = result.tokens_idx[1]
    return decode_state_lib.unpack_result(np.asarray(result.data), n)

  def get_prefix_destination_sharding(self) -> Any:
    """Return the shardings that prefixes must have, as a `Prefix`."""
    return self._jitted.prefix_sharding

  def get_tokenizer(self) -> Any:
    """Return empty parameters, as text is tokenized outside of the engine."""
    return jetstream_api.TokenizerParameters()

  @property
  def max_concurrent_decodes(self) -> int:
    """The number of slots."""
    return self.sizes.num_slots

  @property
  def samples_per_slot(self) -> int:
    """The number of sequences per slot, which is 1."""
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
    """None, because the engine does not use colocated CPUs."""
    return None
