"""The pool of cache pages: which pages are free, and how many hold each page.

Sequences that begin with the same tokens share the pages that prefill filled
with these tokens. A shared page is found by its name, which consists of its own
tokens and of a number that stands for the page before it. So a name is exact,
and no longer for a page at the end of a long sequence than for the first one.
The holders of a page are counted, and it becomes free when no holder is left.
"""

import collections
from collections.abc import Hashable, Sequence
import itertools

import numpy as np


class PagePool:
  """A pool of pages that counts the holders of each page.

  Invariant: every page is either free or has at least one holder, and every
  name points to a page that has a holder.

  Threads: one thread at a time.
  """

  def __init__(self, num_pages: int):
    """Create a pool of free pages."""
    self.num_pages = num_pages
    self._free = list(range(num_pages))[::-1]
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
    return len(self._free)

  def take(self) -> int:
    """Take a free page, which then has one holder.

    Raises:
      IndexError: no page is free; check `num_free` first.
    """
    page = self._free.pop()
    self._holders[page] = 1
    self._numbers[page] = next(self._counter)
    return page

  def find(self, name: Hashable) -> int | None:
    """Return the page with a name and add a holder; None if there is none."""
    page = self._named.get(name)
    if page is not None:
      self._holders[page] += 1
    return page

  def name(self, page: int, name: Hashable) -> None:
    """Give a held page a name that stands for its contents."""
    self._named[name] = page
    self._names[page] = name

  def take_for(
    self,
    cached: np.ndarray,
    *,
    bucket: int,
    page_tokens: int,
    adapter: int = 0,
  ) -> tuple[list[int], np.ndarray] | None:
    """Take pages for prefilled tokens, sharing existing full pages.

    Args:
      cached: the tokens.
      bucket: the bucket in which they were prefilled. Pages are shared only
        within a bucket, because another bucket gives other bits.
      page_tokens: number of tokens per page.
      adapter: the adapter that they were prefilled with; pages are shared only
        within one.

    Returns:
      The pages that hold the tokens, and an array with one entry for each page
      of the bucket: the page that must be filled with these tokens, or
      num_pages if none has to be filled. None if too few pages are free.
    """
    pages = []
    new = np.full((bucket // page_tokens,), self.num_pages, np.int32)
    num_whole = len(cached) // page_tokens
    # The bytes of each whole page, made by one call.
    own = cached[: num_whole * page_tokens].view(
      np.dtype((np.void, cached.itemsize * page_tokens))
    )
    contents: list[bytes] = own.tolist()
    before: Hashable = (bucket, adapter)
    for index in range(-(-len(cached) // page_tokens)):
      is_whole = index < num_whole
      name = (before, contents[index]) if is_whole else None
      page = self.find(name)
      if page is None:
        if not self._free:
          self.release(pages)
          return None
        page = new[index] = self.take()
        if is_whole:
          self.name(page, name)
      pages.append(page)
      before = self._numbers[page]
    return pages, new

  def release(self, pages: Sequence[int]) -> None:
    """Remove one holder from each page."""
    for page in pages:
      self._holders[page] -= 1
      if not self._holders[page]:
        del self._holders[page]
        name = self._names.pop(page, None)
        if name is not None:
          del self._named[name]
        self._free.append(page)

  def forget_names(self) -> None:
    """Forget all names, so that no page filled so far is shared any more.

    This is for a change of weights, which makes the contents outdated.
    """
    self._named.clear()
    self._names.clear()
