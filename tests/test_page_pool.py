"""The accounting of pages, alone and under a scheduler that runs out."""

import collections

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.engine import page_admission
from jaxrl_async.engine import sequence as sequence_lib

FAST, EXACT = sections.Preemption.FAST, sections.Preemption.EXACT
KEEP, RECOMPUTE = sections.KvOnAdopt.KEEP, sections.KvOnAdopt.RECOMPUTE
MANY = {"num_pages": 64, "page_tokens": 4}
FEW = {"num_pages": 12, "page_tokens": 4}  # 48 tokens; 4 slots of 32 want 128


# -- the pool --------------------------------------------------------------


def take_for(pool, tokens, **options):
  """What `PagePool.take_for` gives, with the pages as a list."""
  taken = pool.take_for(tokens, **options)
  return taken and (taken[0].pages, taken[1])


def test_equal_beginnings_share_whole_pages_and_nothing_else():
  pool = page_admission.PagePool(10)
  tokens = np.arange(10)
  first, new = take_for(pool, tokens, bucket=16, page_tokens=4)
  assert new.tolist() == [*first, 10]
  second, new = take_for(pool, tokens, bucket=16, page_tokens=4)
  assert second[:2] == first[:2] and second[2] not in first
  assert new.tolist() == [10, 10, second[2], 10]
  other = np.array([0, 1, 2, 3, 9, 5, 6, 7, 8])
  third, _ = take_for(pool, other, bucket=16, page_tokens=4)
  assert third[0] == first[0] and third[1] not in first
  fourth, _ = take_for(pool, tokens[:4], bucket=32, page_tokens=4)
  assert not set(fourth) & {*first, *second, *third}
  fifth, _ = take_for(pool, tokens[:4], bucket=16, page_tokens=4, lineage=1)
  assert not set(fifth) & {*first, *second, *third, *fourth}
  assert pool.num_free == 10 - 8


def test_what_does_not_fit_takes_nothing():
  pool = page_admission.PagePool(3)
  held, _ = take_for(pool, np.arange(8), bucket=16, page_tokens=4)
  longer = np.arange(16)
  assert take_for(pool, longer, bucket=16, page_tokens=4) is None
  assert pool.num_free == 1
  pool.release(held)
  assert pool.num_free == 3


def test_pages_of_old_weights_are_never_found():
  pool = page_admission.PagePool(8)
  old, _ = take_for(pool, np.arange(8), bucket=16, page_tokens=4)
  pool.forget_names()
  new, _ = take_for(pool, np.arange(8), bucket=16, page_tokens=4)
  assert not set(old) & set(new)
  pool.release(old)
  again, _ = take_for(pool, np.arange(8), bucket=16, page_tokens=4)
  assert again == new


def test_names_hold_each_token_once_however_long_the_sequence_is():
  tokens = np.random.default_rng(0).integers(0, 9, (4, 512), np.int32)
  pool = page_admission.PagePool(4 * 32)
  for row in tokens:
    assert take_for(pool, row, bucket=512, page_tokens=16)
  parts = [part for name in pool._named for part in name]
  held = sum(len(part) for part in parts if isinstance(part, bytes))
  assert len(pool._named) == 4 * 32 and held == tokens.nbytes


def test_a_page_that_is_filled_again_leads_to_none_that_followed_it():
  pool = page_admission.PagePool(4)
  (first, second), _ = take_for(pool, np.arange(8), bucket=16, page_tokens=4)
  pool.release([first])  # the second is still held, and keeps its name
  other = np.array([9, 9, 9, 9, 4, 5, 6, 7])
  again, _ = take_for(pool, other, bucket=16, page_tokens=4)
  assert again[0] == first and again[1] != second


