"""What a source of items is: reasoning-gym, a file, a list, your own.

A source has named splits, each of them a sequence of items without an end. The
item at an index of a split is always the same, in every process and at every
start, so an index is all that a checkpoint has to keep of a stream. A source of
finite data begins again after its last item, and may shuffle each pass anew as
long as the order follows from the source's seed, the split and the index.

An item is a dict. It becomes `types.Prompt.item`, is stored in checkpoints, and
is what a scorer is given. It has these entries, and any others that a scorer
wants:

    index       int, names the item within its split; the same one for the same
                question in a later pass
    question    str, what is asked: two items with the same question are one
    metadata    dict, may be missing: what else a prompt's template may name
    answer      what is right, if it is known; a warm start checks it

Entries must be of the types that `storage.item_json` can store. A source of
real data maps the columns of its files to these entries.

`prompts` does the rest for all sources: it fills in the template, tokenizes,
skips prompts that are too long, and keeps the place.
"""

from collections.abc import Collection, Iterator, Mapping
import enum
from typing import Any, Protocol, runtime_checkable

from jaxrl_async.config import sections
from jaxrl_async.storage import item_json


class Split(enum.StrEnum):
  """The splits that a run asks for by itself.

  Each source has `TRAIN` and `EVAL`. `WARM_START` is needed for a warm start
  from worked solutions. A source may have further splits of its own.
  """

  TRAIN = "train"
  WARM_START = "warm_start"
  EVAL = "eval"


class SourceError(RuntimeError):
  """A source failed to give an item that it should have."""


@runtime_checkable
class ItemStream(Protocol):
  """The items of one split in order, from an index on.

  Threads: one at a time.
  """

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return whether `next` would return at once.

    The rollout thread asks between two decode calls, and goes on decoding while
    the answer is no. A source that takes long to make an item therefore makes
    it in another process or thread.

    Args:
      timeout_s: how long to wait for the item before the answer is no.

    Raises:
      SourceError: the next item will never be there.
    """
    ...

  def next(self) -> dict[str, Any] | None:
    """Return the item at the next index; wait until it is there.

    Returns:
      None if the split has no item at that index, which takes up the index all
      the same. A source that sorts items into splits as it makes them does
      this instead of counting.

    Raises:
      sections.ConfigError: the source cannot be used as it is configured.
      SourceError: the item could not be made.
    """
    ...

  def close(self) -> None:
    """End what makes items ahead of time. May be called twice."""
    ...


@runtime_checkable
class Source(Protocol):
  """Items in splits, each a function of (seed, split, index) alone.

  The source promises that no question of `EVAL` is in another split: held-out
  accuracy means nothing otherwise, and nobody else checks it.

  Attributes:
    name: begins the prompt ids, and names the source in messages.
    params: what the items depend on besides name and seed, of types that
      `storage.item_json` can store.
    versions: of the code or files that the items come from, by name. Held-out
      questions that a workdir keeps are made again if a version, a parameter
      or the name has changed.
    splits: names of the splits.
  """

  @property
  def name(self) -> str: ...

  @property
  def params(self) -> Mapping[str, Any]: ...

  @property
  def versions(self) -> Mapping[str, str]: ...

  @property
  def splits(self) -> Collection[str]: ...

  def check(self) -> None:
    """Check what can be checked at once, and begin to load what takes long.

    A mistake that shows only when an item is made is raised by the stream.

    Raises:
      sections.ConfigError: the source cannot be used; one line that names the
        setting.
    """
    ...

  def open(
    self, split: str, first_index: int, *, num_workers: int
  ) -> ItemStream:
    """Begin to make a split's items from an index on; return at once.

    Args:
      split: one of `splits`.
      first_index: of the first item; 0 or more.
      num_workers: how many processes may make items at the same time. The
        items must not depend on it; a source that needs none ignores it.
    """
    ...


def stored(item: dict[str, Any], source_name: str) -> Any:
  """Return an item as JSON, for `item_json.decode`.

  Raises:
    sections.ConfigError: it holds what a checkpoint cannot store.
  """
  try:
    return item_json.encode(item)
  except item_json.UnstorableError as error:
    raise sections.ConfigError(
      f"task.dataset: {source_name} cannot be used, because its items hold"
      f" {error}, which a checkpoint cannot store"
    ) from error


class IteratorStream:
  """An `ItemStream` of an iterator that is quick to ask for its next item."""

  def __init__(self, items: Iterator[dict[str, Any] | None]):
    """Take over an iterator, which begins at the stream's first index."""
    self._items = items

  def is_ready(self, timeout_s: float = 0.0) -> bool:
    """Return True: `next` asks the iterator for its item."""
    return True

  def next(self) -> dict[str, Any] | None:
    """Return the iterator's next item.

    Raises:
      SourceError: the iterator ended.
    """
    for item in self._items:
      return item
    raise SourceError("a split ended, where it should have begun again")

  def close(self) -> None:
    """Do nothing, because nothing runs ahead of time."""
