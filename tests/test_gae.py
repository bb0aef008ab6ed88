"""Advantages of tokens: a loop over each trajectory, against packed rows."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import test_train_step

from jaxrl_async import types
from jaxrl_async.algorithms import gae
from jaxrl_async.algorithms import value_functions
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import episodes
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import stages as stages_lib
from jaxrl_async.training import train_state


def trajectory_advantages(rewards, values, final_value, *, gamma, lam):
  """The recurrence over the steps of one episode, in float64."""
  advantages, after, next_value = [], 0.0, float(final_value)
  for reward, value in zip(rewards[::-1], values[::-1], strict=True):
    delta = float(reward) + gamma * next_value - float(value)
    after = delta + gamma * lam * after
    advantages.append(after)
    next_value = float(value)
  return np.array(advantages[::-1], np.float64)


def rows(seed=0, num_rows=4, width=32):
  """Packed rows of trajectories of several turns, with junk outside of them."""
  rng = np.random.default_rng(seed)
  mask = np.zeros((num_rows, width), bool)
  segment_ids = np.zeros((num_rows, width), np.int32)
  final_values = np.zeros((num_rows, width), np.float32)
  spans = []
  for row in range(num_rows):
    start, segment = 0, 0
    end = width if row < 2 else width - row  # the first rows are full
    while start + 4 <= end:
      length = min(int(rng.integers(4, 12)), end - start)
      if row == 1:  # a single trajectory
        length = width
      segment += 1
      here = slice(start, start + length)
      segment_ids[row, here] = segment
      mask[row, here] = rng.random(length) < 0.6
      mask[row, start] = False
      if segment % 2:
        mask[row, start + length - 1] = True
      final_values[row, here] = rng.normal() if rng.random() < 0.5 else 0
      spans.append((row, here))
      start += length
  numbers = rng.normal(size=(2, num_rows, width)).astype(np.float32)
  rewards, values = np.where(mask, numbers, np.nan)
  return rewards, values, final_values, mask, segment_ids, spans


def by_loops(rewards, values, final_values, mask, spans, *, gamma, lam):
  expected = np.zeros(mask.shape)
  for row, here in spans:
    chosen = np.flatnonzero(mask[row, here]) + here.start
    if len(chosen):
      expected[row, chosen] = trajectory_advantages(
        rewards[row, chosen],
        values[row, chosen],
        final_values[row, here.start],
        gamma=gamma,
        lam=lam,
      )
  return expected


def test_the_sample_has_what_matters():
  _, _, final, mask, segment_ids, spans = rows()
  turns = [np.diff(mask[r, h].astype(int)) for r, h in spans]
  assert max((x == 1).sum() for x in turns) >= 2  # several turns
  assert any(not mask[r, h].any() for r, h in spans) or len(spans) > 8
  assert any(not mask[r, h.stop - 1] for r, h in spans)  # ends elsewhere
  assert segment_ids[0, -1] > 1 and not segment_ids[-1, -1]
  assert (segment_ids[1] == 1).all() and mask[1, -1]
  of_spans = [final[r, h.start] for r, h in spans]
  assert any(x == 0 for x in of_spans) and any(x != 0 for x in of_spans)


@pytest.mark.parametrize(
  ("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7), (1.0, 0.0), (0.0, 1.0)]
)
def test_packed_rows_have_the_advantages_of_each_trajectory(gamma, lam):
  rewards, values, final, mask, segment_ids, spans = rows()
  compute = functools.partial(
    gae.generalized_advantages, gamma=gamma, gae_lambda=lam
  )
  arrays = rewards, values, np.where(mask, final, np.nan), mask, segment_ids
  found = jax.jit(compute)(*map(jnp.asarray, arrays))
  expected = by_loops(rewards, values, final, mask, spans, gamma=gamma, lam=lam)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
  assert found.dtype == jnp.float32
  # With lambda 1 the return, advantage plus value, contains no value but the
  # final one.
  if gamma == lam == 1:
    other = np.where(mask, values + 1, values)
    again = jax.jit(compute)(rewards, other, final, mask, segment_ids)
    np.testing.assert_allclose(
      (found + values)[mask], (again + other)[mask], atol=1e-5
    )


def test_devices_that_share_the_rows_and_their_tokens_agree_with_one():
  rewards, values, final, mask, segment_ids, _ = rows(num_rows=8)
  compute = jax.jit(
    functools.partial(gae.generalized_advantages, gamma=0.9, gae_lambda=0.8)
  )
  arrays = rewards, values, final, mask, segment_ids
  alone = compute(*arrays)
  for shape in (
    mesh_lib.MeshShape(context=8),
    mesh_lib.MeshShape(data=2, fsdp=2, context=2),
  ):
    mesh = mesh_lib.make_mesh(jax.devices()[:8], shape)
    split = mesh_lib.sharding(mesh, mesh_lib.TRAIN_RULES, "batch", "tokens")
    placed = [jax.device_put(x, split) for x in arrays]
    found = jax.jit(compute, out_shardings=split)(*placed)
    np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-6)


def test_whitened_advantages_are_those_of_all_loss_tokens():
  rng = np.random.default_rng(0)
  mask = rng.random((2, 3, 5)) < 0.5
  advantages = np.where(mask, rng.normal(3, 2, mask.shape), np.nan)
  found = np.asarray(
    gae.whitened(jnp.asarray(advantages, jnp.float32), jnp.asarray(mask))
  )
  chosen = advantages[mask]
  expected = (chosen - chosen.mean()) / (chosen.std() + 1e-6)
  np.testing.assert_allclose(found[mask], expected, rtol=1e-5, atol=1e-6)
  assert not found[~mask].any()
  assert not gae.whitened(jnp.ones((2, 3)), jnp.ones((2, 3), bool)).any()
  assert not gae.whitened(jnp.ones((2, 3)), jnp.zeros((2, 3), bool)).any()


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_reward_of_a_token_is_its_clipped_log_ratio(clip):
  rng = np.random.default_rng(0)
  behavior, reference = rng.normal(-2, 1, (2, 40)).astype(np.float32)
  mask = np.arange(40) % 3 > 0
  gaps = (behavior - reference).astype(np.float64)
  if clip:
    assert (gaps > clip).any() and (gaps < -clip).any()
    gaps = np.clip(gaps, -clip, clip)
  found = gae.kl_rewards(
    jnp.asarray(np.where(mask, behavior, np.nan)),
    jnp.asarray(reference),
    jnp.asarray(mask),
    coef=0.3,
    clip=clip,
  )
  np.testing.assert_allclose(
    found, np.where(mask, -0.3 * gaps, 0), rtol=1e-5, atol=1e-7
  )


def sums_to_come(of_tokens, batch):
  """For each loss token, the sum over it and those that follow it."""
  mask = np.asarray(batch.loss_mask)
  found = np.zeros(mask.shape)
  for place in zip(*np.nonzero(mask), strict=True):
    *row, t = place
    row = tuple(row)
    same = np.asarray(batch.segment_ids[row] == batch.segment_ids[place])
    found[place] = of_tokens[row][t:][(mask[row] & same)[t:]].sum()
  return found


@pytest.mark.parametrize("is_whitened", [True, False])
def test_an_advantage_loses_the_divergence_that_is_to_come(is_whitened):
  batch = test_train_step.packed(rows=4, minibatches=2)
  mask = batch.loss_mask
  rng = np.random.default_rng(0)
  reference = rng.normal(-4, 1, mask.shape).astype(np.float32)
  batch = batch.with_arrays({objectives.REFERENCE: reference})
  stage = stages_lib.kl_in_reward_stage(
    coef=0.1, clip=0.6, is_whitened=is_whitened
  )
  (found,) = jax.jit(functools.partial(stage.run, {}))({}, batch, 0).values()
  gaps = np.clip(
    batch.behavior_logprobs.astype(np.float64) - reference, -0.6, 0.6
  )
  expected = batch.advantages - 0.1 * sums_to_come(gaps, batch)
  if is_whitened:
    chosen = expected[mask]
    expected = (expected - chosen.mean()) / chosen.std()
  np.testing.assert_allclose(found[mask], expected[mask], rtol=1e-4, atol=1e-5)


def test_with_a_critic_the_divergence_is_taken_off_the_rewards():
  batch = test_train_step.packed(rows=4, minibatches=2)
  mask = np.asarray(batch.loss_mask)
  rng = np.random.default_rng(0)
  reference, rewards = rng.normal(-4, 1, (2, *mask.shape)).astype(np.float32)
  nothing = np.zeros_like(rewards)
  batch = batch.with_arrays(
    {
      objectives.REFERENCE: reference,
      episodes.REWARDS: rewards,
      episodes.CUT_OFF: nothing,
      critic_lib.VALUES: nothing,
      critic_lib.VALUES_AFTER: nothing,
    }
  )
  stage = critic_lib.gae_stage(
    gamma=1.0,
    gae_lambda=1.0,
    is_whitened=False,
    normalize_decay=0.0,
    kl_coef=0.1,
    kl_clip=0.6,
  )
  statistics = dict.fromkeys(value_functions.STATISTICS, jnp.float32(0))
  params = {train_state.CRITIC: {train_state.RETURN_STATISTICS: statistics}}
  made = jax.jit(functools.partial(stage.run, {}))(params, batch, 0)
  gaps = np.asarray(batch.behavior_logprobs, np.float64) - reference
  of_tokens = rewards - 0.1 * np.clip(gaps, -0.6, 0.6)
  for name in ("advantages", critic_lib.RETURNS):
    np.testing.assert_allclose(
      np.asarray(made[name])[mask],
      sums_to_come(of_tokens, batch)[mask],
      atol=1e-4,
    )


def test_the_fields_of_episodes_put_rewards_where_they_were_earned():
  (group,) = test_train_step.groups(count=1, size=4)
  first, second, third, fourth = group.trajectories
  first.reward = types.Reward(score=0.5, token_scores={0: 2.0})
  second.finish_reason = types.FinishReason.EOS
  # A trajectory that ends with tokens of its environment.
  third.loss_mask[-1:] = False
  fourth.loss_mask[:] = False
  found = episodes.fields(
    group.trajectories, shaped=lambda x: 10 * x, token_scale=3.0
  )
  assert found.keys() == {episodes.REWARDS, episodes.CUT_OFF}
  rewards, cut_off = found[episodes.REWARDS], found[episodes.CUT_OFF]
  expected = [np.zeros(len(t.tokens), np.float32) for t in group.trajectories]
  expected[0][3] += 6.0
  for i in range(3):
    last = np.flatnonzero(group.trajectories[i].loss_mask)[-1]
    expected[i][last] += np.float32(10 * group.trajectories[i].score)
  for i in range(4):
    np.testing.assert_allclose(rewards[i], expected[i], rtol=1e-6)
    assert (cut_off[i] == (i != 1)).all()
  segments = packing.plan(
    [group],
    np.zeros(4, np.float32),
    tokens_per_row=16,
    rows_per_microbatch=4,
    num_minibatches=1,
    fields=found,
  )
  assert found.keys() <= segments.values.keys()
