"""Shards of a source: each host's own items, which together are all."""

import itertools

import pytest
import test_mixture
import test_rows
import test_source

from jaxrl_async.data import prompts
from jaxrl_async.data import sharding
from jaxrl_async.data import source as source_lib
from jaxrl_async.data.reasoning_gym import gym

mixture = test_mixture.mixture
TRAIN = source_lib.Split.TRAIN


def take(source, count, first=0):
  stream = source.open(TRAIN, first, num_workers=2)
  items = []
  for _ in range(count):
    while not stream.is_ready(1.0):
      pass
    items.append(stream.next())
  stream.close()
  return items


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("kind", ["rows", "mixture", "generator", "gym"])
def test_shards_are_disjoint_and_together_the_whole(
  tmp_path, mixture, kind, count
):
  whole = {
    "rows": lambda: mixture.members["a"],
    "mixture": lambda: mixture,
    "generator": test_source.Squares,
    "gym": lambda: gym.ReasoningGym(name="chain_sum", params={}, seed=0),
  }[kind]()
  each = 84 // count
  expected = take(whole, each * count)
  shards = [
    sharding.Shard(whole=whole, index=i, count=count) for i in range(count)
  ]
  parts = [take(shard, each) for shard in shards]
  merged = itertools.chain.from_iterable(zip(*parts, strict=True))
  assert list(merged) == expected
  for part, shard in zip(parts, shards, strict=True):
    assert isinstance(shard, source_lib.Source)
    assert take(shard, 5, 3) == part[3:8]


def test_each_pass_is_divided_among_the_shards(mixture):
  whole = mixture.members["a"]
  size = whole.num_questions(TRAIN)
  count = 4
  items = [
    take(sharding.Shard(whole=whole, index=i, count=count), size)
    for i in range(count)
  ]
  # In as many passes as there are shards, each row comes once a pass.
  found = sorted(item["index"] for part in items for item in part)
  one_pass = {item["index"] for item in test_rows.take(whole, TRAIN, size)}
  assert found == sorted([*one_pass] * count)


def test_a_shard_makes_prompts_as_the_whole_does(mixture):
  whole = mixture.members["a"]
  shard = sharding.Shard(whole=whole, index=1, count=2)
  source = test_rows.prompt_source(shard)
  stream = prompts.PromptStream(source, TRAIN)
  ids = [stream.next().prompt_id for _ in range(6)]
  every = prompts.PromptStream(test_rows.prompt_source(whole), TRAIN)
  assert ids == [every.next().prompt_id for _ in range(12)][1::2]


def test_a_shard_that_does_not_exist_is_refused(mixture):
  for index, count in ((-1, 2), (2, 2), (0, 0)):
    with pytest.raises(ValueError, match="there is no shard"):
      sharding.Shard(whole=mixture, index=index, count=count)
