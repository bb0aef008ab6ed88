"""The programs of an engine, jitted for a mesh, and their arguments."""

import dataclasses
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
  open_pages: Any
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
    shapes = jax.eval_shape(self.open, tokens, lengths, adapters)
    return aot.placed(shapes, self.prefix_sharding)

  def largest(self, weights: Any) -> list[aot.Program]:
    """Return the largest prefill and decode programs, for planning.

    For a chunked bucket the prefill program is that of one chunk. What counts
    as resident includes the weights of the previous policy version, which stay
    in memory while a new one is adopted.

    Args:
      weights: shapes and dtypes of the published weights.
    """
    params, state = self._params(weights), self._state()
    sizes = self.programs.sizes
    previous = params.weights
    if self.programs.model.lora is not None:
      previous = lora_lib.adapters(previous)
    bucket, slots = sizes.prefill_buckets[-1], sizes.num_slots
    prefill, arguments = self.prefill, (params, *self._rows(bucket))
    if sizes.is_chunked(bucket):
      prefix = self._opened(bucket)
      prefill, arguments = self.extend, (params, prefix, np.int32(0))
    tables = (
      jax.ShapeDtypeStruct((slots,), np.int32),
      jax.ShapeDtypeStruct((slots, sizes.pages_per_slot), np.int32),
    )
    return [
      aot.Program(
        name="prefill",
        function=prefill,
        arguments=arguments,
        resident=(state, previous),
      ),
      aot.Program(
        name="decode",
        function=self.generate,
        arguments=(params, state, *tables),
        settings={"window": sizes.cache_tokens, "is_filtered": False},
        resident=previous,
      ),
    ]


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
    cache=decode_state_lib.with_state_shardings(
      jax.tree.map(lambda _: layer, shapes.cache),
      programs.model,
      "batch",
      mesh,
      rules,
    ),
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
    open_pages=jax.jit(programs.open_pages, out_shardings=prefix),
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
