"""What a reward model learns: scores of completions, or labels of steps.

A reward model is a decoder with a scalar head. The state after a token makes
one number. After the last token of a completion it is its score. After the last
token of a step its sigmoid is the probability that the step is right.
"""

from collections.abc import Sequence
import dataclasses

from jax import numpy as jnp
import numpy as np

from jaxrl_async.algorithms import preferences
from jaxrl_async.data import labelled_steps
from jaxrl_async.data import pairs as pairs_lib
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.training import example_rows
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import preference_objectives
from jaxrl_async.training import sft

# The field with the labels of steps, at their last tokens.
LABELS = "step_labels"


def scored_at_end(
  example: worked_examples_lib.WorkedExample,
) -> worked_examples_lib.WorkedExample:
  """Return an example whose loss mask is True at its last token alone."""
  mask = np.zeros_like(example.loss_mask)
  mask[-1] = True
  return dataclasses.replace(example, loss_mask=mask)


def pack_pairs(
  pairs: Sequence[pairs_lib.Pair], *, tokens_per_row: int
) -> packing.PackedBatch:
  """Return pairs packed into rows, whose loss tokens are the last ones."""
  return preference_objectives.pack_pairs(
    [
      pairs_lib.Pair(
        chosen=scored_at_end(pair.chosen),
        rejected=scored_at_end(pair.rejected),
      )
      for pair in pairs
    ],
    tokens_per_row=tokens_per_row,
  )


def pack_steps(
  solutions: Sequence[labelled_steps.LabelledSteps], *, tokens_per_row: int
) -> packing.PackedBatch:
  """Return solutions packed into rows, with the field `LABELS`."""
  return example_rows.rows_of(
    example_rows.plan(
      [solution.example for solution in solutions],
      tokens_per_row=tokens_per_row,
      fields={LABELS: [solution.labels for solution in solutions]},
    )
  )


def _pair_sums(micro: objectives.Microbatch) -> objectives.Sums:
  assert micro.values is not None
  return preference_objectives.pair_sums(
    micro.batch,
    micro.segment_sum(micro.values),
    preferences.bradley_terry_loss,
  )


# Of the rows of `pack_pairs`. The values of a trajectory have one loss token.
PAIRS = sft.Objective(
  sums=_pair_sums,
  count=preference_objectives.num_pairs,
  measured=("accuracy", "margin"),
)


def _step_sums(micro: objectives.Microbatch) -> objectives.Sums:
  assert micro.values is not None
  mask = micro.batch.loss_mask
  logits = jnp.where(mask, micro.values, 0)
  labels = micro.batch.fields[LABELS]
  is_right = (logits > 0) == (labels > 0.5)
  losses = preferences.step_loss(logits, labels)
  return {
    "loss": jnp.where(mask, losses, 0).sum(),
    "accuracy": (mask & is_right).sum(dtype=jnp.float32),
  }


# Of the rows of `pack_steps`.
STEPS = sft.Objective(
  sums=_step_sums,
  count=lambda totals: totals["num_loss_tokens"],
  measured=("accuracy",),
)
