"""Which page of the cache belongs to whom.

Pages filled by prefill are shared between sequences that begin alike: found by
their contents' name, counted, and free when nobody holds them any more.
"""

import collections
from collections.abc import Hashable, Sequence

import numpy as np


class PagePool:
  """Counts the holders of each page.

  Invariant: a page is free, or held by at least one; a name points to a page
  that is held. Threads: one at a time.
  """

  def __init__(self, num_pages: int):
    self.num_pages = num_pages
    self._free = list(range(num_pages))[::-1]
    self._holders: collections.Counter[int] = collections.Counter()
    self._named: dict[Hashable, int] = {}
    self._names: dict[int, Hashable] = {}

  @property
  def num_free(self) -> int:
    """Pages nobody holds."""
    return len(self._free)

  def take(self) -> int:
    """A free page, now held once.

    Raises:
      IndexError: there is none; ask `num_free` before.
    """
    page = self._free.pop()
    self._holders[page] = 1
    return page

  def find(self, name: Hashable) -> int | None:
    """The page of that name, held once more; None if there is none."""
    page = self._named.get(name)
    if page is not None:
      self._holders[page] += 1
    return page

  def name(self, page: int, name: Hashable) -> None:
    """Says what a page will hold from now on."""
    self._named[name] = page
    self._names[page] = name

  def take_for(
    self, cached: np.ndarray, *, bucket: int, page_tokens: int
  ) -> tuple[list[int], np.ndarray] | None:
    """Pages for prefilled tokens: whole ones are shared where they exist.

    Args:
      cached: the tokens.
      bucket: in which they were prefilled; another gives other bits.
      page_tokens: of a page.

    Returns:
      The pages, and for each of the bucket's which of them is to be filled:
      num_pages means not. None when there are too few.
    """
    pages = []
    new = np.full((bucket // page_tokens,), self.num_pages, np.int32)
    for index in range(-(-len(cached) // page_tokens)):
      end = (index + 1) * page_tokens
      is_whole = end <= len(cached)
      name = (bucket, cached[:end].tobytes()) if is_whole else None
      page = self.find(name)
      if page is None:
        if not self._free:
          self.release(pages)
          return None
        page = new[index] = self.take()
        if is_whole:
          self.name(page, name)
      pages.append(int(page))
    return pages, new

  def release(self, pages: Sequence[int]) -> None:
    """Gives up one hold of each page."""
    for page in pages:
      self._holders[page] -= 1
      if not self._holders[page]:
        del self._holders[page]
        name = self._names.pop(page, None)
        if name is not None:
          del self._named[name]
        self._free.append(page)

  def forget_names(self) -> None:
    """Nothing is shared with what is there: its weights are old."""
    self._named.clear()
    self._names.clear()
