"""What is measured of a step's groups."""

import tracemalloc

import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.training import step_metrics


def group(*scores, lengths=None, answers=None):
  lengths = lengths or [1] * len(scores)
  answers = answers or ["7"] * len(scores)
  trajectories = [
    types.Trajectory(
      member=member,
      tokens=np.zeros(1 + length, np.int32),
      loss_mask=np.arange(1 + length) > 0,
      behavior_logprobs=np.zeros(1 + length, np.float32),
      policy_versions=np.where(np.arange(1 + length) > 0, 3, -1),
      finish_reason=types.FinishReason.EOS,
      reward=types.Reward(score=score, answer=answer),
    )
    for member, (score, length, answer) in enumerate(
      zip(scores, lengths, answers, strict=True)
    )
  ]
  return types.RolloutGroup(
    admission=types.Admission(index=0, birth=3, deadline=5),
    prompt=types.Prompt(prompt_id="a", tokens=np.zeros(1, np.int32), item={}),
    trajectories=trajectories,
  )


def test_pass_at_k_is_the_mean_over_groups_that_have_k():
  groups = [group(2.0, 0.0), group(0.5, 0.5, 0.5, 0.5), group(0.0, 0.0)]
  values = step_metrics.pass_at_k(groups, 0.5)
  assert values == {
    "reward/pass@1": pytest.approx((0.5 + 1 + 0) / 3),
    "reward/pass@2": pytest.approx((1 + 1 + 0) / 3),
    "reward/pass@4": 1.0,
  }


def test_answers_that_could_not_be_extracted_are_a_share():
  groups = [group(1.0, 0.0, answers=["7", None]), group(1.0, answers=[""])]
  values = step_metrics.of_groups(groups, 4)
  assert values["reward/unextracted_frac"] == pytest.approx(2 / 3)


def test_groups_of_equal_rewards_are_a_share_whatever_their_size():
  groups = [group(*[0.1] * size) for size in range(1, 8)]
  values = step_metrics.of_groups([*groups, group(0.1, 0.2)], 4)
  assert values["reward/frac_groups_zero_std"] == 7 / 8


def test_rewards_and_lengths_have_histograms():
  groups = [group(0.0, 1.0, 1.0, lengths=[4, 8, 40])]
  values = step_metrics.of_groups(groups, 4)
  rewards = values["reward/histogram"]
  assert (rewards.counts[0], rewards.counts[-1]) == (1, 2)
  lengths = values["completion/tokens_histogram"]
  assert (lengths.limits[0], lengths.limits[-1]) == (4, 40)
  assert sum(lengths.counts) == 3


def of_versions(*versions):
  """A group whose tokens were written by these versions; -1 is of a prompt."""
  of_one = group(*[1.0] * len(versions))
  for one, written in zip(of_one.trajectories, versions, strict=True):
    one.policy_versions = np.array(written, np.int32)
    one.loss_mask = one.policy_versions >= 0
    one.tokens = np.zeros(len(written), np.int32)
  return of_one


def test_staleness_is_that_of_each_generated_token():
  rng = np.random.default_rng(0)
  versions = [
    [-1, *np.sort(rng.integers(3, 8, n)), *([-1, -1] * (n % 2)), *[8] * (n - 1)]
    for n in (1, 2, 3, 40, 41)
  ]
  values = step_metrics.of_groups([of_versions(*versions)], 9)
  written = [9 - x for one in versions for x in one if x >= 0]
  numbers = [len({x for x in one if x >= 0}) for one in versions]
  assert values["staleness/mean"] == np.mean(written)
  assert values["staleness/max"] == max(written)
  assert values["staleness/histogram"] == np.bincount(written).tolist()
  assert values["staleness/versions_per_trajectory"] == np.mean(numbers)
  assert values["staleness/versions_histogram"] == np.bincount(numbers).tolist()


def test_measuring_a_large_batch_copies_no_tokens():
  num_tokens = 28_672  # as in configs/deepseek_1p5b.py
  versions = np.full(num_tokens, -1)
  versions[1_024:20_000], versions[20_000:] = 3, 4
  groups = [of_versions(*[versions] * 16) for _ in range(4)]
  step_metrics.of_groups(groups, 5)
  tracemalloc.start()
  try:
    values = step_metrics.of_groups(groups, 5)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < 400_000  # a single array of all tokens has 7 MB
  assert sum(values["staleness/histogram"]) == 64 * (num_tokens - 1_024)
