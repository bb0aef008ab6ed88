"""Who gets room in the cache, and who waits until some is free.

`PageAdmission` is for a cache of pages that all sequences share,
`SlotAdmission` for one in which every slot has a row of its own. The scheduler
asks either of them the same questions. It decides itself whose pages are taken
away when there are too few, because only it knows what else can be waited for.

Threads: the scheduler's.
"""

from collections.abc import Iterable, Mapping

from jaxtyping import Int
import numpy as np

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import page_pool
from jaxrl_async.engine import sequence as sequence_lib

_NOTHING = np.zeros((0,), np.int32)

# The ticket of the sequence in each slot [B], and its pages [B P].
Tables = tuple[np.ndarray, np.ndarray]


class SlotAdmission:
  """A row of the cache for each slot: whoever has a slot has room enough.

  `PageAdmission` says what the methods mean.
  """

  def __init__(self, sizes: decode_state_lib.EngineSizes):
    self.max_tokens = sizes.cache_tokens

  def may_enter(
    self,
    sequence: sequence_lib.Sequence,
    promised: list[sequence_lib.Sequence],
    num_entered: int,
  ) -> bool:
    """Always."""
    del sequence, promised, num_entered
    return True

  def take(
    self, ticket: int, cached: Int[np.ndarray, "T"], bucket: int
  ) -> Int[np.ndarray, "W"] | None:
    """Never too few, and nothing to be filled: `insert` copies the row."""
    del ticket, cached, bucket
    return _NOTHING

  def grow(self, needs: Iterable[tuple[int, int]]) -> bool:
    """Always: a row is as long as a sequence can become."""
    del needs
    return True

  def release(self, ticket: int) -> None:
    """The row stays with its slot."""

  def forget_contents(self) -> None:
    """Nothing is shared."""

  def row(self, ticket: int) -> Int[np.ndarray, "P"]:
    """No pages."""
    del ticket
    return _NOTHING

  def tables(self, tickets: Mapping[int, int]) -> Tables | None:
    """None: the programs ask for no pages."""
    del tickets
    return None


class PageAdmission:
  """Which sequence, by its ticket, holds which pages of the pool.

  Invariant: `_held` has the tickets for which `take` succeeded and `release`
  was not called since; each holds every page of its list once.
  """

  def __init__(self, sizes: decode_state_lib.EngineSizes, steps_ahead: int):
    """Starts with all pages free.

    Args:
      sizes: of the engine.
      steps_ahead: tokens that a sequence may write before the host hears of
        the first of them.
    """
    # More cannot be promised, or a sequence that runs alone might need a page
    # and find none that could be taken from another.
    self.max_tokens = min(
      sizes.cache_tokens, sizes.num_pages * sizes.page_tokens
    )
    self.pool = page_pool.PagePool(sizes.num_pages)
    self._sizes = sizes
    self._steps_ahead = steps_ahead
    self._held: dict[int, list[int]] = {}

  def _num_pages(self, num_tokens: int) -> int:
    return -(-num_tokens // self._sizes.page_tokens)

  def _num_pages_to_start(self, sequence: sequence_lib.Sequence) -> int:
    num_tokens = sequence.length + self._steps_ahead
    return self._num_pages(min(num_tokens, sequence.limit))

  def may_enter(
    self,
    sequence: sequence_lib.Sequence,
    promised: list[sequence_lib.Sequence],
    num_entered: int,
  ) -> bool:
    """Whether a sequence may be prefilled.

    There have to be pages for what it begins with, and one more for each that
    runs: whoever enters with the last page makes another one leave at once. A
    sequence that is alone enters in any case.

    Args:
      sequence: which waits.
      promised: those that were let in and have taken no pages yet.
      num_entered: how many have taken theirs.
    """
    if not (promised or num_entered):
      return True
    reserve = sum(map(self._num_pages_to_start, promised)) + num_entered
    needed = self._num_pages_to_start(sequence) + reserve
    return needed <= self.pool.num_free

  def take(
    self, ticket: int, cached: Int[np.ndarray, "T"], bucket: int
  ) -> Int[np.ndarray, "W"] | None:
    """Takes pages for prefilled tokens; whole ones are shared where they exist.

    Args:
      ticket: that will hold them.
      cached: the tokens.
      bucket: in which they were prefilled; another one gives other bits.

    Returns:
      For each page of the bucket which one of the pool is to be filled with
      it; num_pages leaves it out. None when there are too few.
    """
    taken = self.pool.take_for(
      cached, bucket=bucket, page_tokens=self._sizes.page_tokens
    )
    if taken is None:
      return None
    self._held[ticket], new = taken
    return new[:0] if (new == self._sizes.num_pages).all() else new

  def grow(self, needs: Iterable[tuple[int, int]]) -> bool:
    """Gives pages to all that need more.

    Args:
      needs: a ticket and how many tokens its pages have to hold, the most
        urgent first.

    Returns:
      False when none was left for one of them. Pages that were given stay
      given, so the next call goes on from there.
    """
    for ticket, num_tokens in needs:
      pages = self._held[ticket]
      while len(pages) < self._num_pages(num_tokens):
        if not self.pool.num_free:
          return False
        pages.append(self.pool.take())
    return True

  def release(self, ticket: int) -> None:
    """Gives up whatever the ticket holds."""
    self.pool.release(self._held.pop(ticket, []))

  def forget_contents(self) -> None:
    """From now on nothing is shared with what the pages hold today."""
    self.pool.forget_names()

  def row(self, ticket: int) -> Int[np.ndarray, "P"]:
    """The pages of a ticket; num_pages, which is none, where it has no more."""
    sizes = self._sizes
    row = np.full((sizes.pages_per_slot,), sizes.num_pages, np.int32)
    pages = self._held[ticket]
    row[: len(pages)] = pages
    return row

  def tables(self, tickets: Mapping[int, int]) -> Tables | None:
    """What `Engine.generate` has to know of the slots.

    Args:
      tickets: by slot, where the host knows who sits there.
    """
    sizes = self._sizes
    by_slot = np.full((sizes.num_slots,), -1, np.int32)
    pages = np.zeros((sizes.num_slots, sizes.pages_per_slot), np.int32)
    for slot, ticket in tickets.items():
      by_slot[slot] = ticket
      pages[slot] = self.row(ticket)
    return by_slot, pages


CacheAdmission = SlotAdmission | PageAdmission


def make(
  sizes: decode_state_lib.EngineSizes, steps_ahead: int
) -> CacheAdmission:
  """The admission that goes with the layout of the cache."""
  if sizes.num_pages:
    return PageAdmission(sizes, steps_ahead)
  return SlotAdmission(sizes)
