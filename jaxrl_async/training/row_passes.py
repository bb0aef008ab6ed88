"""Forward passes over packed rows in host memory, batch after batch."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Float
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.training import packing

Program = Callable[[transformer.Params, packing.PackedBatch], Any]


class RowPasses:
  """Moves rows to the devices in batches of one shape.

  A batch on the devices is one minibatch of a train step: [1, K, B, T].
  """

  def __init__(
    self,
    mesh: Mesh,
    rules: sections.ShardingRules,
    *,
    rows_per_microbatch: int,
    rows_per_batch: int,
  ):
    """Set up the sharding."""
    self._rows_per_microbatch = rows_per_microbatch
    self._rows_per_batch = rows_per_batch
    self._sharding = mesh_lib.sharding(
      mesh, rules, None, None, "batch", "tokens"
    )

  def _batch(self, rows: packing.PackedBatch) -> packing.PackedBatch:
    shape = (1, -1, self._rows_per_microbatch, rows.tokens.shape[1])
    return jax.tree.map(lambda x: x.reshape(shape), rows)

  def on_device(self, rows: packing.PackedBatch) -> packing.PackedBatch:
    """Move the [R, T] rows of one batch to the devices."""
    return mesh_lib.put(self._batch(rows), self._sharding)

  def each(
    self,
    program: Program,
    params: transformer.Params,
    rows: packing.PackedBatch,
  ) -> Iterator[Any]:
    """Yield a program's results for all rows. Rows of zeros are padding."""
    per_call = self._rows_per_batch
    for first in range(0, len(rows.tokens), per_call):
      batch = jax.tree.map(
        lambda x, first=first: np.pad(
          x[first : first + per_call],
          ((0, max(0, first + per_call - len(x))), (0, 0)),
        ),
        rows,
      )
      yield program(params, self.on_device(batch))

  def of_tokens(
    self,
    program: Program,
    params: transformer.Params,
    rows: packing.PackedBatch,
  ) -> Float[np.ndarray, "rows T"]:
    """Return what a program gives for each token of any number of rows."""
    parts = [
      np.asarray(x).reshape(-1, rows.tokens.shape[1])
      for x in self.each(program, params, rows)
    ]
    return np.concatenate(parts)[: len(rows.tokens)]
