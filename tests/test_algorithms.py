"""The settings of methods, and combinations that contradict each other."""

import dataclasses
import functools
import inspect
import pathlib
import re

import numpy as np
import pytest
import test_train_step

from jaxrl_async import types
from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import config_checks
from jaxrl_async.config import algorithm_section
from jaxrl_async.config import algorithms
from jaxrl_async.config import sections
from jaxrl_async.training import objectives
from jaxrl_async.training import packing

PRESETS = {
  name: function
  for name, function in inspect.getmembers(algorithms)
  if isinstance(function, functools.partial)
}
PAGE = (
  pathlib.Path(__file__).parents[1] / "docs/reference/algorithms.md"
).read_text()
GAE = {
  "advantage": "gae",
  "advantage_scale": sections.AdvantageScale.BATCH_STD,
}
SHARED = sections.CriticTrunk.SHARED
Level = sections.BehaviorWeightLevel


def config_with(**settings):
  return sections.Config(algorithm=sections.AlgorithmSection(**settings))


@pytest.mark.parametrize("name", PRESETS)
def test_each_method_is_a_config_that_can_be_trained(name):
  made = PRESETS[name](group_size=8, max_staleness=1)
  assert (made.group_size, made.max_staleness) == (8, 1)
  assert made.groups_per_step == sections.AlgorithmSection().groups_per_step
  config_checks.validate(sections.Config(algorithm=made), 2)


def test_methods_differ_and_are_those_of_the_page():
  found = [function() for function in PRESETS.values()]
  assert all(x != y for i, x in enumerate(found) for y in found[:i])
  assert algorithms.areal() == sections.AlgorithmSection()
  assert len(PRESETS) == 14
  with pytest.raises(TypeError, match="clip_hi"):
    algorithms.dapo(clip_hi=0.3)


def test_the_page_has_the_fields_of_each_method():
  table = PAGE.partition("## The methods on one task")[0]
  rows = re.findall(r"^\| `(\w+)\(\)` \|.*\| (.*) \|$", table, re.MULTILINE)
  assert {name for name, _ in rows} == PRESETS.keys()
  usual = sections.AlgorithmSection()
  for name, fields in rows:
    made = PRESETS[name]()
    changed = {
      field.name: getattr(made, field.name)
      for field in dataclasses.fields(made)
      if getattr(made, field.name) != getattr(usual, field.name)
    }
    written = dict(re.findall(r"`(\w+)=([^`]+)`", fields))
    assert written.keys() == changed.keys(), name
    for field, text in written.items():
      value = changed[field]
      if isinstance(value, bool):
        assert text == str(value)
      elif isinstance(value, float):
        assert float(text) == value
      else:
        assert text == getattr(value, "value", value)


def groups_of(scores, token_scores=None, mask="0111"):
  """Groups of trajectories with these scores, a list for each group."""
  loss_mask = np.array([*map(int, mask)], bool)
  zeros = np.zeros(len(mask))

  def trajectory(score):
    return types.Trajectory(
      member=0,
      tokens=np.zeros(len(mask), np.int32),
      loss_mask=loss_mask,
      behavior_logprobs=zeros.astype(np.float32),
      policy_versions=np.where(loss_mask, 0, -1).astype(np.int32),
      reward=types.Reward(score=score, token_scores=token_scores),
    )

  return [packing.without_prompt([*map(trajectory, x)]) for x in scores]


def test_every_name_of_a_loss_and_of_an_advantage_stands_for_something():
  for name in algorithm_section.LOSSES:
    section = sections.AlgorithmSection(loss=name)
    assert callable(algorithm_lib._objective(section))
  groups = groups_of([[1.0, 0.0]])
  for name in algorithm_section.ADVANTAGES:
    section = sections.AlgorithmSection(advantage=name)
    found = np.sum(algorithm_lib.advantages(section)(groups)[0])
    # Those of gae are made on the device, and a teacher needs none.
    assert found == 0 if name in ("gae", "none") else found > 0


