"""Trajectories of lognormal lengths, and how full their packed rows are."""

import math
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.models import configs
from jaxrl_async.training import packing
from jaxrl_async.training import segments as segments_lib

MEDIAN, SIGMA, MAX_TOKENS = 300, 1.0, 8_192
NUM_SHARDS = 8


def draw_lengths(num: int, seed: int, *, scale: int = 1) -> np.ndarray:
  """Draw lengths of trajectories, prompts included, in order of arrival."""
  rng = np.random.default_rng(seed)
  lengths = rng.lognormal(math.log(MEDIAN / scale), SIGMA, num)
  return np.clip(np.rint(lengths), 2, MAX_TOKENS // scale).astype(np.int64)


def make_group(lengths: np.ndarray, vocab_size: int = 97) -> types.RolloutGroup:
  """Return trajectories of these lengths, each with one prompt token.

  The tokens depend only on the length, so that a trajectory is the same in any
  group.
  """
  trajectories = []
  for member, length in enumerate(lengths.tolist()):
    mask = np.arange(length) > 0
    trajectories.append(
      types.Trajectory(
        member=member,
        tokens=np.random.default_rng(length).integers(
          1, vocab_size, length, np.int32
        ),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -4.5, 0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
      )
    )
  prompt = types.Prompt(prompt_id="", tokens=np.zeros(1, np.int32), item={})
  return types.RolloutGroup(
    admission=types.Admission(index=0, birth=0, deadline=0),
    prompt=prompt,
    trajectories=trajectories,
  )


def pack(
  lengths: np.ndarray, *, tokens_per_row: int, rows: int, **options: Any
) -> tuple[packing.PackedBatch, segments_lib.Segments]:
  """Pack one minibatch as the trainer does."""
  return packing.pack(
    [make_group(lengths)],
    np.linspace(-1, 1, len(lengths)).astype(np.float32),
    tokens_per_row=tokens_per_row,
    rows_per_microbatch=rows,
    **{"num_minibatches": 1, **options},
  )


def num_microbatches(
  lengths: np.ndarray, *, tokens_per_row: int, rows: int
) -> int:
  """Count the microbatches in use after packing."""
  _, placement = pack(lengths, tokens_per_row=tokens_per_row, rows=rows)
  return len(np.unique(placement.starts // (rows * tokens_per_row)))


def pack_efficiency(
  lengths: np.ndarray, *, tokens_per_row: int, rows: int
) -> float:
  """Return the share of tokens in used microbatches that is not padding."""
  _, placement = pack(lengths, tokens_per_row=tokens_per_row, rows=rows)
  return placement.pack_efficiency


def pack_gain_over_padding(
  lengths: np.ndarray, *, tokens_per_row: int, rows: int
) -> float:
  """Return how many times more microbatches padding needs than packing.

  Padding puts one trajectory in each row, padded to the longest.
  """
  ours = num_microbatches(lengths, tokens_per_row=tokens_per_row, rows=rows)
  return -(-len(lengths) // rows) / ours


def fixed_count(
  lengths: np.ndarray, *, tokens_per_row: int, rows: int
) -> list[np.ndarray]:
  """Cut arrivals into the longest equal parts that each fit a microbatch."""

  def fits(part):
    _, _, _, used = packing._first_fit(part, tokens_per_row)
    return len(used) <= rows

  for count in range(len(lengths), 0, -1):
    parts = np.split(lengths, range(count, len(lengths), count))
    if all(
      part.sum() <= rows * tokens_per_row and fits(part) for part in parts
    ):
      return parts
  raise ValueError(f"a trajectory is longer than {tokens_per_row}")


def pack_gain_over_fixed_count(
  lengths: np.ndarray, *, tokens_per_row: int, rows: int
) -> float:
  """Return how many times more microbatches a fixed count needs than packing.

  A fixed count puts the same number of trajectories in each microbatch.
  """
  ours = num_microbatches(lengths, tokens_per_row=tokens_per_row, rows=rows)
  parts = fixed_count(lengths, tokens_per_row=tokens_per_row, rows=rows)
  return len(parts) / ours


def shard_balance(
  lengths: np.ndarray, model: configs.ModelConfig, *, is_balanced: bool
) -> float:
  """Return the mean time of a microbatch's shards over the largest.

  Both times are summed over all microbatches. The matrices take 2 FLOPs for
  each parameter and token. Attention takes 4 for each layer, head, head
  dimension and token attended to, which is half of the trajectory on average.
  """
  _, placement = pack(
    lengths,
    tokens_per_row=MAX_TOKENS,
    rows=2 * NUM_SHARDS,
    num_shards=NUM_SHARDS if is_balanced else 1,
  )
  looks = model.num_layers * model.num_heads * model.head_dim / model.num_params
  rows = np.bincount(
    placement.starts // MAX_TOKENS,
    looks * placement.lengths**2,
    np.prod(placement.shape[:3]),
  )
  shards = 2 * MAX_TOKENS + rows.reshape(-1, NUM_SHARDS, 2).sum(-1)
  return float(shards.mean(1).sum() / shards.max(1).sum())
