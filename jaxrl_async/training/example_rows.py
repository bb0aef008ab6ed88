"""Examples of supervised training as packed rows, and their order.

Examples are packed into rows once. Each step trains on the next rows of a
random order, which is drawn anew for each pass. `pack_examples` packs all of
them before the first step. `packed_ahead` packs them in parts, so that training
begins when the first part is ready.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import itertools
import operator

import jax
from jaxtyping import Float, Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.training import packing
from jaxrl_async.training import segments as segments_lib


def trajectory(
  member: int, example: worked_examples_lib.WorkedExample
) -> types.Trajectory:
  """Return an example as a trajectory, which no policy has written."""
  length = len(example.tokens)
  return types.Trajectory(
    member=member,
    tokens=example.tokens,
    loss_mask=example.loss_mask,
    behavior_logprobs=np.zeros((length,), np.float32),
    policy_versions=np.full((length,), -1, np.int32),
  )


def plan(
  examples: Iterable[worked_examples_lib.WorkedExample],
  *,
  tokens_per_row: int,
  fields: Mapping[str, Sequence[Float[np.ndarray, "_"]]] | None = None,
) -> segments_lib.Segments:
  """Decide in which row each example lies."""
  trajectories = [trajectory(i, example) for i, example in enumerate(examples)]
  return packing.plan(
    [packing.without_prompt(trajectories)],
    np.zeros((len(trajectories),), np.float32),
    tokens_per_row=tokens_per_row,
    rows_per_microbatch=1,
    num_minibatches=1,
    fields=fields,
  )


def rows_of(segments: segments_lib.Segments) -> packing.PackedBatch:
  """Return the rows of these segments as [R, T] arrays, without empty ones."""
  packed = packing.packed_batch(dict(segments.filled()))
  rows = jax.tree.map(lambda x: x.reshape(-1, segments.shape[3]), packed)
  used = rows.segment_ids.any(axis=1)
  return jax.tree.map(lambda x: x[used], rows)


def pack_examples(
  examples: Iterable[worked_examples_lib.WorkedExample], *, tokens_per_row: int
) -> packing.PackedBatch:
  """Return the examples packed into rows, as [R, T] arrays."""
  return rows_of(plan(examples, tokens_per_row=tokens_per_row))


def row_order(
  sizes: Iterable[int], rows_per_batch: int, seed: int
) -> Iterator[Int[np.ndarray, "rows_per_batch"]]:
  """Yield the rows of each step, endlessly; every pass has its own order.

  The first pass goes through the parts one after the other, each in a random
  order. Later passes shuffle the rows of all parts. A batch may hold the end of
  one part or pass and the beginning of the next.

  Args:
    sizes: the number of rows of each part. A size is asked for when the rows
      before it have been given out.
  """
  rng = np.random.default_rng(seed)
  sizes = iter(sizes)
  num_rows = 0
  order = np.zeros((0,), np.int64)
  while True:
    while len(order) < rows_per_batch:
      size = next(sizes, None)
      if size is None:
        order = np.append(order, rng.permutation(num_rows))
      else:
        order = np.append(order, num_rows + rng.permutation(size))
        num_rows += size
    chosen, order = np.split(order, [rows_per_batch])
    yield chosen


def packed_ahead(
  examples: Iterable[worked_examples_lib.WorkedExample],
  *,
  tokens_per_row: int,
  examples_per_part: int = 256,
) -> Generator[packing.PackedBatch, None, None]:
  """Yield the examples packed into rows, part by part.

  A thread makes the next part while the caller works with the last one.
  Closing the generator ends the thread.

  Args:
    examples: is iterated over in the thread.
  """
  stream = iter(examples)

  def next_part() -> packing.PackedBatch | None:
    part = [*itertools.islice(stream, examples_per_part)]
    return pack_examples(part, tokens_per_row=tokens_per_row) if part else None

  with concurrent.futures.ThreadPoolExecutor(1, "examples") as thread:
    pending = thread.submit(next_part)
    while (part := pending.result()) is not None:
      pending = thread.submit(next_part)
      yield part


def batches(
  parts: Iterable[packing.PackedBatch], rows_per_batch: int, seed: int
) -> Iterator[packing.PackedBatch]:
  """Yield the rows of each step, endlessly, in the order of `row_order`.

  Args:
    parts: rows, as from `packed_ahead`; at least one. A part is asked for when
      the rows before it have been given out.
  """
  made: list[packing.PackedBatch] = []

  def sizes() -> Iterator[int]:
    for part in parts:
      made.append(part)
      yield len(part.tokens)
    made[:] = [_joined(made)]  # later passes take rows of all of them

  for chosen in row_order(sizes(), rows_per_batch, seed):
    ends = np.cumsum([len(part.tokens) for part in made])
    # In the first pass the rows of a batch come from one part after the other.
    part_of = np.searchsorted(ends, chosen, side="right")
    pieces = []
    for n in np.unique(part_of).tolist():
      first = ends[n] - len(made[n].tokens)
      rows = chosen[part_of == n] - first
      pieces.append(jax.tree.map(operator.itemgetter(rows), made[n]))
    yield _joined(pieces)


def _joined(parts: Sequence[packing.PackedBatch]) -> packing.PackedBatch:
  return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