def test_scores_of_tokens_count_for_the_turns_before_them():
  section = sections.AlgorithmSection(
    advantage="segment",
    advantage_scale=sections.AdvantageScale.NONE,
    reward_scale=2.0,
  )
  # Position 2 of the loss tokens is in the second turn.
  plain = groups_of([[1.0]], mask="011011")[0].trajectories[0]
  scored = groups_of([[0.0]], {2: 3.0}, mask="011011")[0].trajectories[0]
  group = packing.without_prompt([plain, scored])
  found = algorithm_lib.advantages(section)([group])
  # Returns are 2 and 2 * 3 in both turns, up to the token with the score. What
  # follows that is a part that only one of them has.
  np.testing.assert_allclose(found[0], [0, -2, -2, 0, -2, -2])
  np.testing.assert_allclose(found[1], [0, 2, 2, 0, 2, 0])
  scored.reward = types.Reward(score=0.0, token_scores={1: 3.0})
  found = algorithm_lib.advantages(section)([group])
  np.testing.assert_allclose(found[1], [0, 2, 2, 0, -1, -1])


def test_a_batch_is_made_with_the_numbers_of_its_settings():
  groups = test_train_step.groups()
  trajectories = [t for g in groups for t in g.trajectories]
  trainer = test_train_step.make_trainer()
  trainer.batch_settings = dataclasses.replace(
    trainer.batch_settings,
    advantages=lambda groups: np.full(len(trajectories), 7.0),
    fields=lambda trajectories: {
      "own": [np.full(len(t.tokens), -7.0) for t in trajectories]
    },
  )
  batch = trainer.prepare(groups).arrays
  mask = np.asarray(batch.loss_mask)
  assert mask.any() and (np.asarray(batch.advantages)[mask] == 7).all()
  assert (np.asarray(batch.fields["own"])[mask] == -7).all()


def test_advantages_of_tokens_are_packed_with_them():
  groups = test_train_step.groups()
  masks = [t.loss_mask for g in groups for t in g.trajectories]
  rng = np.random.default_rng(0)
  given = [rng.normal(size=len(m)).astype(np.float32) * m for m in masks]
  trainer = test_train_step.make_trainer()
  trainer.batch_settings = dataclasses.replace(
    trainer.batch_settings, advantages=lambda *_: given
  )
  batch = trainer.prepare(groups)
  found = packing.unpack(batch.arrays.advantages, batch.segments)
  for one, other in zip(found, given, strict=True):
    np.testing.assert_array_equal(one, other)
  given[0] = given[0][1:]
  with pytest.raises(ValueError, match="advantages does not have a number"):
    trainer.prepare(groups)


def test_advantages_are_divided_once():
  """By the stage where tokens differ, and by the host where they do not."""
  groups = groups_of([[1.0, 0.0], [0.5, 0.0]])
  batch_std = sections.AdvantageScale.BATCH_STD
  settings = {"advantage_scale": batch_std, "kl_coef": 0.1}
  whole = sections.AlgorithmSection(**settings)
  split = sections.AlgorithmSection(**settings, kl_in_reward=True)
  found = [
    algorithm_lib.advantages(section)(groups) for section in (whole, split)
  ]
  np.testing.assert_allclose(found[1], [0.5, -0.5, 0.25, -0.25])
  np.testing.assert_allclose(found[0], found[1] / found[1].std(), rtol=1e-5)


def largest(rewards, group_ids, num_groups, trajectories):
  """An advantage of one's own: 1 for the best of each group."""
  best = [rewards[group_ids == g].max() for g in range(num_groups)]
  return (rewards == np.array(best)[group_ids]).astype(np.float32)


def of_each_token(rewards, group_ids, num_groups, trajectories):
  """One of one's own with a number for each token: its score, at first."""
  return [
    reward
    + np.array([(t.reward.token_scores or {}).get(i, 0.0) for i in range(n)])
    for reward, t in zip(rewards, trajectories, strict=True)
    for n in [t.num_completion_tokens]
  ]


def wrong(rewards, group_ids, num_groups, trajectories):
  """An advantage of one's own that is wrong, in a way for each reward."""
  counts = [t.num_completion_tokens for t in trajectories]
  return {
    0: np.zeros(len(rewards) + 1),
    1: np.full(len(rewards), np.nan),
    2: np.zeros((len(rewards), 1)),
    3: [np.zeros(len(t.tokens)) for t in trajectories],
    4: [0.0, *(np.zeros(n) for n in counts[1:])],
    5: [np.full(n, np.inf) for n in counts],
  }[int(rewards[0])]


