"""Admission to the cache: which sequences get room, and which have to wait.

`PageAdmission` is for a cache of pages that all sequences share.
`SlotAdmission` is for a cache in which every slot has its own row. Both have
the same interface, which the scheduler uses. When there are too few pages, the
scheduler decides which sequence loses its pages, because only the scheduler
knows whether calls that are still running may free some.

Sequences that begin with the same tokens share the pages that prefill filled
with these tokens. A shared page is found by its name, which consists of its own
tokens and of a number that stands for the page before it. So a name is exact,
and no longer for a page at the end of a long sequence than for the first one.
The holders of a page are counted, and it becomes free when no holder is left.

With `kept_tokens`, pages that decoding has filled get names as well, and a page
that has a name is kept when no holder is left, up to that bound. So the next
turn of a conversation finds what the turn before it has cached. A kept page is
taken back when a page is needed and none is free. The page that was given up
the longest time ago is the first, and of a sequence the last page.

Threads: only the scheduler's thread uses these classes.
"""

import collections
from collections.abc import Hashable, Iterable, Mapping, Sequence
import dataclasses
import itertools

from jaxtyping import Int
import numpy as np

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import sequence as sequence_lib

_ONLY = sequence_lib.Lineage()
_NOTHING = np.zeros((0,), np.int32)

# The ticket of the sequence in each slot [B], and its pages [B P].
Tables = tuple[np.ndarray, np.ndarray]


class SlotAdmission:
  """Admission to a cache with a row for each slot.

  A sequence in a slot always has enough room. The methods are those of
  `PageAdmission`, which documents them.
  """

  def __init__(self, sizes: decode_state_lib.EngineSizes):
    """Create an admission for the given shapes of the engine's programs."""
    self.max_tokens = sizes.cache_tokens

  def may_enter(
    self,
    sequence: sequence_lib.Sequence,
    promised: list[sequence_lib.Sequence],
    num_entered: int,
  ) -> bool:
    """Return True, because every slot has room."""
    del sequence, promised, num_entered
    return True

  def take(
    self,
    ticket: int,
    cached: Int[np.ndarray, "T"],
    bucket: int,
    lineage: sequence_lib.Lineage = _ONLY,
  ) -> Int[np.ndarray, "W"] | None:
    """Return an empty array, because `Engine.insert` copies the row itself."""
    del ticket, cached, bucket, lineage
    return _NOTHING

  def find(
    self, tokens: Int[np.ndarray, "T"], lineage: sequence_lib.Lineage
  ) -> list[int]:
    """Return an empty list, because there are no pages."""
    del tokens, lineage
    return []

  def name(self, ticket: int, cached: Int[np.ndarray, "T"]) -> None:
    """Do nothing, because there are no pages."""

  def grow(self, needs: Iterable[tuple[int, int]]) -> bool:
    """Return True, because a row has room for the longest sequence."""
    del needs
    return True

  def release(self, ticket: int) -> None:
    """Do nothing, because the row stays with its slot."""

  @property
  def num_held(self) -> int:
    """0, because there are no pages."""
    return 0

  def forget_contents(self) -> None:
    """Do nothing, because sequences share no rows."""

  def row(self, ticket: int) -> Int[np.ndarray, "P"]:
    """Return an empty array, because there are no pages."""
    del ticket
    return _NOTHING

  def tables(self, tickets: Mapping[int, int]) -> Tables | None:
    """Return None, because the programs need no pages."""
    del tickets
    return None


@dataclasses.dataclass(kw_only=True, slots=True)
class Held:
  """The pages that a sequence holds, in the order of its tokens.

  Attributes:
    pages: the pages.
    before: stands for the page before the next one that gets a name.
    num_named: how many of the first pages have their names, or would have them
      if no other page had the name already.
  """

  pages: list[int]
  before: Hashable
  num_named: int


