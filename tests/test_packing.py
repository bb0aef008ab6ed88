"""Packing trajectories into fixed shapes."""

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from jaxrl_async.training import packing
from jaxrl_async.types import Admission, Prompt, RolloutGroup, Trajectory

BATCH_DTYPES = {
  "tokens": np.int32,
  "segment_ids": np.int32,
  "positions": np.int32,
  "segment_start": np.int32,
  "loss_mask": np.bool_,
  "advantages": np.float32,
  "behavior_logprobs": np.float32,
  "policy_versions": np.int32,
}


def make_groups(lengths, group_size=3, seed=0):
  """Groups of trajectories; lengths are (prompt tokens, completion tokens)."""
  rng = np.random.default_rng(seed)
  groups = []
  for i, (num_prompt, num_completion) in enumerate(lengths):
    if i % group_size == 0:
      prompt = Prompt(prompt_id=str(i), tokens=np.zeros(1, np.int32), item={})
      groups.append(
        RolloutGroup(
          admission=Admission(index=len(groups), birth=0, deadline=4),
          prompt=prompt,
          trajectories=[],
        )
      )
    size = num_prompt + num_completion
    mask = np.arange(size) >= num_prompt
    groups[-1].trajectories.append(
      Trajectory(
        member=i % group_size,
        tokens=rng.integers(1, 90, size, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -rng.random(size), 0).astype("f4"),
        policy_versions=np.where(mask, rng.integers(0, 9, size), -1).astype(
          np.int32
        ),
      )
    )
  return groups


def pack(
  lengths,
  *,
  tokens_per_row=20,
  rows=2,
  minibatches=2,
  min_microbatches=1,
  **sharding,
):
  groups = make_groups(lengths)
  advantages = np.linspace(-1, 1, len(lengths)).astype(np.float32)
  batch, placement = packing.pack(
    groups,
    advantages,
    tokens_per_row=tokens_per_row,
    rows_per_microbatch=rows,
    num_minibatches=minibatches,
    min_microbatches=min_microbatches,
    **sharding,
  )
  trajectories = [t for group in groups for t in group.trajectories]
  return trajectories, advantages, batch, placement


LENGTHS = st.lists(
  st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=40
)


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
  LENGTHS, st.integers(1, 2), st.integers(1, 5), st.integers(1, 3)
)
def test_every_trajectory_is_there_once_and_unchanged(
  lengths, rows_per_shard, minibatches, num_shards
):
  rows = rows_per_shard * num_shards
  trajectories, advantages, batch, placement = pack(
    lengths,
    rows=rows,
    minibatches=minibatches,
    num_shards=num_shards,
  )
  for name, dtype in BATCH_DTYPES.items():
    array = getattr(batch, name)
    assert array.dtype == dtype and array.shape == placement.shape
  for name in ("tokens", "loss_mask", "behavior_logprobs", "policy_versions"):
    unpacked = packing.unpack(getattr(batch, name), placement)
    for trajectory, values in zip(trajectories, unpacked, strict=True):
      np.testing.assert_array_equal(values, getattr(trajectory, name))
  for i, values in enumerate(packing.unpack(batch.advantages, placement)):
    np.testing.assert_array_equal(values, advantages[i])
  for trajectory, values in zip(
    trajectories, packing.unpack(batch.positions, placement), strict=True
  ):
    np.testing.assert_array_equal(values, np.arange(len(trajectory.tokens)))

  # Nothing else is there.
  num_tokens = sum(map(sum, lengths))
  assert (batch.segment_ids > 0).sum() == num_tokens
  in_use = batch.segment_ids.any(axis=(2, 3)).sum() * rows * 20
  assert placement.pack_efficiency == pytest.approx(num_tokens / in_use)
  padding = batch.segment_ids == 0
  for name in BATCH_DTYPES:
    empty = -1 if name == "policy_versions" else 0
    if name != "segment_start":
      assert (getattr(batch, name)[padding] == empty).all()


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(LENGTHS, st.integers(1, 3))
def test_segments_never_mix(lengths, minibatches):
  _, _, batch, placement = pack(lengths, minibatches=minibatches)
  for ids, start in zip(
    batch.segment_ids.reshape(-1, 20),
    batch.segment_start.reshape(-1, 20),
    strict=True,
  ):
    # Segments 1, 2, ... from the left, each in one piece, then padding.
    steps = np.diff(ids[ids > 0])
    assert np.isin(steps, [0, 1]).all() and (ids[:1] <= 1).all()
    assert (ids[np.count_nonzero(ids) :] == 0).all()
    # Both ways to say who sees whom agree, for padding too.
    query, key = np.ogrid[:20, :20]
    by_id = (ids[query] == ids[key]) & (key <= query)
    by_start = (start[query] <= key) & (key <= query)
    np.testing.assert_array_equal(by_id, by_start)
  for ids, length in zip(
    packing.unpack(batch.segment_ids, placement),
    placement.lengths,
    strict=True,
  ):
    assert len(set(ids.tolist())) == 1 and len(ids) == length


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(LENGTHS, st.integers(1, 5))
def test_minibatches_differ_by_at_most_one_completion(lengths, minibatches):
  _, _, batch, placement = pack(lengths, minibatches=minibatches)
  of_each = placement.starts // batch.tokens[0].size
  assert np.ptp(np.bincount(of_each, minlength=minibatches)) <= 1
  loss_tokens = batch.loss_mask.sum(axis=(1, 2, 3))
  longest = max(completion for _, completion in lengths)
  assert loss_tokens.max() - loss_tokens.min() <= longest


