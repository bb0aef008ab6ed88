"""Scores at token positions and named parts, from the reward to the step."""

import numpy as np
import pytest
import test_train_step

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.config import algorithm_section
from jaxrl_async.config import sections
from jaxrl_async.training import packing


def trajectory(mask, reward=None):
  mask = np.array(mask, bool)
  return types.Trajectory(
    member=0,
    tokens=np.arange(len(mask)).astype(np.int32),
    loss_mask=mask,
    behavior_logprobs=np.zeros(len(mask), np.float32),
    policy_versions=np.where(mask, 0, -1),
    reward=reward,
  )


def test_a_position_counts_written_tokens_and_the_field_all_tokens():
  # Two turns: tokens 2, 3 and 5, 6, 7 are written.
  mask = [0, 0, 1, 1, 0, 1, 1, 1]
  scores = {0: 0.5, 2: -1.0, 4: 2.0}
  made = [
    trajectory(mask, types.Reward(score=1.0, token_scores=scores)),
    trajectory([0, 1], types.Reward(score=1.0)),
    trajectory([0, 0, 1], types.Reward(score=1.0, token_scores={})),
    trajectory([0, 1]),
  ]
  fields = packing.reward_fields(made)
  assert list(fields) == [packing.TOKEN_SCORES]
  first, *others = fields[packing.TOKEN_SCORES]
  assert first.dtype == np.float32
  assert first.tolist() == [0, 0, 0.5, 0, 0, -1.0, 0, 2.0]
  assert [values.tolist() for values in others] == [[0, 0], [0, 0, 0], [0, 0]]


def test_there_is_no_field_where_no_reward_scores_tokens():
  unscored = [trajectory([0, 1]), trajectory([0, 1], types.Reward(score=1.0))]
  assert packing.reward_fields(unscored) == {}
  # A scorer that scores tokens and found none to score keeps the field.
  none_found = types.Reward(score=1.0, token_scores={})
  assert packing.reward_fields([trajectory([0, 1], none_found)])


def test_only_equal_scores_without_token_scores_teach_nothing():
  def reward(score, token_scores=None):
    return types.Reward(score=score, token_scores=token_scores)

  def teach_nothing(*rewards, reads=True):
    return types.teach_nothing(rewards, reads_token_scores=reads)

  assert teach_nothing(reward(0.5), reward(0.5, {}))
  assert not teach_nothing(reward(0.5), reward(0.25))
  assert not teach_nothing(reward(0.5), reward(0.5, {0: 1.0}))
  assert teach_nothing(reward(0.5), reward(0.5, {0: 1.0}), reads=False)
  assert not teach_nothing(reward(0.5), reward(0.25), reads=False)


def test_scores_of_tokens_are_read_by_what_the_page_says():
  def reads(**settings):
    config = sections.Config(algorithm=sections.AlgorithmSection(**settings))
    made = assembly.coordinator_settings(config, has_own_loss=False)
    return made.reads_token_scores

  assert reads(advantage="segment") and reads(advantage="gae")
  assert reads(loss="my:loss") and reads(advantage="my:advantage")
  assert not any(reads(advantage=x) for x in algorithm_section.BASELINES)
  assert assembly.coordinator_settings(
    sections.Config(), has_own_loss=True
  ).reads_token_scores


def test_the_mean_of_a_part_is_over_the_rewards_that_have_it():
  parts = ({"a": 1.0, "b": 2.0}, {"a": 0.0}, {})
  made = [
    trajectory([0, 1], types.Reward(score=0.0, parts=part)) for part in parts
  ]
  assert types.mean_parts([*made, trajectory([0, 1])]) == {"a": 0.5, "b": 2.0}


def test_a_score_that_is_not_there_is_an_error():
  assert trajectory([0, 1], types.Reward(score=0.5)).score == 0.5
  with pytest.raises(ValueError, match="trajectory 0 has not been scored"):
    _ = trajectory([0, 1]).score


def scored_groups(*, has_token_scores):
  """Groups of `test_train_step`, with more to their rewards."""
  groups = test_train_step.groups()
  for group in groups:
    for one in group.trajectories:
      last = one.num_completion_tokens - 1
      one.reward = types.Reward(
        score=one.score,
        parts={"member": float(one.member)},
        token_scores={last: one.score}
        if has_token_scores and last >= 0
        else None,
      )
  return groups


@pytest.fixture(scope="module")
def batches():
  """By whether tokens are scored: a trainer, and its batch."""
  found = {}
  for has_token_scores in (False, True):
    trainer = test_train_step.make_trainer()
    groups = scored_groups(has_token_scores=has_token_scores)
    found[has_token_scores] = trainer, trainer.prepare(groups)
  return found


@pytest.fixture(scope="module")
def trained(batches):
  """By whether tokens are scored: the metrics of a step."""
  return {
    has_token_scores: trainer.step(test_train_step.VERSION, batch).metrics()[0]
    for has_token_scores, (trainer, batch) in batches.items()
  }


@pytest.mark.slow
def test_a_batch_has_the_scores_beside_their_tokens(batches):
  _, batch = batches[True]
  values = batch.arrays.fields[packing.TOKEN_SCORES]
  assert values.sharding == batch.arrays.tokens.sharding
  unpacked = packing.unpack(values, batch.segments)
  trajectories = [t for g in batch.groups for t in g.trajectories]
  for one, scores in zip(trajectories, unpacked, strict=True):
    expected = np.zeros(len(one.tokens), np.float32)
    if one.num_completion_tokens:
      expected[-1] = one.score
    np.testing.assert_array_equal(scores, expected)
  assert sum(scores.any() for scores in unpacked) > 4
  assert not batches[False][1].arrays.fields


@pytest.mark.slow
@pytest.mark.nightly
def test_a_loss_that_does_not_read_them_trains_as_without_them(trained):
  names = ("policy/loss", "policy/grad_norm", "policy/entropy", "reward/mean")
  without, with_scores = (
    [trained[kind][name] for name in names] for kind in (False, True)
  )
  np.testing.assert_allclose(with_scores, without, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_steps_metrics_have_the_mean_of_each_part(trained):
  assert trained[False]["reward/parts/member"] == 1.5