def sum_of_logprobs(micro):
  """A loss of one's own."""
  return micro.logprobs.sum(), {}


def test_functions_of_ones_own_are_named_in_the_config():
  section = sections.AlgorithmSection(
    loss="test_algorithms:sum_of_logprobs",
    advantage="test_algorithms:largest",
    reward_scale=-1.0 * -1.0,
  )
  config = sections.Config(algorithm=section)
  config_checks.check(config)
  algorithm_lib.check(section)
  assert algorithm_lib.policy_loss(config).__name__ == "sum_of_logprobs"
  groups = groups_of([[0.0, 2.0], [1.0]])
  found = algorithm_lib.advantages(section)(groups)
  assert found.tolist() == [0, 1, 1]
  for name, reason in (
    ("no_such_module:loss", "cannot be imported"),
    ("test_algorithms:missing", "has no function 'missing'"),
  ):
    section.loss = name
    pattern = re.compile(f"^algorithm.loss: .*{reason}")
    with pytest.raises(sections.ConfigError, match=pattern):
      algorithm_lib.check(section)


def test_an_advantage_of_ones_own_may_be_of_tokens():
  section = sections.AlgorithmSection(advantage="test_algorithms:of_each_token")
  scores = {1: 0.5}
  groups = groups_of([[1.0, -1.0]], scores, mask="01101")
  groups += groups_of([[2.0]], mask="0011")
  found = algorithm_lib.advantages(section)(groups)
  expected = [[0, 1, 1.5, 0, 1], [0, -1, -0.5, 0, -1], [0, 0, 2, 2]]
  for one, other in zip(found, expected, strict=True):
    assert one.dtype == np.float32 and one.tolist() == other
  trainer = test_train_step.make_trainer()
  trainer.batch_settings = dataclasses.replace(
    trainer.batch_settings, advantages=algorithm_lib.advantages(section)
  )
  batch = trainer.prepare(test_train_step.groups())
  trajectories = [t for g in batch.groups for t in g.trajectories]
  packed = packing.unpack(batch.arrays.advantages, batch.segments)
  for one, trajectory in zip(packed, trajectories, strict=True):
    wanted = trajectory.loss_mask * np.float32(trajectory.score)
    np.testing.assert_array_equal(one, wanted)


@pytest.mark.parametrize("way", range(6))
def test_advantages_of_the_wrong_shape_or_size_are_an_error(way):
  section = sections.AlgorithmSection(advantage="test_algorithms:wrong")
  groups = groups_of([[float(way)], [2.0]])
  with pytest.raises(ValueError, match="^algorithm.advantage returned"):
    algorithm_lib.advantages(section)(groups)


def test_the_overlong_filter_learns_nothing_from_what_was_cut_off():
  groups = test_train_step.groups()
  for group in groups:
    group.trajectories[0].finish_reason = types.FinishReason.EOS
  filtered = packing.without_overlong(groups)
  for before, after in zip(groups, filtered, strict=True):
    first, *others = after.trajectories
    assert np.array_equal(first.loss_mask, before.trajectories[0].loss_mask)
    assert not any(t.loss_mask.any() for t in others)
    assert all(t.loss_mask.any() for t in before.trajectories)
  batch, _ = packing.pack(
    filtered,
    np.zeros(16, np.float32),
    tokens_per_row=16,
    rows_per_microbatch=16,
    num_minibatches=1,
  )
  totals = objectives.minibatch_totals(
    batch._replace(
      **{name: x[0] for name, x in batch._asdict().items() if name != "fields"}
    )
  )
  assert totals["num_trajectories"] == len(groups)


def test_rewards_are_shaped_before_they_are_compared():
  section = sections.AlgorithmSection(
    advantage_scale=sections.AdvantageScale.NONE,
    reward_bias=1.0,
    reward_scale=2.0,
    reward_clip=3.0,
  )
  # 1 becomes 4, which is bounded by 3, and 0 becomes 2.
  found = algorithm_lib.advantages(section)(groups_of([[1.0, 0.0]]))
  np.testing.assert_allclose(found, [0.5, -0.5])