class PagePool:
  """A pool of pages that counts the holders of each page.

  Invariant: every page is either free, or kept, or has at least one holder.
  Every kept page has a name, and every name points to a page that is kept or
  has a holder.

  Threads: one thread at a time.
  """

  def __init__(self, num_pages: int, max_kept: int = 0):
    """Create a pool of free pages, of which max_kept may be kept."""
    self.num_pages = num_pages
    self.max_kept = max_kept
    self._free = list(range(num_pages))[::-1]
    # Those that were given up the longest time ago are the first.
    self._kept = collections.OrderedDict[int, None]()
    self._holders: collections.Counter[int] = collections.Counter()
    self._named: dict[Hashable, int] = {}
    self._names: dict[int, Hashable] = {}
    # How many pages were taken before a page. Unlike the page, the number is
    # never used again, so no name can mean other tokens later.
    self._counter = itertools.count()
    self._numbers = [0] * num_pages

  @property
  def num_free(self) -> int:
    """The number of pages without a holder."""
    return len(self._free) + len(self._kept)

  def take(self) -> int:
    """Take a page without a holder, which then has one.

    Raises:
      LookupError: there is none; check `num_free` first.
    """
    if not self._free:
      self._give_up_oldest()
    page = self._free.pop()
    self._holders[page] = 1
    self._numbers[page] = next(self._counter)
    return page

  def find(self, name: Hashable) -> int | None:
    """Return the page with a name and add a holder; None if there is none."""
    page = self._named.get(name)
    if page is not None:
      self._kept.pop(page, None)
      self._holders[page] += 1
    return page

  def name(self, page: int, name: Hashable) -> None:
    """Give a held page a name that stands for its contents."""
    self._named[name] = page
    self._names[page] = name

  def name_more(
    self, held: Held, cached: np.ndarray, *, page_tokens: int
  ) -> None:
    """Give names to the pages that have become full since they had some.

    Args:
      held: the pages of a sequence.
      cached: all tokens of the sequence that are cached.
      page_tokens: tokens per page.
    """
    for index in range(held.num_named, len(cached) // page_tokens):
      part = cached[index * page_tokens : (index + 1) * page_tokens]
      name = held.before, part.tobytes()
      # If another page has this name, then that page leads to the next one.
      page = self._named.get(name)
      if page is None:
        page = held.pages[index]
        self.name(page, name)
      held.before = self._numbers[page]
      held.num_named += 1

  def pages_of(
    self, tokens: np.ndarray, *, page_tokens: int, lineage: Hashable
  ) -> list[int]:
    """Return the pages that hold the beginning of these tokens, as they are.

    They get no holder. This is for a pool that keeps pages, where names do not
    depend on the bucket.
    """
    pages = []
    before = self._root(0, lineage)
    for part in _parts(tokens, page_tokens):
      page = self._named.get((before, part))
      if page is None:
        break
      pages.append(page)
      before = self._numbers[page]
    return pages

  def _root(self, bucket: int, lineage: Hashable) -> Hashable:
    # Other buckets give other bits, but a later turn is of a longer one.
    return 0 if self.max_kept else bucket, lineage

  def take_for(
    self,
    cached: np.ndarray,
    *,
    bucket: int,
    page_tokens: int,
    lineage: Hashable = _ONLY,
  ) -> tuple[Held, np.ndarray] | None:
    """Take pages for prefilled tokens, sharing existing full pages.

    Returns:
      The pages that hold the tokens, and the array that `PageAdmission.take`
      describes, which is never empty. None if too few pages are free.
    """
    pages = []
    new = np.full((bucket // page_tokens,), self.num_pages, np.int32)
    contents = _parts(cached, page_tokens)
    before = self._root(bucket, lineage)
    for index in range(-(-len(cached) // page_tokens)):
      is_whole = index < len(contents)
      name = (before, contents[index]) if is_whole else None
      page = self.find(name)
      if page is None:
        if not self.num_free:
          for taken in new[new < self.num_pages].tolist():
            self._forget_name(taken)  # nothing has filled it
          self.release(pages)
          return None
        page = new[index] = self.take()
        if is_whole:
          self.name(page, name)
      pages.append(page)
      if is_whole:
        before = self._numbers[page]
    held = Held(pages=pages, before=before, num_named=len(contents))
    return held, new

  def release(self, pages: Sequence[int]) -> None:
    """Remove one holder from each page.

    The last page is given up first, because without the pages before it no
    sequence would find it.
    """
    for page in reversed(pages):
      self._holders[page] -= 1
      if not self._holders[page]:
        del self._holders[page]
        if page in self._names and self.max_kept:
          self._kept[page] = None
        else:
          self._free_up(page)
    while len(self._kept) > self.max_kept:
      self._give_up_oldest()

  def _give_up_oldest(self) -> None:
    page, _ = self._kept.popitem(last=False)
    self._free_up(page)

  def _free_up(self, page: int) -> None:
    self._forget_name(page)
    self._free.append(page)

  def _forget_name(self, page: int) -> None:
    name = self._names.pop(page, None)
    if name is not None:
      del self._named[name]

  def forget_names(self) -> None:
    """Forget all names, so that no page filled so far is shared any more.

    This is for a change of weights, which makes the contents outdated.
    """
    self._named.clear()
    self._names.clear()
    self._free += self._kept
    self._kept.clear()


def _parts(tokens: np.ndarray, page_tokens: int) -> list[bytes]:
  """Return the bytes of each whole page of tokens, made by one call."""
  num_whole = len(tokens) // page_tokens
  own = tokens[: num_whole * page_tokens].view(
    np.dtype((np.void, tokens.itemsize * page_tokens))
  )
  return own.tolist()


class PageAdmission:
  """Admission to a pool of pages, which sequences hold by their tickets.

  Invariant: `_held` contains exactly the tickets for which `take` succeeded and
  `release` has not been called since. A ticket is one holder of each page in
  its list.
  """

  def __init__(self, sizes: decode_state_lib.EngineSizes, steps_ahead: int):
    """Create an admission with all pages free.

    Args:
      sizes: shapes of the engine's programs.
      steps_ahead: number of tokens that the device may generate for a sequence
        before the host has read the first of them.
    """
    # A longer sequence could need more pages than the pool has. It would find
    # none to take even if it were the only one.
    self.max_tokens = min(
      sizes.cache_tokens, sizes.num_pages * sizes.page_tokens
    )
    self.pool = PagePool(sizes.num_pages, sizes.kept_pages)
    self._sizes = sizes
    self._steps_ahead = steps_ahead
    self._held: dict[int, Held] = {}

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
    """Return whether a sequence may be prefilled.

    There must be enough free pages for the start of this sequence and of all
    promised ones, and one more for each sequence that has entered. Without this
    reserve, a sequence that takes the last page would cause another one to be
    preempted at once. If no other sequence is promised or has entered, the
    result is always True.

    Args:
      sequence: the waiting sequence.
      promised: sequences that were admitted but have not taken pages yet.
      num_entered: number of sequences that have taken their pages.
    """
    if not (promised or num_entered):
      return True
    reserve = sum(map(self._num_pages_to_start, promised)) + num_entered
    needed = self._num_pages_to_start(sequence) + reserve
    return needed <= self.pool.num_free

  def take(
    self,
    ticket: int,
    cached: Int[np.ndarray, "T"],
    bucket: int,
    lineage: sequence_lib.Lineage = _ONLY,
  ) -> Int[np.ndarray, "W"] | None:
    """Take pages for prefilled tokens, sharing existing full pages.

    Args:
      ticket: the ticket that will hold the pages.
      cached: the tokens.
      bucket: the bucket in which they were prefilled. Pages are shared only
        within a bucket, because another bucket gives other bits. If pages are
        kept, those of all buckets are shared.
      lineage: of the sequence. Pages are shared only within a lineage.

    Returns:
      For each page of the bucket, the page of the pool that must be filled with
      its tokens, or num_pages if none has to be filled. The array is empty if
      nothing has to be filled at all. None if too few pages are free.
    """
    taken = self.pool.take_for(
      cached,
      bucket=bucket,
      page_tokens=self._sizes.page_tokens,
      lineage=lineage,
    )
    if taken is None:
      return None
    self._held[ticket], new = taken
    return new[:0] if (new == self._sizes.num_pages).all() else new

  def grow(self, needs: Iterable[tuple[int, int]]) -> bool:
    """Take more pages for the tickets that need them.

    Args:
      needs: pairs of a ticket and the number of tokens that its pages must
        hold, the most urgent pair first.

    Returns:
      Whether there were enough pages. If not, the tickets keep the pages they
      were given, and a later call continues from there.
    """
    for ticket, num_tokens in needs:
      pages = self._held[ticket].pages
      while len(pages) < self._num_pages(num_tokens):
        if not self.pool.num_free:
          return False
        pages.append(self.pool.take())
    return True

  def release(self, ticket: int) -> None:
    """Give up all pages that the ticket holds, if any."""
    held = self._held.pop(ticket, None)
    if held is not None:
      self.pool.release(held.pages)

  @property
  def num_held(self) -> int:
    """The number of pages that sequences hold."""
    return self.pool.num_pages - self.pool.num_free

  def forget_contents(self) -> None:
    """Make sure that no page filled so far is shared with later sequences."""
    self.pool.forget_names()

  def find(
    self, tokens: Int[np.ndarray, "T"], lineage: sequence_lib.Lineage
  ) -> list[int]:
    """Return the pages that hold the beginning of these tokens now.

    Nobody holds them for the caller: they may be filled again by any program
    that is dispatched later. Without `kept_tokens` the list is empty.
    """
    if not self.pool.max_kept:
      return []
    return self.pool.pages_of(
      tokens, page_tokens=self._sizes.page_tokens, lineage=lineage
    )

  def name(self, ticket: int, cached: Int[np.ndarray, "T"]) -> None:
    """Name the ticket's pages that are full by now, if pages are kept.

    Args:
      ticket: the ticket that holds them.
      cached: all tokens of its sequence that are cached. Later programs must
        not write to their whole pages.
    """
    if self.pool.max_kept:
      self.pool.name_more(
        self._held[ticket], cached, page_tokens=self._sizes.page_tokens
      )

  def row(self, ticket: int) -> Int[np.ndarray, "P"]:
    """Return a ticket's pages, padded with num_pages, which is no page."""
    sizes = self._sizes
    row = np.full((sizes.pages_per_slot,), sizes.num_pages, np.int32)
    pages = self._held[ticket].pages
    row[: len(pages)] = pages
    return row

  def tables(self, tickets: Mapping[int, int]) -> Tables | None:
    """Return the page tables that `Engine.generate` takes.

    Args:
      tickets: the ticket in each slot, for the slots whose sequence the host
        knows.
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
  """Build the admission for the layout of the cache.

  Args:
    sizes: shapes of the engine's programs.
    steps_ahead: as in `PageAdmission`.
  """
  if sizes.num_pages:
    return PageAdmission(sizes, steps_ahead)
  return SlotAdmission(sizes)