@given(st.lists(st.integers(0, 11), max_size=40), st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_every_page_is_free_or_held_as_often_as_it_was_given(moves, num_pages):
  pool = page_admission.PagePool(num_pages)
  held = []
  for move in moves:
    if move < 3 and held:
      pool.release(held.pop(move % len(held)))
    elif move == 3:
      pool.forget_names()
    else:
      taken = take_for(
        pool, np.arange(move) // (1 + move % 3), bucket=16, page_tokens=3
      )
      if taken is not None:
        held.append(taken[0])
    counts = collections.Counter(page for pages in held for page in pages)
    assert pool._holders == counts
    assert sorted([*pool._free, *counts]) == list(range(num_pages))
    assert set(pool._named.values()) <= set(counts)
    assert {v: k for k, v in pool._named.items()} == pool._names


# -- under a scheduler -----------------------------------------------------


def groups():
  """Long and short ones, deadlines out of order."""
  long = [
    tiny.sequence(
      tiny.prompt(5 + group % 2),
      limit=24 + group % 3,
      group=group,
      member=2,
      deadline=(7 * group) % 5,
    )
    for group in tiny.LONG_GROUPS
  ]
  short = [
    tiny.sequence(tiny.prompt(9), limit=16, group=30, member=member)
    for member in range(4)
  ]
  return [*long[:4], *short, *long[4:]]


def write(scheduler, sequences):
  written = tiny.write_all(scheduler, sequences)
  if scheduler.engine.sizes.num_pages:
    pool = scheduler._admission.pool
    assert pool.num_free == pool.num_pages
  return written


@pytest.fixture(scope="module")
def with_slots():
  """What `groups` write when every slot has its own cache."""
  return write(tiny.ready(), groups())


@pytest.fixture(scope="module")
def with_many():
  """The same from pages, enough of them."""
  scheduler = tiny.ready(**MANY)
  written = write(scheduler, groups())
  assert scheduler.stats.preemptions == 0
  return written


def assert_close(written, expected):
  for found, wanted in zip(written, expected, strict=True):
    assert found.tokens == wanted.tokens
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-4)


def test_pages_hold_what_slots_hold(with_slots, with_many):
  assert_close(with_many, with_slots)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", [FAST, EXACT])
def test_a_pool_too_small_for_all_slots_loses_nothing(with_many, preemption):
  scheduler = tiny.ready(**FEW, preemption=preemption)
  sequences = groups()
  written = write(scheduler, sequences)
  stats = scheduler.stats
  assert stats.preemptions > 2
  assert stats.generated_tokens == sum(s.loss_mask.sum() for s in sequences)
  if preemption is EXACT:
    assert written == with_many
  else:
    assert_close(written, with_many)


def test_the_latest_deadline_gives_up_its_pages():
  scheduler = tiny.ready(**FEW)
  sequences = [
    tiny.sequence(
      tiny.prompt(11, seed=i), group=group, member=2, limit=30, deadline=d
    )
    for i, (group, d) in enumerate(((8, 9), (9, 3)))
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  while not scheduler.stats.preemptions:
    assert not scheduler.is_idle
    scheduler.step()
  assert list(scheduler._waiting) == sequences[:1]
  tiny.finish(scheduler)


def test_cancelled_sequences_give_back_their_pages():
  scheduler = tiny.ready(**MANY)
  mine = sequence_lib.Owner("test", 0)
  sequences = groups()
  for i, sequence in enumerate(sequences):
    sequence.owner = mine if i % 2 else None
    scheduler.submit(sequence)
  scheduler.step()
  scheduler.cancel(mine)
  tiny.finish(scheduler)
  assert scheduler._admission.pool.num_free == MANY["num_pages"]


@pytest.mark.parametrize("kv_on_adopt", [KEEP, RECOMPUTE])
def test_new_weights_score_every_token_of_their_version(kv_on_adopt):
  scheduler = tiny.ready(kv_on_adopt=kv_on_adopt, **FEW)
  sequences = groups()
  for sequence in sequences:
    scheduler.submit(sequence)
  ended = scheduler.step()
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  ended += tiny.finish(scheduler)
  assert len(ended) == len(sequences)
  for sequence in sequences:
    t = sequence.trajectory()
    versions = set(t.policy_versions[t.loss_mask].tolist())
    if kv_on_adopt is KEEP and len(versions) > 1:
      continue  # of a mixed cache; tests/test_scheduler.py has that
    for version in versions:
      (expected,) = tiny.trainer_logprobs(tiny.params(version), [t.tokens])
      drawn = t.policy_versions == version
      np.testing.assert_allclose(
        t.behavior_logprobs[drawn], expected[drawn], atol=1e-4
      )
  assert scheduler._admission.pool.num_free == FEW["num_pages"]


def test_a_prompt_is_never_read_from_pages_of_older_weights():
  scheduler = tiny.ready(kv_on_adopt=KEEP, **MANY)
  prompt = tiny.prompt(13)
  # The first goes on with its old pages; the second begins as it did.
  first = tiny.sequence(prompt, group=8, member=2, limit=30)
  scheduler.submit(first)
  scheduler.step()
  assert first.finish_reason is None
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  second = tiny.sequence(prompt, group=9, member=2, limit=30)
  scheduler.submit(second)
  scheduler.step()
  assert first.finish_reason is None
  tiny.finish(scheduler)
  t = second.trajectory()
  (expected,) = tiny.trainer_logprobs(tiny.params(1), [t.tokens])
  np.testing.assert_allclose(
    t.behavior_logprobs[t.loss_mask], expected[t.loss_mask], atol=1e-4
  )
