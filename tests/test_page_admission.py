"""Who may take pages, alone; with a scheduler: tests/test_page_pool.py."""

import dataclasses

import numpy as np
import tiny

from jaxrl_async.engine import page_admission

SIZES = dataclasses.replace(tiny.SIZES, num_pages=10, page_tokens=4)


def make(**changes):
  return page_admission.make(
    dataclasses.replace(SIZES, **changes), steps_ahead=8
  )


def sequence(length, limit=24):
  return tiny.sequence(tiny.prompt(length), limit=limit)


def test_a_sequence_enters_if_pages_are_left_for_it_and_one_for_each_other():
  admission = make()
  # 5 tokens and 8 ahead of the host are 4 pages.
  assert admission.may_enter(sequence(5), [], 6)
  assert not admission.may_enter(sequence(5), [], 7)
  assert admission.may_enter(sequence(5), [sequence(5)], 2)
  assert not admission.may_enter(sequence(5), [sequence(5)], 3)
  assert admission.may_enter(sequence(5, limit=6), [sequence(5)], 4)


def test_a_sequence_that_is_alone_enters_in_any_case():
  admission = make(num_pages=2)
  assert not admission.may_enter(sequence(15), [], 1)
  assert admission.may_enter(sequence(15), [], 0)


def test_no_more_is_promised_than_all_pages_hold():
  assert make().max_tokens == 32  # cache_tokens
  assert make(num_pages=5).max_tokens == 20
  assert page_admission.make(tiny.SIZES, 8).max_tokens == 32


def test_the_most_urgent_are_given_pages_until_none_are_left():
  admission = make(num_pages=4)
  for ticket in (0, 1):
    admission.take(ticket, tiny.prompt(4, seed=ticket), 16)
  assert not admission.grow([(1, 12), (0, 8)])
  assert (admission.row(1) < 4).sum() == 3
  assert (admission.row(0) < 4).sum() == 1
  admission.release(1)
  assert admission.grow([(0, 8)])
  assert (admission.row(0) < 4).sum() == 2
  admission.release(0)
  assert admission.pool.num_free == 4
  admission.release(0)  # it holds nothing any more


def test_what_is_shared_is_filled_once():
  admission = make()
  tokens = np.arange(8)
  first = admission.take(0, tokens, 16)
  assert (first < 10).sum() == 2 and len(first) == 4
  second = admission.take(1, tokens, 16)
  assert second is not None and second.size == 0
  assert admission.row(0).tolist() == admission.row(1).tolist()
  admission.forget_contents()
  assert (admission.take(2, tokens, 16) < 10).sum() == 2
  assert make(num_pages=1).take(0, tokens, 16) is None


def test_tables_have_the_pages_of_the_slots_that_are_known():
  admission = make()
  admission.take(7, np.arange(8), 16)
  tickets, pages = admission.tables({2: 7})
  assert tickets.tolist() == [-1, -1, 7, -1]
  assert pages[2].tolist() == admission.row(7).tolist()
  assert page_admission.make(tiny.SIZES, 8).tables({2: 7}) is None