def test_minibatches_are_even_where_lengths_are_random():
  rng = np.random.default_rng(0)
  lengths = [(10, int(n)) for n in rng.integers(5, 60, 256)]
  _, _, batch, _ = pack(lengths, tokens_per_row=256, minibatches=4)
  loss_tokens = batch.loss_mask.sum(axis=(1, 2, 3))
  assert np.ptp(loss_tokens) <= 5


def test_first_fit_decreasing_fills_the_rows():
  rng = np.random.default_rng(0)
  lengths = [(10, int(n)) for n in rng.integers(5, 60, 512)]
  _, _, batch, _ = pack(lengths, tokens_per_row=256, minibatches=1)
  is_used = (batch.segment_ids > 0).reshape(-1, 256)
  num_rows = is_used.any(-1).sum()
  assert num_rows == -(-is_used.sum() // 256)  # no packing needs fewer
  assert is_used[:num_rows].any(-1).all()  # rows without a trajectory are last


def shard_costs(batch, num_shards):
  """Sums of squared lengths: [microbatches shards], [microbatches rows]."""
  ids = batch.segment_ids[0]
  lengths = np.stack([(ids == s).sum(-1) for s in range(1, ids.max() + 1)])
  rows = (lengths**2).sum(0)
  return rows.reshape(len(ids), num_shards, -1).sum(-1), rows


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(LENGTHS, st.integers(1, 4), st.integers(2, 4))
def test_shards_of_a_microbatch_differ_by_at_most_its_costliest_row(
  lengths, rows_per_shard, num_shards
):
  rows = rows_per_shard * num_shards
  batch = pack(lengths, rows=rows, minibatches=1, num_shards=num_shards)[2]
  shards, costs = shard_costs(batch, num_shards)
  assert (np.ptp(shards, axis=1) <= costs.max(axis=1)).all()
  # Costly rows come first and share a microbatch.
  for one, after in zip(costs, costs[1:], strict=False):
    assert one.min() >= after.max()


def test_long_trajectories_do_not_keep_the_other_shards_waiting():
  rng = np.random.default_rng(0)
  lengths = [(10, 246)] * 4 + [(4, int(n)) for n in rng.integers(5, 60, 300)]

  def waste(num_shards):
    batch = pack(
      lengths, tokens_per_row=256, rows=8, minibatches=1, num_shards=num_shards
    )[2]
    shards, _ = shard_costs(batch, 4)
    return shards.max(1).sum() / shards.mean(1).sum()

  assert waste(4) < 1.1 and waste(1) > 1.3


def test_the_number_of_microbatches_comes_from_a_small_set():
  sizes = set()
  for num_rows in range(1, 33):
    _, _, batch, _ = pack([(20, 0)] * num_rows, rows=1, minibatches=1)
    num_microbatches = batch.tokens.shape[1]
    assert num_rows <= num_microbatches < num_rows * 3 / 2
    sizes.add(num_microbatches)
  assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(
  LENGTHS, st.integers(1, 3), st.integers(20, 70), st.integers(1, 4)
)
def test_enough_microbatches_for_any_batch_make_one_shape(
  lengths, rows, tokens_per_row, minibatches
):
  expected = packing.expected_microbatches(
    -(-len(lengths) // minibatches),
    max_tokens=20,
    tokens_per_row=tokens_per_row,
    rows_per_microbatch=rows,
  )
  _, _, batch, _ = pack(
    lengths,
    tokens_per_row=tokens_per_row,
    rows=rows,
    minibatches=minibatches,
    min_microbatches=expected,
  )
  assert batch.tokens.shape == (minibatches, expected, rows, tokens_per_row)


def test_rows_are_nearly_full_where_they_are_many():
  # As long as a reasoning model's completions are, and far shorter than a row.
  rng = np.random.default_rng(0)
  lengths = np.clip(rng.lognormal(np.log(300), 1.0, 512), 2, 8_192).astype(int)
  groups = make_groups([(1, int(n) - 1) for n in lengths])
  _, placement = packing.pack(
    groups,
    np.zeros(len(lengths)),
    tokens_per_row=8_192,
    rows_per_microbatch=1,
    num_minibatches=1,
  )
  assert placement.pack_efficiency >= 0.95


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(LENGTHS, st.integers(1, 3), st.integers(1, 20))
def test_padding_microbatches_come_last_and_are_not_counted(
  lengths, rows, min_microbatches
):
  _, _, batch, _ = pack(lengths, rows=rows, min_microbatches=min_microbatches)
  assert batch.tokens.shape[1] >= min_microbatches
  for segment_ids in batch.segment_ids:
    is_used = segment_ids.any(axis=(1, 2))
    num_used = packing.num_used_microbatches(segment_ids)
    assert is_used.tolist() == [k < num_used for k in range(len(is_used))]


def test_packing_is_deterministic():
  lengths = [(5, n % 13) for n in range(30)]
  one, another = (pack(lengths, rows=4, num_shards=2)[2] for _ in "ab")
  jax.tree.map(np.testing.assert_array_equal, one, another)


def test_a_minibatch_and_a_microbatch_are_packed_batches_again():
  _, _, batch, _ = pack([(5, 7)] * 12, minibatches=3)
  microbatch = jax.tree.map(lambda x: x[0, 0], batch)
  assert isinstance(microbatch, packing.PackedBatch)
  assert {x.shape for x in jax.tree.leaves(microbatch)} == {(2, 20)}
  assert len(jax.tree.leaves(microbatch)) == len(BATCH_DTYPES)


def test_what_cannot_be_packed_is_refused():
  with pytest.raises(
    ValueError, match="21 tokens .* tokens_per_row is 20; use 21 or more"
  ):
    pack([(9, 12)])
  with pytest.raises(ValueError, match="3 rows_per_microbatch .* 2 shards"):
    pack([(3, 4)], rows=3, num_shards=2)
  with pytest.raises(ValueError, match="token of its prompt"):
    pack([(3, 4), (0, 4)])
  with pytest.raises(ValueError, match="token of its prompt"):
    pack([(3, 4), (0, 0)])
  with pytest.raises(ValueError, match="no trajectories"):
    pack([])
  with pytest.raises(ValueError, match="1 advantages for 2 trajectories"):
    packing.pack(
      make_groups([(2, 2), (2, 2)]),
      np.zeros(1, np.float32),
      tokens_per_row=20,
      rows_per_microbatch=1,
      num_minibatches=1,
    )
