"""The programs of an engine, jitted for a mesh, and their arguments."""

from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import programs as programs_lib
from jaxrl_async.engine.decode_state import DecodeState
from jaxrl_async.engine.decode_state import EngineParams
from jaxrl_async.engine.decode_state import Prefix
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.planning import aot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jitted:
  """The methods of `programs_lib.Programs`, jitted with shardings.

  Each is compiled at its first call, once for each shape of its arguments.

  Attributes:
    programs: the functions.
    params_sharding: of the weights and their version.
    state_sharding: of a `DecodeState`.
    prefix_sharding: of a `Prefix`.
  """

  programs: programs_lib.Programs
  params_sharding: EngineParams
  state_sharding: DecodeState
  prefix_sharding: Prefix
  init: Any
  prefill: Any
  open: Any
  extend: Any
  fill: Any
  insert: Any
  release: Any
  generate: Any

  def _params(self, weights: Any) -> EngineParams:
    version = jax.ShapeDtypeStruct((), np.int32)
    return aot.placed(
      EngineParams(weights=weights, version=version), self.params_sharding
    )

  def _state(self) -> DecodeState:
    return aot.placed(jax.eval_shape(self.init), self.state_sharding)

  def _rows(self, bucket: int) -> tuple[Any, Any, Any]:
    """Return tokens, lengths and adapters of the rows of a prefill."""
    rows = self.programs.sizes.prefill_rows
    tokens = jax.ShapeDtypeStruct((rows, bucket), np.int32)
    lengths = jax.ShapeDtypeStruct((rows,), np.int32)
    return tokens, lengths, lengths if self.programs.has_adapters else None

  def _opened(self, bucket: int) -> Prefix:
    tokens, lengths, adapters = self._rows(bucket)
    shapes = jax.eval_shape(self.open, tokens, lengths, None, adapters)
    return aot.placed(shapes, self.prefix_sharding)

  def _prefill_program(
    self, params: EngineParams, bucket: int, resident: Any = ()
  ) -> aot.Program:
    """Return the program that prefills a bucket, or one chunk of it."""
    function, arguments = self.prefill, (params, *self._rows(bucket))
    if self.programs.sizes.is_chunked(bucket):
      prefix = self._opened(bucket)
      function, arguments = self.extend, (params, prefix, np.int32(0))
    return aot.Program(
      name="prefill",
      function=function,
      arguments=arguments,
      resident=resident,
    )

  def _decode_program(
    self,
    params: EngineParams,
    state: DecodeState,
    window: int,
    resident: Any = (),
  ) -> aot.Program:
    """Return the program that decodes with an attention over a window."""
    sizes = self.programs.sizes
    b = sizes.num_slots
    tables = (
      jax.ShapeDtypeStruct((b,), np.int32),
      jax.ShapeDtypeStruct((b, sizes.pages_per_slot), np.int32),
    )
    return aot.Program(
      name="decode",
      function=self.generate,
      arguments=(params, state, *tables),
      settings={"window": window, "is_filtered": False},
      resident=resident,
    )

  def largest(self, weights: Any, num_held: int) -> list[aot.Program]:
    """Return the largest prefill and decode programs, for planning.

    For a chunked bucket the prefill program is that of one chunk. What counts
    as resident includes the weights of the previous policy version, which stay
    in memory while a new one is adopted, and a second cache, which exists while
    a policy version is evaluated.

    Args:
      weights: shapes and dtypes of the published weights.
      num_held: versions that are held for evaluations, at most 1.
    """
    params, state = self._params(weights), self._state()
    sizes = self.programs.sizes
    previous = params.weights
    if self.programs.model.lora is not None:
      previous = lora_lib.adapters(previous)
    previous = [previous] * (1 + num_held)
    return [
      self._prefill_program(
        params, sizes.prefill_buckets[-1], (state, state, previous)
      ),
      self._decode_program(
        params, state, sizes.cache_tokens, (state, previous)
      ),
    ]

  def first(self, weights: Any) -> list[aot.Program]:
    """Return the programs of `Engine.first_programs`."""
    params, state = self._params(weights), self._state()
    sizes = self.programs.sizes
    return [
      aot.Program(name="init", function=self.init, arguments=()),
      *self._of_bucket(params, state, sizes.prefill_buckets[0]),
      *(
        self._decode_program(params, state, window)
        for window in sizes.window_buckets
      ),
    ]

  def later(self, weights: Any) -> list[aot.Program]:
    """Return the programs of `Engine.later_programs`."""
    params, state = self._params(weights), self._state()
    sizes = self.programs.sizes
    tickets = jax.ShapeDtypeStruct((sizes.num_slots,), np.int32)
    return [
      aot.Program(
        name="release", function=self.release, arguments=(state, tickets)
      ),
      *itertools.chain.from_iterable(
        self._of_bucket(params, state, bucket)
        for bucket in sizes.prefill_buckets[1:]
      ),
    ]

  def _of_bucket(
    self, params: EngineParams, state: DecodeState, bucket: int
  ) -> Iterator[aot.Program]:
    """Yield the programs through which rows of a bucket come into slots."""
    sizes = self.programs.sizes
    rows = self._rows(bucket)
    prefill = self._prefill_program(params, bucket)
    if sizes.is_chunked(bucket):
      tokens, lengths, adapters = rows
      yield aot.Program(
        name="open",
        function=self.open,
        arguments=(tokens, lengths, None, adapters),
      )
      prefix = self._opened(bucket)
    else:
      shapes = jax.eval_shape(self.prefill, *prefill.arguments)
      prefix = aot.placed(shapes, self.prefix_sharding)
    yield prefill
    if sizes.num_pages:
      pages = jax.ShapeDtypeStruct((bucket // sizes.page_tokens,), np.int32)
      yield aot.Program(
        name="fill",
        function=self.fill,
        arguments=(prefix, np.int32(0), state, pages),
      )
    insertion = decode_state_lib.unused_insertion(
      sizes,
      self.programs.num_end_tokens,
      has_adapters=self.programs.has_adapters,
    )
    yield aot.Program(
      name="insert",
      function=self.insert,
      arguments=(prefix, state, insertion),
    )


def make(
  programs: programs_lib.Programs,
  params_sharding: EngineParams,
  *,
  mesh: Mesh,
  rules: sections.ShardingRules,
) -> Jitted:
  """Jit the programs for a mesh; nothing is compiled yet.

  Args:
    programs: the functions.
    params_sharding: sharding of the weights and their version.
    mesh: mesh of the rollout slice.
    rules: sharding rules of the rollout slice.
  """
  slots = mesh_lib.sharding(mesh, rules, "batch")
  layer = mesh_lib.sharding(mesh, rules, *programs.layout.logical_axes)
  shapes = jax.eval_shape(programs.init_state)
  state = dataclasses.replace(
    jax.tree.map(lambda _: slots, shapes),
    cache=jax.tree.map(lambda _: layer, shapes.cache),
  )
  prefix = decode_state_lib.prefix_sharding(
    programs.model, programs.sizes, mesh, rules
  )
  rows = prefix.tokens
  return Jitted(
    programs=programs,
    params_sharding=params_sharding,
    state_sharding=state,
    prefix_sharding=prefix,
    init=jax.jit(programs.init_state, out_shardings=state),
    prefill=jax.jit(
      programs.prefill_rows,
      in_shardings=(params_sharding, rows, rows, prefix.adapters),
      out_shardings=prefix,
    ),
    open=jax.jit(programs.open_rows, out_shardings=prefix),
    extend=jax.jit(
      programs.extend_rows, donate_argnames="prefix", out_shardings=prefix
    ),
    fill=jax.jit(
      programs.fill_pages, donate_argnames="state", out_shardings=state
    ),
    insert=jax.jit(
      programs.insert_rows, donate_argnames="state", out_shardings=state
    ),
    release=jax.jit(
      programs.release_slots, donate_argnames="state", out_shardings=state
    ),
    generate=jax.jit(
      programs.decode_steps,
      static_argnames=("window", "is_filtered"),
      donate_argnames="state",
      out_shardings=(state, mesh_lib.replicated(mesh)),
    ),
  )
