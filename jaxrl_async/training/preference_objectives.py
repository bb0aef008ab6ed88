"""Pairs of completions in packed rows, and what is learned from them.

The two trajectories of a pair lie next to each other in one row, the chosen one
first. So the segments 1 and 2 of a row are a pair, 3 and 4 are one, and so on:
odd segments are chosen ones. A loss of pairs adds up over microbatches like any
other, since no pair is divided.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
from typing import Any

from jax import numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from jaxrl_async.algorithms import preferences
from jaxrl_async.config import sections
from jaxrl_async.data import pairs as pairs_lib
from jaxrl_async.training import example_rows
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import segments as segments_lib
from jaxrl_async.training import sft

# The field with the sum of a trajectory's logprobs under the reference, at its
# first token.
REFERENCE = "reference_sums"


def pack_pairs(
  pairs: Sequence[pairs_lib.Pair], *, tokens_per_row: int
) -> packing.PackedBatch:
  """Return the pairs packed into rows, as [R, T] arrays.

  The rows are those that the joined pairs would be packed into. There each of
  them is divided into its two trajectories.
  """
  whole = example_rows.plan(
    map(pairs_lib.joined, pairs), tokens_per_row=tokens_per_row
  )
  split = [
    example_rows.trajectory(member, example)
    for member, pair in enumerate(pairs)
    for example in (pair.chosen, pair.rejected)
  ]
  lengths = np.array([len(t.tokens) for t in split], np.int64)
  before = np.stack([np.zeros_like(lengths[::2]), lengths[::2]], axis=1)
  ids = 2 * whole.segment_ids[:, None] - np.array([1, 0])
  return example_rows.rows_of(
    dataclasses.replace(
      whole,
      starts=(whole.starts[:, None] + before).reshape(-1),
      lengths=lengths,
      segment_ids=ids.reshape(-1),
      advantages=np.zeros(len(split), np.float32),
      values={
        name: [getattr(t, name) for t in split] for name in segments_lib.VALUES
      },
    )
  )


def is_first_token(batch: packing.PackedBatch) -> Bool[Any, "*leading T"]:
  """Return which tokens are the first one of a trajectory."""
  return (batch.positions == 0) & (batch.segment_ids > 0)


def digest(*parts: packing.PackedBatch) -> str:
  """Return what differs if a trajectory or its place in the rows does."""
  found = hashlib.sha256()
  for rows in parts:
    for array in (
      rows.tokens,
      rows.segment_ids,
      rows.positions,
      rows.loss_mask,
    ):
      found.update(f"{array.dtype}{array.shape}".encode())
      found.update(array.tobytes())
  return found.hexdigest()


def with_reference(
  rows: packing.PackedBatch, sums: Sequence[float]
) -> packing.PackedBatch:
  """Return rows with the field `REFERENCE`.

  Args:
    rows: result of `pack_pairs`, in host memory.
    sums: for each trajectory, in the order of rows and columns.
  """
  field = np.zeros(rows.tokens.shape, np.float32)
  field[is_first_token(rows)] = np.asarray(sums, np.float32)
  return rows.with_arrays({REFERENCE: field})


def margins(
  batch: packing.PackedBatch, values: Float[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
  """Return by how much the value of the chosen one is larger.

  Args:
    values: what is compared, at the first token of each trajectory.

  Returns:
    The margin of each token's pair, and which tokens stand for their pair: the
    first one of each chosen trajectory.
  """
  is_first = is_first_token(batch)
  is_chosen = batch.segment_ids % 2 == 1
  signed = jnp.where(is_chosen, values, -values)
  pair_ids = (batch.segment_ids + 1) // 2
  found = objectives.row_sum(jnp.where(is_first, signed, 0), pair_ids)
  return found, is_first & is_chosen


def num_pairs(totals: Mapping[str, Float[Array, ""]]) -> Float[Array, ""]:
  """Return the number of pairs of a minibatch."""
  return totals["num_trajectories"] / 2


def preference(section: sections.PreferenceSection) -> sft.Objective:
  """Return the mean loss of pairs that trains a policy.

  A trajectory's log-ratio is the sum over its loss tokens of the logprob minus
  that of the reference, or their mean with `length_normalised`.
  """

  def sums(micro: objectives.Microbatch) -> objectives.Sums:
    batch = micro.batch
    ratios = micro.segment_sum(micro.logprobs) - batch.fields[REFERENCE]
    if section.length_normalised:
      counts = micro.segment_sum(jnp.ones_like(ratios))
      ratios /= jnp.maximum(counts, 1)
    return pair_sums(batch, ratios, lambda h: _of_margins(section, h)) | {
      "chosen_log_ratio": jnp.where(
        is_first_token(batch) & (batch.segment_ids % 2 == 1), ratios, 0
      ).sum(),
    }

  return sft.Objective(
    sums=sums,
    count=num_pairs,
    measured=("accuracy", "margin", "chosen_log_ratio"),
  )


def pair_sums(
  batch: packing.PackedBatch,
  values: Float[Array, "B T"],
  loss: Callable[[Float[Array, "B T"]], Float[Array, "B T"]],
) -> objectives.Sums:
  """Return the sums over pairs of a loss of margins, and of the margins.

  "accuracy" counts the pairs whose chosen one has the larger value.
  """
  found, stands_for_pair = margins(batch, values)
  is_right = stands_for_pair & (found > 0)
  return {
    "loss": jnp.where(stands_for_pair, loss(found), 0).sum(),
    "accuracy": is_right.sum(dtype=jnp.float32),
    "margin": jnp.where(stands_for_pair, found, 0).sum(),
  }


def _of_margins(
  section: sections.PreferenceSection, margins: Float[Array, "B T"]
) -> Float[Array, "B T"]:
  """Return the loss of each margin of log-ratios."""
  if section.loss is sections.PreferenceLoss.IPO:
    return preferences.ipo_loss(margins, beta=section.beta)
  return preferences.dpo_loss(
    margins, beta=section.beta, label_smoothing=section.label_smoothing
  )
